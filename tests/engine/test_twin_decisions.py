"""The engine and the reference twin take equal decisions, given the measured durations of steps and loads.

The reference twin shares no code with the compiled rules of the engine.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pytest

from capplan.engine import Decision, Engine, EngineOptions, SamplingParams
from capplan.engine import _engine_core as engine_core
from capplan.engine.lora._loader import VirtualLoader
from capplan.serving import RULES, Limits, ServingRules, State
from capplan.serving.pooled import RESIDENT, refresh
from capplan.serving.state import POOLED
from capplan.spec import QueueClass, Queues, Scheduler, Wrs, cache_of
from tests.engine.engines import TINY_MODEL, TimedRequest, check_engine, replay
from tests.oracle.caches import CachedAdapter
from tests.oracle.host_link import ReferenceCopier
from tests.oracle.loop import reference_scheduler
from tests.oracle.pooled import ReferencePooled
from tests.oracle.scheduler import ReferenceScheduler, ReferenceStep
from tests.oracle.size_queues import SizeQueues
from tests.oracle.slora import ReferenceSlora
from tests.twin.pooled import with_period

pytestmark = pytest.mark.long

TINY = TINY_MODEL.replace(hidden_size=8, head_dim=4, intermediate_size=8, vocab_size=50, max_positions=96)
MS = 1_000_000
ReferenceSchedulers = ReferenceScheduler | ReferenceSlora | ReferencePooled
_PAGES_PER_RANK: Final = 13
"""Pages of one token that a rank of an adapter of `TINY` takes in the pool."""


def draw(seed: int, requests: int = 20, **settings: Any) -> tuple[Engine, list[TimedRequest]]:
    """Return a random engine, so small that requests and adapters compete, and its requests."""
    rng = np.random.default_rng(seed)
    options = EngineOptions.parse(settings)
    slotless = options.serving_rules().unified_memory
    adapters = {f"a{i}": int(rng.integers(1, 3 if slotless else 9)) for i in range(rng.integers(2, 7))}
    a_max = int(rng.integers(1, len(adapters) + 1))
    shared = 0 if slotless else int(rng.choice([0, 0, 9]))
    block_size = int(rng.integers(2, 6))
    spare = int(rng.integers(0, 6)) + (8 * _PAGES_PER_RANK // block_size if slotless else 0)
    if options.loading == "resident":
        spare += 2 * len(adapters) * _PAGES_PER_RANK
    engine = Engine(
        TINY,
        adapters,
        virtual_time=True,
        **settings,
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
    for _ in range(requests):
        now_ns += int(rng.integers(0, 6 * MS)) if rng.random() < 0.5 else 0
        prompt = beginning + rng.integers(0, TINY.vocab_size, rng.integers(1, 25)).tolist()
        name = None if rng.random() < 0.1 else f"a{rng.integers(len(adapters))}"
        params = SamplingParams(max_tokens=int(rng.integers(1, 20)), temperature=float(rng.integers(0, 2)))
        arrivals.append(TimedRequest(now_ns, prompt, name, params))
    return engine, arrivals


class Recorded:
    """Predictions of an engine, drawn at random, its first queues, and those of its refreshes."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.predicted: list[int] = []
        self.queues = size_queues(engine.core.state)
        self.refreshes: deque[tuple[int, SizeQueues | None]] = deque()
        self._rng = np.random.default_rng(seed)
        engine.predictor.predict = self._predict  # type: ignore[method-assign]

    def _predict(self, prompt_tokens: int, adapter: str | None, declared: int) -> int:
        self.predicted.append(int(self._rng.integers(1, 2 * declared + 1)))
        return self.predicted[-1]

    def refresh(self, state: State, limits: Limits, scheduler: Scheduler, at_ns: int) -> None:
        """Refresh the queues of the engine, and record them; None: they stay."""
        before = int(state.pooled.counts.refreshes)
        refresh(state, limits, scheduler, at_ns)
        is_new = state.pooled.counts.refreshes > before
        self.refreshes.append((at_ns, size_queues(state) if is_new else None))


def size_queues(state: State) -> SizeQueues:
    """Return the present queues of a state."""
    pooled = state.pooled
    count, wrs = int(pooled.counts.n_queues), pooled.wrs
    maxima = (int(wrs.form), int(wrs.max_prompt), int(wrs.max_output), int(wrs.max_bytes))
    quotas = pooled.queues.quota[:count].tolist()
    return SizeQueues(quotas, pooled.cuts[: count - 1].tolist(), float(wrs.a), float(wrs.b), *maxima)


