"""The engine and the reference twin take equal decisions, given the measured durations of steps and loads.

The reference twin shares no code with the compiled rules of the engine.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from capplan.engine import Engine, ModelConfig, SamplingParams
from capplan.engine.lora.loader import VirtualLoader
from capplan.engine.scheduler_output import Decision
from capplan.twin.reference.scheduler import ReferenceScheduler
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


def draw(seed: int, rules: str) -> tuple[Engine, list[TimedRequest]]:
    """Return a random engine, so small that requests and adapters compete, and its requests."""
    rng = np.random.default_rng(seed)
    adapters = {f"a{i}": int(rng.integers(1, 9)) for i in range(rng.integers(2, 7))}
    a_max = int(rng.integers(1, len(adapters) + 1))
    shared = int(rng.choice([0, 0, 9]))
    block_size = int(rng.integers(2, 6))
    engine = Engine(
        TINY,
        adapters,
        virtual_time=True,
        rules=rules,
        max_loras=a_max,
        max_cpu_loras=int(rng.integers(a_max, len(adapters) + 1)),
        block_size=block_size,
        max_model_len=60,
        num_kv_blocks=-(-60 // block_size) + int(rng.integers(0, 6)),
        max_num_seqs=int(rng.integers(2, 12)),
        max_num_batched_tokens=int(rng.integers(4, 60)),
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


def twin_decisions(engine: Engine, arrivals: Sequence[TimedRequest], stretch: int = 1) -> list[Decision]:
    """Return the reference twin's decisions under the engine's measured durations, steps stretched."""
    limits = engine.core.limits
    twin = ReferenceScheduler(limits, engine.sizes.num_blocks, len(engine.adapters))
    steps_ns = iter([record.duration_ns for record in engine.records])
    assert isinstance(engine.core.loader, VirtualLoader)
    loads_ns = iter(engine.core.loader.durations_ns)
    decisions = []
    coming: list[tuple[int, int]] = []  # (time, adapter)
    now_ns = upcoming = copier_free_ns = 0
    while True:
        while upcoming < len(arrivals) and arrivals[upcoming].arrival_ns <= now_ns:
            arrival = arrivals[upcoming]
            upcoming += 1
            adapter = 0 if arrival.adapter is None else 1 + engine.adapters.index(arrival.adapter)
            shared = engine.options.shared_prefix_tokens
            twin.submit(upcoming, adapter, len(arrival.prompt), arrival.params.max_tokens, 0, shared)
        while coming and coming[0][0] <= now_ns:
            twin.adapter_loaded(coming.pop(0)[1])
        step = twin.schedule()
        if step.tokens or step.loads:
            decisions.append(Decision(now_ns, step.tokens, step.preempted, step.loads))
        if limits.load_beside:
            for adapter, _ in step.loads:
                loaded, duration_ns = next(loads_ns)
                assert loaded == adapter
                copier_free_ns = max(copier_free_ns, now_ns) + duration_ns
                coming.append((copier_free_ns, adapter))
        if step.tokens:
            now_ns += stretch * next(steps_ns)
            twin.commit()
            continue
        events = [coming[0][0]] if coming else []
        if upcoming < len(arrivals):
            events.append(arrivals[upcoming].arrival_ns)
        if not events:
            return decisions
        now_ns = min(events)


@pytest.mark.parametrize("rules", ["vllm-0.8", "vllm-0.11", "vllm-0.32-sync", "capplan"])
def test_decisions_equal_the_twins_under_measured_durations(rules: str) -> None:
    preemptions = loads = from_disk = chunks = 0
    for seed in range(20 if rules in ("vllm-0.8", "capplan") else 6):
        engine, arrivals = draw(seed, rules)
        engine.core.decisions = []
        answers = replay(engine, arrivals)
        assert all(answer is not None for answer in answers)
        assert engine.core.decisions == twin_decisions(engine, arrivals)
        check_engine(engine)
        preemptions += sum(len(decision.preempted) for decision in engine.core.decisions)
        loads += sum(len(decision.loads) for decision in engine.core.decisions)
        from_disk += sum(disk for decision in engine.core.decisions for _, disk in decision.loads)
        chunks += sum(record.prefill_tokens < record.prefill_requests * 10 for record in engine.records)
    assert min(preemptions, loads, from_disk, chunks) > 2  # otherwise the comparison is weak


def test_other_durations_lead_to_other_decisions() -> None:
    for seed in range(20):
        engine, arrivals = draw(seed, "vllm-0.8")
        engine.core.decisions = []
        replay(engine, arrivals)
        engine.records.extend([engine.records[-1]] * 1000)  # other durations lead to other numbers of steps
        if engine.core.decisions != twin_decisions(engine, arrivals, stretch=4):
            return
    pytest.fail("durations make no difference")
