"""The readable twin: the serving rules as one would tell them, with plain lists, one request at a time.

It shares the step-latency and loading costs with the compiled twin and nothing else; on any scenario both
must leave the same trace. Slow on purpose: it scans the whole waiting queue in every step, as the engine
does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from capplan.models.step_latency import StepFeatures, step_ms
from capplan.serving import Limits
from capplan.twin import trace as t
from capplan.twin.scenario import Scenario


@dataclass
class _Request:
    index: int
    adapter: int
    prompt: int
    target: int
    computed: int = 0
    output: int = 0
    last_token_ns: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.output


@dataclass
class _Lru:
    """Adapters from the least to the most recently used."""

    capacity: int
    order: list[int] = field(default_factory=list)

    def touch(self, adapter: int) -> None:
        self.order.remove(adapter)
        self.order.append(adapter)

    def insert(self, adapter: int, in_use: set[int]) -> int | None:
        """Add an adapter and return the idle one that had to go, if any."""
        victim = None
        if len(self.order) == self.capacity:
            victim = next(a for a in self.order if a not in in_use)
            self.order.remove(victim)
        self.order.append(adapter)
        return victim


class _Engine:
    def __init__(self, scenario: Scenario) -> None:
        limits = scenario.limits
        self.limits: Limits = limits
        self.free_blocks = scenario.num_blocks
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.slots = _Lru(limits.max_loras)
        first_on_host = max(1, scenario.adapters - limits.max_cpu_loras + 1)
        self.host = _Lru(limits.max_cpu_loras, list(range(first_on_host, scenario.adapters + 1)))

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def in_use(self) -> set[int]:
        return {r.adapter for r in self.running} - {0}

    def schedule(self) -> tuple[dict[int, int], list[_Request], list[tuple[int, bool]]]:
        """Return tokens by position in `running`, preempted requests, and loads (adapter, from disk)."""
        limits = self.limits
        budget = limits.max_num_batched_tokens
        scheduled: dict[int, int] = {}
        preempted: list[_Request] = []
        at = 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            tokens = min(self._wanted(request), budget)
            needed = self.blocks(request.computed + tokens) - self.blocks(request.computed)
            while needed > self.free_blocks and len(self.running) > at:
                preempted.append(self._preempt_last())
            if len(self.running) == at:
                break
            self.free_blocks -= needed
            scheduled[at] = tokens
            budget -= tokens
            at += 1
        loads = [] if preempted else self._admit(budget, scheduled)
        return scheduled, preempted, loads

    def _wanted(self, request: _Request) -> int:
        missing = request.known - request.computed
        return min(missing, self.limits.long_prefill_tokens or missing)

    def _preempt_last(self) -> _Request:
        request = self.running.pop()
        self.free_blocks += self.blocks(request.computed)
        self._idle(request.adapter)
        request.computed = 0
        self.waiting.appendleft(request)
        return request

    def _admit(self, budget: int, scheduled: dict[int, int]) -> list[tuple[int, bool]]:
        limits = self.limits
        aside: list[_Request] = []
        loads: list[tuple[int, bool]] = []
        while self.waiting and budget > 0 and len(self.running) < limits.max_num_seqs:
            request = self.waiting[0]
            active = self.in_use()
            if request.adapter and request.adapter not in active and len(active) == limits.max_loras:
                aside.append(self.waiting.popleft())
                continue
            tokens = min(self._wanted(request), budget)
            must_fit = self.blocks(request.known if limits.reserve_full_sequence else tokens)
            reserve = limits.watermark_blocks if self.running else 0
            if must_fit + reserve > self.free_blocks:
                break
            self.waiting.popleft()
            if request.adapter and request.adapter not in active:
                loads += self._load(request.adapter, active)
            self.running.append(request)
            self.free_blocks -= self.blocks(tokens)
            scheduled[len(self.running) - 1] = tokens
            budget -= tokens
        self.waiting.extendleft(aside if limits.reverse_set_aside else reversed(aside))
        return loads

    def _load(self, adapter: int, active: set[int]) -> list[tuple[int, bool]]:
        from_disk = adapter not in self.host.order
        if from_disk:
            victim = self.host.insert(adapter, active)
            if victim in self.slots.order:
                self.slots.order.remove(victim)
        else:
            self.host.touch(adapter)
        if adapter in self.slots.order:
            self.slots.touch(adapter)
            return []
        self.slots.insert(adapter, active)
        return [(adapter, from_disk)]

    def finish(self, request: _Request) -> None:
        """Take a finished request out of the running ones."""
        self.running.remove(request)
        self.free_blocks += self.blocks(request.computed)
        self._idle(request.adapter)

    def _idle(self, adapter: int) -> None:
        """Make an adapter that nobody uses any more the most recently used of the idle ones."""
        if adapter and adapter not in self.in_use():
            self.slots.touch(adapter)
            self.host.touch(adapter)


def run_reference(scenario: Scenario) -> t.Trace:
    """Simulate `scenario` to its horizon, slowly; signature and result of `capplan.twin.core.run`."""
    requests, limits = scenario.requests, scenario.limits
    engine = _Engine(scenario)
    trace = t.new_trace(requests.arrival_ns.size)
    counts = trace.counts
    upcoming = 0
    now = 0
    while now < scenario.horizon_ns:
        while upcoming < requests.arrival_ns.size and requests.arrival_ns[upcoming] <= now:
            prompt = int(requests.prompt_tokens[upcoming])
            in_flight = len(engine.running) + len(engine.waiting)
            if in_flight >= scenario.max_in_flight or prompt >= limits.max_model_len:
                counts[t.REJECTED] += 1
            else:
                target = min(int(requests.output_tokens[upcoming]), limits.max_model_len - prompt)
                engine.waiting.append(_Request(upcoming, int(requests.adapter[upcoming]), prompt, target))
            upcoming += 1
        scheduled, preempted, loads = engine.schedule()
        if not scheduled:
            if upcoming >= requests.arrival_ns.size or requests.arrival_ns[upcoming] >= scenario.horizon_ns:
                break
            now = int(requests.arrival_ns[upcoming])
            continue
        duration = _charge(scenario, engine, trace, sum(scheduled.values()), loads)
        now += duration
        counts[t.PREEMPTIONS] += len(preempted)
        _commit(engine, trace, scheduled, now)
    counts[t.NOW_NS], counts[t.NEXT_REQUEST] = now, upcoming
    for request in engine.running:
        trace.running_at_end[request.index] = 1
    return trace


def _charge(
    scenario: Scenario, engine: _Engine, trace: t.Trace, tokens: int, loads: list[tuple[int, bool]]
) -> int:
    costs, counts, sums = scenario.costs, trace.counts, trace.sums
    load_ns = sum(
        int(costs.load_ns[a]) + (int(costs.disk_ns[a]) if from_disk else 0) for a, from_disk in loads
    )
    features = StepFeatures(
        tokens=float(tokens),
        requests=float(len(engine.running)),
        kv_tokens=float(sum(r.computed for r in engine.running)),
        adapters=float(len(engine.in_use())),
        a_max=float(costs.a_max),
        s_max=float(costs.s_max),
        waiting=float(len(engine.waiting)),
        slots_per_adapter=costs.slots_per_adapter,
    )
    duration = load_ns + round(step_ms(costs.form, costs.coefficients, features) * 1e6)
    counts[t.ADAPTER_LOADS] += len(loads)
    counts[t.DISK_LOADS] += sum(from_disk for _, from_disk in loads)
    counts[t.LOAD_NS] += load_ns
    counts[t.STEPS] += 1
    counts[t.MAX_RUNNING] = max(counts[t.MAX_RUNNING], len(engine.running))
    counts[t.MAX_WAITING] = max(counts[t.MAX_WAITING], len(engine.waiting))
    sums[t.BUSY_NS] += duration
    sums[t.RUNNING_NS] += features.requests * duration
    sums[t.WAITING_NS] += features.waiting * duration
    sums[t.KV_TOKEN_NS] += features.kv_tokens * duration
    sums[t.ADAPTER_NS] += features.adapters * duration
    return duration


def _commit(engine: _Engine, trace: t.Trace, scheduled: dict[int, int], now: int) -> None:
    finished = []
    for at, request in enumerate(engine.running):
        request.computed += scheduled.get(at, 0)
        if at not in scheduled or request.computed < request.known:
            continue
        request.output += 1
        if request.output == 1:
            trace.first_ns[request.index] = now
        else:
            trace.gaps[t.gap_bin(now - request.last_token_ns)] += 1
        request.last_token_ns = now
        if request.output == request.target:
            finished.append(request)
    for request in finished:
        trace.finish_ns[request.index] = now
        engine.finish(request)