def reference_of(engine: Engine, queues: SizeQueues | None) -> ReferenceSchedulers:
    """Return the reference of an engine's scheduler."""
    core = engine.core
    pages, blocks = core.state.adapters.pages, engine.sizes.num_blocks
    if queues is None:
        return reference_scheduler(core.limits, blocks, pages)
    own = core.state.pooled.adapters
    columns = (pages.tolist(), own.bytes.tolist(), own.tokens.tolist(), own.cost_ns.tolist())
    adapters = [CachedAdapter(*each) for each in zip(*columns, strict=True)]
    for adapter in adapters[1:] if core.limits.loading == RESIDENT else []:
        adapter.resident = True
    pooled = core.state.pooled
    shares = bool(pooled.counts.shares_charge)
    return ReferencePooled(
        core.limits, blocks, adapters, queues, pooled.weights.tolist(), shares_charge=shares
    )


class TwinReplay:
    """The reference twin under an engine's measured durations.

    Parameters
    ----------
    recorded
        Predictions and queues of the engine, under rules that use them.
    stretch
        Factor of the durations of steps.
    """

    def __init__(
        self,
        engine: Engine,
        arrivals: Sequence[TimedRequest],
        recorded: Recorded | None = None,
        stretch: int = 1,
    ) -> None:
        core = engine.core
        assert isinstance(core.loader, VirtualLoader)
        self.limits = core.limits
        self.predicted = [0] * len(arrivals) if recorded is None else recorded.predicted
        self.refreshes = deque() if recorded is None else recorded.refreshes
        self.twin = reference_of(engine, None if recorded is None else recorded.queues)
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
            begin_ns = self.now_ns
            step = self._schedule()
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

    def _schedule(self) -> ReferenceStep:
        if not isinstance(self.twin, ReferencePooled):
            return self.twin.schedule()
        while self.refreshes and self.refreshes[0][0] <= self.now_ns:
            at_ns, queues = self.refreshes.popleft()
            if queues is None:
                self.twin.cache.rotate_uses(at_ns)
            else:
                self.twin.refresh(queues, at_ns)
        return self.twin.schedule(self.now_ns)

    def _take_events(self) -> None:
        while self.arrivals and self.arrivals[0][1].arrival_ns <= self.visible_ns:
            number, (arrival_ns, prompt, name, params) = self.arrivals.popleft()
            request = (number, self.numbers[name], len(prompt), params.max_tokens)
            if isinstance(self.twin, ReferencePooled):
                predicted = self.predicted[number - 1]
                self.twin.submit(*request, predicted=predicted, arrival_ns=arrival_ns)
            else:
                self.twin.submit(*request, shared_prefix_tokens=self.shared)
        for adapter in self.copier.arrived(self.visible_ns):
            assert isinstance(self.twin, ReferenceScheduler | ReferencePooled)
            self.twin.adapter_loaded(adapter)

    def _start_loads(self, step: ReferenceStep) -> None:
        """Start asynchronous loads; other rules wait for them within the step."""
        for adapter, _ in step.loads if self.limits.load_beside else ():
            loaded, duration_ns = next(self.loads_ns)
            assert loaded == adapter
            self.copier.begin(adapter, self.now_ns, duration_ns, announce=True)


@pytest.mark.parametrize(
    ("rules", "depth"),
    [
        pytest.param(rules, depth, id=f"{rules.name}-{depth}")
        for rules in RULES
        for depth in range(1, 2 + rules.async_scheduling)
        if rules.policy != POOLED
    ],
)
def test_decisions_equal_the_twins_under_measured_durations(rules: ServingRules, depth: int) -> None:
    preemptions = loads = from_disk = chunks = 0
    for seed in range(20 if rules.name in ("vllm-0.8", "capplan") else 6):
        engine, arrivals = draw(seed, rules=rules.name)
        engine.core.depth = depth
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


