"""Reference implementation of the twin: plain lists, one request at a time.

It shares only the costs and the record with the compiled twin. Both leave the same trace on any scenario. It
is slow: like the engine it scans the whole waiting queue in every step, and it never fast-forwards.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias, Unpack

import numpy as np
from numpy.typing import NDArray

from capplan.models import StepFeatures, StepRanks, rank_ms, step_ms
from capplan.serving import Limits
from capplan.serving.pooled import ASSISTED, ASYNCHRONOUS, ON_DEMAND
from capplan.serving.state import POOLED, SLORA
from capplan.spec import Profile, Workload
from capplan.twin.instance import (
    Scenario,
    SimulateSettings,
    SimulationResult,
    result_of,
    scenario_of,
    typed_settings,
)
from capplan.twin.instance import _trace as t
from capplan.twin.instance import _trace as trace
from capplan.twin.instance._clock import with_reloads_ns
from tests.oracle.assist import assisted_ns
from tests.oracle.host_link import ReferenceCopier
from tests.oracle.pooled import ReferencePooled
from tests.oracle.scheduler import ReferenceRequest, ReferenceScheduler, ReferenceStep
from tests.oracle.set_up import reference_pool, refreshed_queues
from tests.oracle.size_queues import PooledRequest
from tests.oracle.slora import ReferenceSlora


def simulate_with_reference(
    workload: Workload, profile: Profile, **settings: Unpack[SimulateSettings]
) -> SimulationResult:
    """Return the result of `simulate`, computed by `run_reference`."""
    scenario = scenario_of(workload, profile, *typed_settings(workload, profile, settings))
    return result_of(profile, scenario, run_reference(scenario))


def run_reference(scenario: Scenario) -> t.TwinTrace:
    """Simulate `scenario` to its horizon; signature and result of `capplan.twin.instance._core.run`."""
    limits, num_blocks = scenario.limits, scenario.num_blocks
    if scenario.pool is not None and limits.policy == POOLED:
        return _PooledRun(scenario, reference_pool(limits, num_blocks, scenario.pool)).finish()
    return _Run(scenario, reference_scheduler(limits, num_blocks, scenario.costs.pages)).finish()


def reference_scheduler(
    limits: Limits, num_blocks: int, pages: NDArray[np.int64]
) -> ReferenceScheduler | ReferenceSlora:
    """Return the scheduler of an engine; `pages` are the KV blocks of each adapter, the base model first."""
    if limits.policy == SLORA:
        return ReferenceSlora(limits, num_blocks, pages.tolist())
    return ReferenceScheduler(limits, num_blocks, pages.size - 1)


Engine: TypeAlias = ReferenceScheduler | ReferenceSlora | ReferencePooled


class _Run:
    def __init__(self, scenario: Scenario, engine: Engine) -> None:
        self.scenario = scenario
        self.engine = engine
        self.copier = ReferenceCopier()
        requests = scenario.requests.arrival_ns.size
        waits = scenario.pool is not None
        self.trace = t.new_trace(requests, scenario.adapters, scenario.buckets, scenario.horizon_ns, waits)
        self.last_token_ns: dict[int, int] = {}
        self.upcoming = 0
        self.now_ns = 0
        self.visible_ns = 0
        """Arrivals up to this time are known when the next step is decided."""

    def finish(self) -> t.TwinTrace:
        scenario, counts = self.scenario, self.trace.counts
        asynchronous = bool(scenario.limits.async_scheduling)
        while self.now_ns < scenario.horizon_ns:
            step = self._next_step()
            begin_ns = self.now_ns
            if step.tokens:
                self.now_ns += self._charge(step)
                self._commit()
                self.visible_ns = begin_ns if asynchronous else self.now_ns
            elif asynchronous and (self.visible_ns < self.now_ns or self._awaits_last_tokens()):
                counts.preemptions += len(step.preempted)
                self._commit()
                self.visible_ns = self.now_ns
            elif (upcoming := self._next_event_ns()) < scenario.horizon_ns:
                self.now_ns = self.visible_ns = upcoming
            else:
                break
        counts.now_ns, counts.next_request = self.now_ns, self.upcoming
        for request in self.engine.running:
            if self.trace.finish_ns[request.number] != t.NEVER:
                continue  # its last token is in flight
            self.trace.status[request.number] = t.STATUS_RUNNING
        link = self.copier.link
        self.trace.pool.link_ns = link.busy_ns + sum(each.copy_ns for each in link.waiting)
        return self.trace

    def _next_step(self) -> ReferenceStep:
        """Let the scheduler decide with what has arrived, and start the loads of the step."""
        self._take_arrivals(self.visible_ns)
        self._take_copies()
        step = self._schedule()
        self._begin_loads(step)
        return step

    def _schedule(self) -> ReferenceStep:
        if isinstance(self.engine, ReferencePooled):
            return self.engine.schedule(self.now_ns)
        return self.engine.schedule()

    def _awaits_last_tokens(self) -> bool:
        """Return whether a step of zero duration is in flight."""
        return any(request.draining for request in self.engine.running)

    def _next_event_ns(self) -> int:
        """Return the time of the next arrival of a request or adapter, or the horizon."""
        upcoming = self.scenario.horizon_ns
        arrival_ns = self.scenario.requests.arrival_ns
        if self.upcoming < arrival_ns.size:
            upcoming = min(upcoming, int(arrival_ns[self.upcoming]))
        copied_ns = self.copier.next_ns()
        return upcoming if copied_ns is None else min(upcoming, copied_ns)

    def _take_copies(self) -> None:
        for adapter in self.copier.arrived(self.visible_ns):
            if not isinstance(self.engine, ReferenceSlora):
                self.engine.adapter_loaded(adapter)

    def _take_arrivals(self, until_ns: int) -> None:
        requests, engine = self.scenario.requests, self.engine
        while self.upcoming < requests.arrival_ns.size and requests.arrival_ns[self.upcoming] <= until_ns:
            i = self.upcoming
            full = len(engine.running) + len(engine.waiting) >= self.scenario.max_in_flight
            if full or not self._submit(i):
                trace.record_rejection(self.trace, i)
            self.upcoming += 1

    def _submit(self, number: int, **prediction: int) -> bool:
        requests = self.scenario.requests
        return self.engine.submit(
            number,
            int(requests.adapter[number]),
            int(requests.prompt_tokens[number]),
            int(requests.output_tokens[number]),
            shared_prefix_tokens=self.scenario.shared_prefix_tokens,
            **prediction,
        )

    def _charge(self, step: ReferenceStep) -> int:
        """Return the duration of a step, and record the step."""
        costs, counts, sums, engine = self.scenario.costs, self.trace.counts, self.trace.sums, self.engine
        in_step = {number for number, _ in step.tokens}
        # Async scheduling: a request whose last token is in flight runs without a part in the step.
        running = [r for r in engine.running if r.number in in_step or not r.draining]
        load_ns = self._wait_for_loads(step)
        tokens = sum(count for _, count in step.tokens)
        features = StepFeatures(
            tokens=float(tokens),
            requests=float(len(running)),
            kv_tokens=float(sum(r.computed for r in running) - tokens),
            adapters=float(len({r.adapter for r in running} - {0} - self._loading())),
            a_max=float(costs.a_max),
            s_max=float(costs.s_max),
            waiting=float(len(engine.waiting)),
            slots_per_adapter=costs.slots_per_adapter,
            adapters_served=float(costs.adapters_served),
        )
        milliseconds = step_ms(costs.form, costs.coefficients, self._computed(step, features))
        if costs.uses_ranks and not self._is_merged():
            milliseconds += rank_ms(costs.form, costs.coefficients, float(costs.s_max), self._ranks(step))
        step_ns = round(milliseconds * 1e6)
        load_ns += self._assistance_ns(step, step_ns)
        duration_ns = load_ns + self._switches_ns() + step_ns
        counts.load_ns += load_ns
        self._record_details(step, features, duration_ns, load_ns)
        counts.preemptions += len(step.preempted)
        counts.steps += 1
        paused_ns = load_ns if self._has_decodes(step) else duration_ns
        counts.interruptions += paused_ns > 0
        counts.interrupted_ns += paused_ns
        counts.request_steps += len(running)
        counts.small_request_steps += len(running) if len(running) <= t.SMALL_BATCH else 0
        counts.max_running = max(counts.max_running, len(running))
        counts.max_waiting = max(counts.max_waiting, len(engine.waiting))
        counts.max_kv_tokens = max(counts.max_kv_tokens, int(features.kv_tokens))
        counts.max_step_tokens = max(counts.max_step_tokens, tokens)
        sums.busy_ns += duration_ns
        sums.running_ns += features.requests * duration_ns
        sums.waiting_ns += features.waiting * duration_ns
        sums.kv_token_ns += features.kv_tokens * duration_ns
        sums.adapter_ns += features.adapters * duration_ns
        return duration_ns

    def _loading(self) -> set[int]:
        """Return the adapters for which running requests wait."""
        return set()

    def _is_merged(self) -> bool:
        """Return whether an adapter is merged into the base model in this step."""
        return False

    def _switches_ns(self) -> int:
        """Return the time of merges, and of their ends, before this step."""
        return 0

    def _computed(self, step: ReferenceStep, running: StepFeatures) -> StepFeatures:
        """Return the contents of a step, without the requests that pause in a batch of prompts (S-LoRA)."""
        if self.scenario.limits.policy != SLORA or not step.admitted:
            return running
        batch = [r for r in self.engine.running if r.number in set(step.admitted)]
        adapters = {r.adapter for r in batch} - {0}
        return running._replace(requests=float(len(batch)), kv_tokens=0.0, adapters=float(len(adapters)))

    def _begin_loads(self, step: ReferenceStep) -> None:
        """Record the decided loads; asynchronous ones start without a step as well."""
        limits, counts = self.scenario.limits, self.trace.counts
        for adapter, from_disk in step.loads:
            load_ns = self._load_ns(adapter, from_disk)
            trace.record_load(self.trace, adapter, load_ns)
            counts.adapter_loads += 1
            counts.disk_loads += from_disk
            if limits.load_beside or limits.policy == SLORA:
                ahead = adapter == step.prefetch
                self.copier.begin(adapter, self.now_ns, load_ns, bool(limits.load_beside), ahead)
        if step.loads and not step.tokens:
            trace.record_loads(self.trace, self.now_ns, len(step.loads))

    def _load_ns(self, adapter: int, from_disk: bool) -> int:
        costs = self.scenario.costs
        return int(costs.load_ns[adapter]) + (int(costs.disk_ns[adapter]) if from_disk else 0)

    def _wait_for_loads(self, step: ReferenceStep) -> int:
        """Return the time that the step waits for its adapters."""
        limits, running = self.scenario.limits, self.engine.running
        if limits.load_beside:
            return 0
        if limits.policy == SLORA:
            admitted = {r.adapter for r in running if r.number in step.admitted}
            return max((self.copier.wait_ns(adapter, self.now_ns) for adapter in admitted), default=0)
        in_step = {number for number, _ in step.tokens}
        active = len({r.adapter for r in running if r.number in in_step or not r.draining} - {0})
        in_step_ns = sum(self._load_ns(*load) for load in step.loads)
        if in_step_ns == 0:
            return 0
        in_step_ns = with_reloads_ns(in_step_ns, active, limits.max_loras)
        return self.copier.link.load(self.now_ns, in_step_ns) - self.now_ns

    def _has_decodes(self, step: ReferenceStep) -> bool:
        """Return whether decoding goes on; vLLM's rules never pause it for prompts alone."""
        return self.scenario.limits.policy != SLORA or not step.admitted

    def _assistance_ns(self, step: ReferenceStep, step_ns: int) -> int:
        """Return the time that a batch of prompts takes longer while its adapters are copied."""
        return 0

    def _ranks(self, step: ReferenceStep) -> StepRanks:
        """Count the ranks in a step."""
        by_number = {r.number: r for r in self.engine.running}
        parts = [(by_number[number], tokens) for number, tokens in step.tokens]
        rank = self.scenario.costs.rank

        def decodes(request: ReferenceRequest, tokens: int) -> bool:
            return tokens == 1 and request.output + request.promised > 0

        decoding = [r for r, tokens in parts if decodes(r, tokens)]
        prefilling = [(r, tokens) for r, tokens in parts if not decodes(r, tokens)]
        return StepRanks(
            decodes=float(len(decoding)),
            prefills=float(len(prefilling)),
            lora_decodes=float(sum(r.adapter > 0 for r in decoding)),
            lora_prefills=float(sum(r.adapter > 0 for r, _ in prefilling)),
            lora_prefill_tokens=float(sum(tokens for r, tokens in prefilling if r.adapter > 0)),
            max_rank=float(max((rank[r.adapter] for r, _ in parts), default=0)),
            decode_rank_sum=float(sum(rank[r.adapter] for r in decoding)),
            prefill_rank_sum=float(sum(rank[r.adapter] for r, _ in prefilling)),
            prefill_rank_tokens=float(sum(tokens * rank[r.adapter] for r, tokens in prefilling)),
            prefill_mpairs=sum(
                key for r, n in prefilling for key in range(r.computed - n + 1, r.computed + 1)
            )
            / 1e6,
        )

    def _record_details(
        self, step: ReferenceStep, features: StepFeatures, duration_ns: int, load_ns: int
    ) -> None:
        adapter_of = {r.number: r.adapter for r in self.engine.running}
        for number in step.admitted if self.scenario.limits.policy != POOLED else ():
            if self.scenario.limits.load_beside:
                self._record_wait(number, adapter_of[number])
            trace.record_admission(self.trace, number, adapter_of[number], self.now_ns, load_ns)
            if self.scenario.limits.policy == SLORA and adapter_of[number] and self.trace.admitted_ns.size:
                missed = self.copier.wait_ns(adapter_of[number], self.now_ns) > 0
                self.trace.pool["misses" if missed else "hits"] += 1
        trace.record_step(
            self.trace,
            self.now_ns,
            duration_ns,
            int(features.requests),
            int(features.waiting),
            int(features.kv_tokens),
            int(features.adapters),
            len(self.engine.residents()),
            len(step.loads),
            load_ns,
            int(features.tokens),
        )

    def _record_wait(self, number: int, adapter: int) -> None:
        """Record the time that a newly admitted request was skipped for a load."""
        if self.scenario.buckets and self.trace.admitted_ns[number] == t.NEVER:
            arrival_ns = int(self.scenario.requests.arrival_ns[number])
            waited_ns = self.copier.waited_ns(adapter, arrival_ns)
            trace.record_wait_for_load(self.trace, number, waited_ns)

    def _commit(self) -> None:
        """Record the tokens of a step; in async scheduling the engine sees them one step later."""
        output = self.engine.commit()
        for number in output.first:
            loads_ns = self.trace.counts.load_ns
            trace.record_first_token(self.trace, number, self.now_ns, loads_ns)
        for number in output.later:
            self.trace.gaps[t.gap_bin(self.now_ns - self.last_token_ns[number])] += 1
        for number in [*output.first, *output.later]:
            self.last_token_ns[number] = self.now_ns
        for number in output.finished:
            trace.record_finish(self.trace, number, self.now_ns)


