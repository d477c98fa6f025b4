"""The engine and the reference twin take equal decisions, given the measured durations of steps and loads.

The reference twin shares no code with the compiled rules of the engine.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest

from capplan.engine import Engine, ModelConfig, SamplingParams
from capplan.engine.lora.loader import VirtualLoader
from capplan.engine.scheduler_output import Decision
from capplan.serving import RULES, ServingRules, serving_rules
from capplan.twin.reference.host_link import ReferenceCopier
from capplan.twin.reference.loop import reference_scheduler
from capplan.twin.reference.scheduler import ReferenceScheduler, ReferenceStep
from tests.engine.engines import TimedRequest, check_engine, replay

TINY = ModelConfig(
    name="tiny",
    layers=1,
    hidden_size=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate_size=8,
    vocab_size=50,
    max_positions=96,
)
MS = 1_000_000
_PAGES_PER_RANK: Final = 13
"""Pages of one token that a rank of an adapter of `TINY` takes in the pool."""


def draw(seed: int, rules: str) -> tuple[Engine, list[TimedRequest]]:
    """Return a random engine, so small that requests and adapters compete, and its requests."""
    rng = np.random.default_rng(seed)
    slotless = serving_rules(rules).unified_memory
    adapters = {f"a{i}": int(rng.integers(1, 3 if slotless else 9)) for i in range(rng.integers(2, 7))}
    a_max = int(rng.integers(1, len(adapters) + 1))
    shared = int(rng.choice([0, 0, 9]))
    block_size = int(rng.integers(2, 6))
    spare = int(rng.integers(0, 6)) + (8 * _PAGES_PER_RANK // block_size if slotless else 0)
    engine = Engine(
        TINY,
        adapters,
        virtual_time=True,
        rules=rules,
        max_loras=a_max,
        max_cpu_loras=None if slotless else int(rng.integers(a_max, len(adapters) + 1)),
        block_size=block_size,
        max_model_len=60,
        num_kv_blocks=-(-60 // block_size) + spare,
        max_num_seqs=int(rng.integers(2, 12)),
        max_num_batched_tokens=int(rng.integers(34 if slotless else 4, 60)),
        shared_prefix_tokens=shared,
    )
    beginning = rng.integers(0, TINY.vocab_size, shared).tolist()
    arrivals = []
    now_ns = 0
    for _ in range(20):
        now_ns += int(rng.integers(0, 6 * MS)) if rng.random() < 0.5 else 0
        prompt = beginning + rng.integers(0, TINY.vocab_size, rng.integers(1, 25)).tolist()
        name = None if rng.random() < 0.1 else f"a{rng.integers(len(adapters))}"
        params = SamplingParams(max_tokens=int(rng.integers(1, 20)), temperature=float(rng.integers(0, 2)))
        arrivals.append(TimedRequest(now_ns, prompt, name, params))
    return engine, arrivals


class TwinReplay:
    """The reference twin under an engine's measured durations.

    Parameters
    ----------
    stretch
        Factor of the durations of steps.
    """

    def __init__(self, engine: Engine, arrivals: Sequence[TimedRequest], stretch: int = 1) -> None:
        core = engine.core
        assert isinstance(core.loader, VirtualLoader)
        self.limits = core.limits
        self.twin = reference_scheduler(core.limits, engine.sizes.num_blocks, core.state.adapters.pages)
        self.shared = engine.options.shared_prefix_tokens
        self.numbers = {None: 0} | {name: i for i, name in enumerate(engine.adapters, start=1)}
        self.arrivals = deque(enumerate(arrivals, start=1))
        self.steps_ns = iter([stretch * record.duration_ns for record in engine.records])
        self.loads_ns = iter(core.loader.durations_ns)
        self.copier = ReferenceCopier()
        self.now_ns = self.visible_ns = 0

    def decisions(self) -> list[Decision]:
        """Return the decisions up to the last request."""
        decisions = []
        while True:
            self._take_events()
            step = self.twin.schedule()
            begin_ns = self.now_ns
            if step.tokens or step.loads:
                decisions.append(Decision(begin_ns, step.tokens, step.preempted, step.loads))
            self._start_loads(step)
            asynchronous = bool(self.limits.async_scheduling)
            if step.tokens:
                self.now_ns += next(self.steps_ns)
                self.twin.commit()
                self.visible_ns = begin_ns if asynchronous else self.now_ns
            elif asynchronous and (self.visible_ns < self.now_ns or self.twin.running):
                self.twin.commit()
                self.visible_ns = self.now_ns
            else:
                events = [self.arrivals[0][1].arrival_ns] if self.arrivals else []
                copied_ns = self.copier.next_ns()
                events += [] if copied_ns is None else [copied_ns]
                if not events:
                    return decisions
                self.now_ns = self.visible_ns = min(events)

    def _take_events(self) -> None:
        while self.arrivals and self.arrivals[0][1].arrival_ns <= self.visible_ns:
            number, (_, prompt, name, params) = self.arrivals.popleft()
            self.twin.submit(
                number, self.numbers[name], len(prompt), params.max_tokens, shared_prefix_tokens=self.shared
            )
        for adapter in self.copier.arrived(self.visible_ns):
            assert isinstance(self.twin, ReferenceScheduler)
            self.twin.adapter_loaded(adapter)

    def _start_loads(self, step: ReferenceStep) -> None:
        """Start asynchronous loads; other rules wait for them within the step."""
        for adapter, _ in step.loads if self.limits.load_beside else ():
            loaded, duration_ns = next(self.loads_ns)
            assert loaded == adapter
            self.copier.begin(adapter, self.now_ns, duration_ns, announce=True)


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: rules.name)
def test_decisions_equal_the_twins_under_measured_durations(rules: ServingRules) -> None:
    preemptions = loads = from_disk = chunks = 0
    for seed in range(20 if rules.name in ("vllm-0.8", "capplan") else 6):
        engine, arrivals = draw(seed, rules.name)
        engine.core.decisions = []
        answers = replay(engine, arrivals)
        assert all(answer is not None for answer in answers)
        assert engine.core.decisions == TwinReplay(engine, arrivals).decisions()
        check_engine(engine)
        preemptions += sum(len(decision.preempted) for decision in engine.core.decisions)
        loads += sum(len(decision.loads) for decision in engine.core.decisions)
        from_disk += sum(disk for decision in engine.core.decisions for _, disk in decision.loads)
        chunks += sum(record.prefill_tokens < record.prefill_requests * 10 for record in engine.records)
    seen = [loads, chunks] if rules.unified_memory else [loads, chunks, preemptions, from_disk]
    assert min(seen) > 2  # otherwise the comparison is weak


def test_other_durations_lead_to_other_decisions() -> None:
    for seed in range(20):
        engine, arrivals = draw(seed, "vllm-0.8")
        engine.core.decisions = []
        replay(engine, arrivals)
        engine.records.extend([engine.records[-1]] * 1000)  # other durations lead to other numbers of steps
        if engine.core.decisions != TwinReplay(engine, arrivals, stretch=4).decisions():
            return
    pytest.fail("durations make no difference")


@pytest.mark.parametrize("rules", ["vllm-0.8", "capplan"])
def test_an_engine_without_adapters_has_no_slots(rules: str) -> None:
    rng = np.random.default_rng(0)
    sizes = {"block_size": 4, "max_model_len": 60, "num_kv_blocks": 20, "max_num_seqs": 4}
    engine = Engine(TINY, {}, virtual_time=True, rules=rules, **sizes)
    assert (engine.sizes.args.max_loras, engine.sizes.args.max_lora_rank) == (0, 0)
    arrivals = [
        TimedRequest(i * MS, rng.integers(0, 50, 9).tolist(), None, SamplingParams(max_tokens=1 + i % 9))
        for i in range(12)
    ]
    engine.core.decisions = []
    answers = replay(engine, arrivals)
    assert all(answer is not None for answer in answers)
    assert engine.core.decisions == TwinReplay(engine, arrivals).decisions()
    check_engine(engine)