SYSTEMS: Final[Mapping[str, tuple[Any, Any]]] = MappingProxyType(
    {
        "chameleon": ("chameleon", "chameleon"),
        "chameleon-chunked": ({"policy": "chameleon", "chunked": True}, "fairshare"),
        "no-bypass": ({"policy": "chameleon", "bypass": False}, "gdsf"),
        "no-cache": ("chameleon", "none"),
        "histogram": ("chameleon", {"policy": "chameleon", "prefetch": "histogram"}),
        "static": ("static", "lru"),
        "fifo": ("fifo", "none"),
        "fifo-every-ten": ({"policy": "fifo", "admit_every": 10}, "lru"),
        "no-sched": ("fifo", "chameleon"),
        "sjf": ({"policy": "sjf", "ageing_s": 0.02}, "gdsf"),
        "on-demand": ("fifo", {"policy": "none", "loading": "on-demand", "prefetch": "none"}),
        "on-demand-ahead": ("chameleon", {"policy": "gdsf", "loading": "on-demand"}),
        "strawman": ("fifo", {"policy": "none", "loading": "strawman", "prefetch": "none"}),
        "assisted": ("fifo", {"policy": "none", "loading": "assisted", "prefetch": "none"}),
        "assisted-ahead": ("chameleon", {"policy": "lru", "loading": "assisted"}),
        "resident": ("chameleon", {"policy": "none", "loading": "resident"}),
        "cached": ("fifo", {"policy": "none", "loading": "cached"}),
        "sjf-chunked": ({"policy": "sjf", "chunked": True}, {"policy": "lru", "prefetch": "none"}),
    }
)


QUEUED: Final = (
    "chameleon",
    "chameleon-chunked",
    "no-bypass",
    "no-cache",
    "histogram",
    "static",
    "on-demand-ahead",
    "assisted-ahead",
)


def drawn_queues(rng: np.random.Generator) -> Queues | None:
    """Return up to three queues for the requests of `draw`."""
    cuts = sorted(rng.uniform(0.05, 0.6, rng.integers(0, 3)).tolist())
    wrs = Wrs(a=0.4, b=0.6, max_prompt_tokens=25, max_output_tokens=20, max_adapter_bytes=1500)
    classes = tuple(
        QueueClass(upper_wrs=cut, quota_tokens=int(rng.integers(40, 500))) for cut in (*cuts, None)
    )
    return Queues(wrs=wrs, classes=classes)


def replayed_in_one_pool(
    monkeypatch: pytest.MonkeyPatch, seed: int, requests: int, system: str, period_s: float, **more: Any
) -> Counter[str]:
    """Check that an engine decides as the reference twin, with wrong predictions; return its counts."""
    given, cache = SYSTEMS[system]
    scheduler = Scheduler(**({"policy": given} if isinstance(given, str) else given), **more)
    queues = drawn_queues(np.random.default_rng(seed)) if scheduler.policy == "chameleon" else None
    kept = cache_of(cache)
    if scheduler.has_queues or (kept is not None and kept.counts_uses):  # others do not read the period
        scheduler = with_period(scheduler, period_s)
    engine, arrivals = draw(seed, requests, scheduler=scheduler, cache=cache, queues=queues)
    recorded = Recorded(engine, seed)
    monkeypatch.setattr(engine_core, "refresh", recorded.refresh)
    engine.core.decisions = []
    assert all(answer is not None for answer in replay(engine, arrivals))
    assert engine.core.decisions == TwinReplay(engine, arrivals, recorded).decisions()
    check_engine(engine)
    counts = engine.core.state.pooled.counts
    return Counter(dict(zip(counts.dtype.names or (), counts.tolist(), strict=True)))


@pytest.mark.parametrize("system", SYSTEMS)
def test_decisions_in_one_pool_equal_the_twins(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        seen += replayed_in_one_pool(monkeypatch, seed, 14, system, 0.02)
    if system in ("resident", "cached"):
        assert seen["hits"] > 2
        assert seen["misses"] == 0
        return
    names = ["misses", "evictions", *(["overruns"] if system in QUEUED else [])]
    assert min(seen[name] for name in names) > 2  # otherwise the comparison is weak
    assert seen["bypasses"] > 0 or system != "chameleon"


def test_queues_refreshed_between_steps_equal_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = replayed_in_one_pool(monkeypatch, 3, 450, "chameleon", 0.6, queues={"max_queues": 2})
    assert seen["refreshes"] > 0


def test_other_durations_lead_to_other_decisions() -> None:
    for seed in range(20):
        engine, arrivals = draw(seed, rules="vllm-0.8")
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