class _PooledRun(_Run):
    """A run under the rules for one pool."""

    def __init__(self, scenario: Scenario, engine: ReferencePooled) -> None:
        super().__init__(scenario, engine)
        self.pooled = engine
        self.refreshes_ns = deque(scenario.refreshes_ns)

    def finish(self) -> t.TwinTrace:
        record = super().finish()
        if self.refreshes_ns:
            self._refresh_until(self.scenario.horizon_ns)
            record.counts.next_request = self.upcoming
        for name in t.POOL_COUNTS:
            record.pool[name] = self.pooled.counts[name]
        return record

    def _next_step(self) -> ReferenceStep:
        self._refresh_until(self.now_ns)
        step = super()._next_step()
        for number in step.admitted:
            self._record_admission(number)
        if not step.tokens:
            self.trace.counts.preemptions += len(step.preempted)
        return step

    def _submit(self, number: int, **prediction: int) -> bool:
        requests = self.scenario.requests
        if requests.predicted_tokens.size:
            prediction["predicted"] = int(requests.predicted_tokens[number])
        return super()._submit(number, arrival_ns=int(requests.arrival_ns[number]), **prediction)

    def _record_admission(self, number: int) -> None:
        """Record the time until the adapter of an admitted request is loaded."""
        adapter = int(self.scenario.requests.adapter[number])
        self.copier.promote(adapter, self.now_ns)
        wait_ns = self.copier.wait_ns(adapter, self.now_ns)
        held_ns = wait_ns if self.scenario.limits.loading == ASYNCHRONOUS else -int(self.trace.counts.load_ns)
        trace.record_first_admission(self.trace, number, adapter, self.now_ns, held_ns, wait_ns == 0)

    def _parts(self, step: ReferenceStep) -> list[tuple[PooledRequest, int]]:
        """Return the requests of a step and their tokens."""
        tokens = dict(step.tokens)
        return [
            (request, tokens[request.number]) for request in self.pooled.running if request.number in tokens
        ]

    def _has_decodes(self, step: ReferenceStep) -> bool:
        return any(request.is_decoding for request, _ in self._parts(step))

    def _wait_for_loads(self, step: ReferenceStep) -> int:
        """Return the wait of prompts for loads on demand, or of decodes after assisted prompts."""
        has_decodes = self._has_decodes(step)
        if self.scenario.limits.loading != (ASSISTED if has_decodes else ON_DEMAND):
            return 0
        waits_ns = []
        for request, _ in self._parts(step):
            self.copier.promote(request.adapter, self.now_ns)
            waits_ns.append(self.copier.wait_ns(request.adapter, self.now_ns))
        return max(waits_ns)

    def _assistance_ns(self, step: ReferenceStep, step_ns: int) -> int:
        if self.scenario.limits.loading != ASSISTED or self._has_decodes(step):
            return 0
        loading = self._loading()
        cold = [
            (request.adapter, count) for request, count in self._parts(step) if request.adapter in loading
        ]
        for adapter, _ in cold:
            self.copier.promote(adapter, self.now_ns)
        costs = self.scenario.costs
        return (
            assisted_ns(costs.assist, self.copier, cold, costs.load_ns.tolist(), self.now_ns, step_ns)
            - step_ns
        )

    def _loading(self) -> set[int]:
        return {a for a in self.pooled.residents() if self.pooled.cache.adapters[a].loading}

    def _computed(self, step: ReferenceStep, running: StepFeatures) -> StepFeatures:
        """Return the contents of a step: requests that pause or wait for their adapters have no part."""
        in_step = {number for number, _ in step.tokens}
        parts = [r for r in self.pooled.running if r.number in in_step]
        if self._is_merged():
            kv_tokens = running.kv_tokens if any(r.is_decoding for r in parts) else 0.0
            return running._replace(requests=float(len(parts)), kv_tokens=kv_tokens, adapters=0.0, a_max=0.0)
        if any(r.is_decoding for r in parts):
            return running._replace(requests=float(len(parts)))
        adapters = {r.adapter for r in parts} - {0}
        return running._replace(requests=float(len(parts)), kv_tokens=0.0, adapters=float(len(adapters)))

    def _is_merged(self) -> bool:
        return self.pooled.merging.adapter is not None

    def _switches_ns(self) -> int:
        return self.pooled.merging.switches * self.scenario.limits.switch_ns

    def _refresh_until(self, now_ns: int) -> None:
        """Do the refreshes that are due."""
        while self.refreshes_ns and self.refreshes_ns[0] <= now_ns and self.scenario.scheduler is not None:
            at_ns = self.refreshes_ns.popleft()
            self._take_arrivals(at_ns - 1)
            self.pooled.refresh(refreshed_queues(self.pooled, self.scenario.scheduler, at_ns), at_ns)
