"""Engine core: schedule, load adapters, run, sample, commit.

Scheduling decisions are those of `capplan.serving`, on the same kind of state as the twin's. The core
executes and measures them.

A step is launched, which waits for nothing on the device, and completed once its tokens are on the host. With
async scheduling on a GPU the next step is launched in between. It reads the tokens on the device, and follows
on the same stream: pages and slots that the host has given away meanwhile are overwritten after their use.
Tokens of requests that have ended meanwhile are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine._input_batch import InputBatch
from capplan.engine._model_runner import Runner
from capplan.engine._pool import BlockTables
from capplan.engine._request import FinishReason, Request
from capplan.engine._sampler import Sampled, TokenCopies, sample, token_logprobs
from capplan.engine._scheduler_output import (
    Decision,
    ScheduledRequests,
    SchedulerOutput,
    cancel_waiting,
    decision_of,
    new_scheduled,
    scheduler_output,
)
from capplan.engine._timing import EngineClock, PhaseTimer, StepRecord
from capplan.engine.lora._manager import AdapterLoads
from capplan.serving import NONE, Limits, State, finish
from capplan.serving.pooled import forget_execution, refresh
from capplan.serving.routers import ACTIVE, AWAITED, RESIDENT
from capplan.serving.state import LOADING, NO_CLAIM, POOLED
from capplan.serving.stored import can_run, commit, schedule, store_engine, submit
from capplan.spec import Scheduler

_NOT_FINITE: Final = "the model's logits are not finite: weights or adapter overflow its dtype"

_SCORED_TOKENS: Final = 64
"""Of a prompt whose logits are in memory at a time."""


class StepOutput(NamedTuple):
    """Result of one step."""

    record: StepRecord | None
    """None if no request ran, and requests only ended because their adapter failed to load."""
    emitted: list[Request]
    """Requests with a new token."""
    finished: list[Request]
    """Requests that ended, including those with an error."""


@dataclass(slots=True)
class _Step:
    """Step that is launched and not completed.

    Attributes
    ----------
    counters, disk_loads
        The scheduler's between `schedule` and `commit`.
    requests, rows, positions
        Of its new tokens.
    forward_end
        End of the forward pass on the device; None: it has ended.
    sampled
        Waits for its tokens.
    ended
        Requests that end with their token of this step.
    has_lost
        Whether some of its requests have ended since.
    timer, begin_ns, end_ns
        Phases and bounds of its time; no end: it goes on.
    """

    output: SchedulerOutput
    counters: Mapping[str, int]
    disk_loads: int
    decision: Decision | None
    requests: list[Request]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    forward_end: Any
    sampled: Callable[[], Sampled]
    ended: list[Request] = field(default_factory=list)
    has_lost: bool = False
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    begin_ns: int = 0
    end_ns: int = 0

    def record(self, number: int, finished: int) -> StepRecord:
        """Return the record of the step."""
        output, counters, timer = self.output, self.counters, self.timer
        return StepRecord(
            step=number,
            begin_ns=self.begin_ns,
            tokens=counters["step_tokens"],
            decode_requests=output.decodes,
            prefill_requests=output.requests.size - output.decodes,
            prefill_tokens=output.prefill_tokens,
            prefill_pairs=output.prefill_pairs,
            requests=counters["n_running"] - counters["n_ending"] - counters["n_absent"],
            waiting=counters["n_waiting"],
            kv_tokens=counters["kv_tokens"],
            adapters=counters["n_active"] - counters["n_claimed"],
            resident=counters["n_resident"],
            rank_sum=output.rank_sum,
            max_rank=output.max_rank,
            loads=counters["n_loads"],
            disk_loads=self.disk_loads,
            preemptions=counters["n_preempted"],
            finished=finished,
            duration_ns=self.end_ns - self.begin_ns,
            schedule_ms=timer.ms("schedule"),
            load_ms=timer.ms("load"),
            prepare_ms=timer.ms("prepare"),
            forward_ms=timer.ms("forward"),
            sample_ms=timer.ms("sample"),
            commit_ms=timer.ms("commit"),
        )


class EngineCore:
    """One engine instance.

    Attributes
    ----------
    state, limits
        State and limits of the scheduler.
    scheduler
        Settings of the rules that refresh their queues and statistics; None: others.
    requests
        Requests in flight, by number.
    decisions
        Recorded scheduling decisions; None: not recorded.
    depth
        Number of steps to launch before the first one is completed: 2 on a GPU under async scheduling.
    """

    def __init__(
        self,
        state: State,
        limits: Limits,
        runner: Runner,
        blocks: BlockTables,
        loads: AdapterLoads,
        clock: EngineClock,
        device: torch.device,
        scheduler: Scheduler | None,
    ) -> None:
        self.state = state
        self._memory = store_engine(state, limits)
        self.limits = limits
        self.clock = clock
        self.loads = loads
        self.loader = loads.loader
        self.lora = loads.lora
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}
        self.blocks = blocks
        self.decisions: list[Decision] | None = None
        self.runner = runner
        self._device = device
        self._token_ids = np.zeros((state.rows.size, limits.max_model_len), np.int32)
        self._input_batch = InputBatch(limits, state.adapters.size - 1, self._token_ids, blocks, device)
        self._scheduled = new_scheduled(min(state.rows.size, limits.max_num_seqs))
        self._by_row: list[Request | None] = [None] * state.rows.size
        self._counters: Any = state.counters  # faster by key than by attribute
        self._lists = {name: getattr(state.lists, name) for name in ("admitted", "preempted", "finished")}
        self._steps = 0
        self._next_refresh_ns = limits.refresh_ns
        self.depth = 1
        self._latest = torch.zeros(state.rows.size, dtype=torch.int64, device=device)
        self._copies = TokenCopies(device)
        self._in_flight: deque[_Step] = deque()
        self._timer, self._begin_ns = PhaseTimer(), 0
        self._scored: set[int] = set()  # rows of requests whose prompts get log-probabilities
        self._arrived: dict[int, tuple[Request, int, int]] = {}  # async: not visible yet, by number

    @property
    def has_room(self) -> bool:
        """Whether a further request can be queued."""
        return bool(self.state.counters.n_free_rows > len(self._arrived))

    @property
    def unseen(self) -> int:
        """Number of accepted requests that the scheduler has not seen."""
        return len(self._arrived)

    def can_run(self, request: Request) -> bool:
        """Return whether an idle engine can run a request; `submit` refuses any other."""
        sizes = request.adapter, request.prompt.size, request.params.max_tokens
        return bool(can_run(self._memory, *sizes))

    def submit(self, request: Request, prefix: int = 0, shared_tokens: int = 0) -> bool:
        """Queue a request; return False if there is no room, or it can never run.

        All requests of its adapter with the same `prefix` have the same first `shared_tokens` tokens. With
        async scheduling the next step is decided already, or as if it were, and the request is visible to the
        one after it.
        """
        if not self.limits.async_scheduling or self.depth > 1:
            return self._enqueue(request, prefix, shared_tokens)
        accepted = self.has_room and self.can_run(request)
        if accepted:
            self.requests[request.number] = request
            self._arrived[request.number] = (request, prefix, shared_tokens)
        return accepted

    def _enqueue(self, request: Request, prefix: int, shared_tokens: int) -> bool:
        size, most = request.prompt.size, request.params.max_tokens
        lengths = (size, most, prefix, shared_tokens, request.predicted_tokens)
        row = submit(self._memory, request.number, request.adapter, *lengths, request.arrival_ns)
        if row == NONE:
            return False
        request.row = row
        self._token_ids[row, :size] = request.prompt
        self._by_row[row] = self.requests[request.number] = request
        if request.params.prompt_logprobs:
            self._scored.add(row)
        return True

    def _take_arrivals(self) -> None:
        """Make the requests that arrived before this step visible to the next decision."""
        for arrived in self._arrived.values():
            if not self._enqueue(*arrived):
                raise RuntimeError("no row is left for an accepted request: the count is broken")
        self._arrived.clear()

    def abort(self, number: int, reason: FinishReason) -> None:
        """Cancel a request in flight and free what it holds."""
        request = self.requests.get(number)
        if request is not None:
            self._end_early(request, reason)

    def step(self) -> StepOutput | None:
        """Run one step; return None if nothing can run."""
        begin_ns = self.clock.now_ns()
        in_flight = self._in_flight
        failed = self._accept_loads()
        if in_flight:
            self._timer.lap("forward")  # the device was computing
        else:
            self._begin_ns, self._timer = begin_ns, PhaseTimer()
        self._refresh(begin_ns)
        while len(in_flight) < self.depth and self._launch(begin_ns, failed):
            continue
        if not in_flight:
            return StepOutput(None, [], failed) if failed else None
        result = self._complete(in_flight.popleft(), failed)
        if in_flight and not self.requests:
            in_flight.popleft().sampled()  # for requests that have all ended
        self._take_arrivals()
        return result

    def _launch(self, begin_ns: int, failed: list[Request]) -> bool:
        """Decide and launch a step, and add requests whose adapter fails; return False without tokens."""
        tokens = self._schedule(begin_ns)
        if tokens == 0 and self._in_flight:
            return False
        output = scheduler_output(self.state, self.lora.rank_of, self._scheduled)
        rows = output.requests["row"]
        self._timer.lap("schedule")
        counters = self.state.counter_values()
        decision = None
        if self.decisions is not None:
            decision = decision_of(self.state, output.requests, begin_ns)
            if tokens == 0 and counters["n_loads"]:
                self.decisions.append(decision)
            self._timer.skip()
        self._update_running(begin_ns, counters)
        self._timer.lap("prepare")
        loads = counters["n_loads"]
        if loads and self._in_flight:
            # The loads wait for the device, and their time is this step's.
            self._wait(self._in_flight[0])
            self._end_time(self._in_flight[0])
        errors = self.loads.run(self._timer, rows)
        if tokens == 0:
            return False
        disk_loads = int(self.state.adapters.load_from_disk[:loads].sum()) if loads else 0
        step = self._run(output, counters, disk_loads, decision)
        errors |= self.loads.failed_meanwhile(rows)
        commit(self._memory)
        step.ended = self._release_finished()
        self._in_flight.append(step)
        for adapter, error in errors.items():
            failed += self._fail_all(adapter, error)
            self.loads.discard(adapter)
        self._timer.lap("commit")
        return True

    def _complete(self, step: _Step, failed: list[Request]) -> StepOutput:
        """Wait for the tokens of a step and give them to its requests."""
        sampled = self._wait(step)
        emitted, non_finite = self._accept_tokens(step, sampled)
        self._timer.lap("sample")
        finished = failed + self._finish(step.ended, emitted, non_finite)
        self._timer.lap("commit")
        if not step.end_ns:
            self._end_time(step)
        for request in emitted:
            request.token_ns.append(step.end_ns)
        self._steps += 1
        if self.decisions is not None and step.decision is not None:
            self.decisions.append(step.decision._replace(begin_ns=step.begin_ns))
        return StepOutput(step.record(self._steps, len(finished)), emitted, finished)

    def _wait(self, step: _Step) -> Sampled:
        """Wait for the tokens of a step."""
        if step.forward_end is not None:
            step.forward_end.synchronize()
        self._timer.lap("forward")
        return step.sampled()

    def _end_time(self, step: _Step) -> None:
        """End the time of a step; that of the next one follows if it is launched."""
        step.begin_ns, step.timer = self._begin_ns, self._timer
        self.clock.step(step.timer.total_ns)
        self._begin_ns = step.end_ns = self.clock.now_ns()
        self._timer = PhaseTimer()

    def _schedule(self, begin_ns: int) -> int:
        """Decide a step and return its tokens.

        In async scheduling a decision without tokens ends the overlap: the requests that have ended leave,
        and those that have arrived are visible at once.
        """
        self._counters["now_ns"] = begin_ns
        tokens = schedule(self._memory)
        if tokens == 0 and self.limits.async_scheduling:
            self._update_running(begin_ns, self.state.counter_values())
            commit(self._memory)
            if not self._in_flight:
                self._take_arrivals()
                tokens = schedule(self._memory)
        return int(tokens)

    def _refresh(self, now_ns: int) -> None:
        """Refresh the queues if a period has passed.

        After several, the first refresh has the requests since the one before. Those after it have none, and
        one of them leaves the same queues and uses of adapters as all.
        """
        if self.scheduler is None or now_ns < self._next_refresh_ns:
            return
        last_ns = now_ns // self.limits.refresh_ns * self.limits.refresh_ns
        for at_ns in sorted({self._next_refresh_ns, last_ns}):
            refresh(self.state, self.limits, self.scheduler, at_ns)
        self._next_refresh_ns = last_ns + self.limits.refresh_ns

    def _accept_loads(self) -> list[Request]:
        """Report finished loads to the scheduler; return the requests whose adapter failed to load."""
        failed: list[Request] = []
        for load in self.loader.finished():
            if load.error is not None:
                failed += self._fail_all(load.adapter, load.error)
            self.loads.accept(load)
        return failed

    def _update_running(self, begin_ns: int, counters: Mapping[str, int]) -> None:
        """Update requests that were preempted or admitted."""
        if counters["n_preempted"]:
            preempted = self._lists["preempted"][: counters["n_preempted"]]
            self.blocks.release(preempted)
            for request in self._requests_of(preempted):
                request.running = False
                request.preemptions += 1
        if counters["n_admitted"]:
            for request in self._requests_of(self._lists["admitted"][: counters["n_admitted"]]):
                request.running = True
                if request.admitted_ns is None:
                    request.admitted_ns = begin_ns

    def _requests_of(self, rows: NDArray[np.int64]) -> list[Request]:
        by_row = self._by_row
        return [request for row in rows.tolist() if (request := by_row[row]) is not None]

    def _run(
        self, output: SchedulerOutput, counters: Mapping[str, int], disk_loads: int, decision: Decision | None
    ) -> _Step:
        """Launch the model and the sampler."""
        prepared = self._input_batch.prepare_inputs(output.requests)
        inputs, rows, positions = prepared.inputs, prepared.rows, prepared.next_positions
        requests = self._requests_of(rows)
        if self._in_flight:
            inputs = inputs._replace(latest=self._latest)
        self._timer.lap("prepare")
        logits = self.runner.run(inputs)
        forward_end = self._copies.computed()
        self._timer.lap("forward")
        sampled = sample(logits, requests, positions)
        if self.depth > 1:
            on_device = torch.from_numpy(rows).to(self._device, non_blocking=True)
            self._latest.index_copy_(0, on_device, torch.as_tensor(sampled.tokens))
            self._token_ids[rows, positions] = -1 - rows  # see `StepInputs.latest`
        fetched = self._copies.begin(sampled)
        if self._scored:
            self._score_prompts(output.requests[prepared.order])
        self._timer.lap("sample")
        return _Step(output, counters, disk_loads, decision, requests, rows, positions, forward_end, fetched)

    def _accept_tokens(self, step: _Step, sampled: Sampled) -> tuple[list[Request], list[Request]]:
        """Give their tokens to requests; return those with one, and those without finite logits."""
        requests = emitted = step.requests
        rows, positions = step.rows, step.positions
        tokens, finite = np.asarray(sampled.tokens), np.asarray(sampled.finite)
        kept: Sequence[int] = range(len(requests))
        non_finite: list[Request] = []
        if step.has_lost or not finite.all():
            left = [i for i in kept if requests[i].finish_reason is None]
            non_finite = [requests[i] for i in left if not finite[i]]
            kept = [i for i in left if finite[i]]
            emitted = [requests[i] for i in kept]
            rows, positions, tokens = rows[kept], positions[kept], tokens[kept]
        sampled.report(requests, kept)
        self._token_ids[rows, positions] = tokens
        for request, token in zip(emitted, tokens.tolist(), strict=True):
            request.output.append(token)
        return emitted, non_finite

    def _score_prompts(self, scheduled: ScheduledRequests) -> None:
        """Add log-probabilities of prompts whose tokens were computed, a few tokens at a time.

        `scheduled` are the requests of the step, in the order of their tokens.
        """
        ends = np.cumsum(scheduled["tokens"])
        for found, end in zip(scheduled, ends.tolist(), strict=True):
            request = self._by_row[found["row"]]
            if request is None or request.row not in self._scored:
                continue
            known, start = len(request.prompt_logprobs), int(end - found["tokens"])
            last = min(int(found["computed"] + found["tokens"]), request.prompt.size - 1)
            # A request that was preempted computes its prompt again.
            for at in range(max(known, int(found["computed"])), last, _SCORED_TOKENS):
                positions = np.arange(at, min(at + _SCORED_TOKENS, last))
                logits = self.runner.logits(positions - int(found["computed"]) + start)
                following = torch.from_numpy(request.prompt[positions + 1]).to(logits.device, torch.int64)
                top = request.params.logprobs or 0
                scores = token_logprobs(logits, following, top)
                request.prompt_logprobs += scores.listed([top] * positions.size)
            if last == request.prompt.size - 1:
                self._scored.discard(request.row)

    def _finish(
        self, ended: list[Request], emitted: list[Request], non_finite: list[Request]
    ) -> list[Request]:
        """Return the requests that ended in a step: by length, by a stop token, or with an error."""
        finished = [request for request in ended if request.finish_reason is None]
        for request in finished:
            self._leave(request, "length")
        for request in non_finite:
            if request.finish_reason is None:
                self._end_early(request, "error")
                finished.append(request)
            else:
                forget_execution(self.state, request.row)
            request.finish_reason, request.error = "error", _NOT_FINITE
        for request in emitted:
            if request.output[-1] in request.stop_ids:
                if request.finish_reason is None:
                    self._end_early(request, "stop")
                    finished.append(request)
                request.finish_reason = "stop"
        return finished

    def _fail_all(self, adapter: int, error: str) -> list[Request]:
        """End all requests of an adapter that failed to load."""
        failed = [request for request in self.requests.values() if request.adapter == adapter]
        for request in failed:
            self._end_early(request, "error")
            request.error = error
        return failed

    def _end_early(self, request: Request, reason: FinishReason) -> None:
        """End a running or waiting request between two steps."""
        if self._arrived.pop(request.number, None) is None and self._by_row[request.row] is request:
            if request.running:
                self._counters["n_finished"] = 0
                finish(self.state, self.limits, request.row, reason == "stop")
                self._release_finished()
            else:
                cancel_waiting(self.state, self.limits, request.row)
                self._release(request)
        self._leave(request, reason)
        for step in self._in_flight:
            step.has_lost = True

    def _release_finished(self) -> list[Request]:
        """Release what requests hold that have ended, or end with the tokens in flight."""
        rows: NDArray[np.int64] = self._lists["finished"][: self._counters["n_finished"]]
        if not rows.size:
            return []
        self.blocks.release(rows)
        finished = self._requests_of(rows)
        for request in finished:
            self._release(request)
        return finished

    def _leave(self, request: Request, reason: FinishReason) -> None:
        del self.requests[request.number]
        request.running, request.finish_reason = False, reason

    def _release(self, request: Request) -> None:
        self._by_row[request.row] = None
        self._scored.discard(request.row)


class StateReport(NamedTuple):
    """State of an engine between two steps; counts as in `capplan.serving.routers._fleet`."""

    running: int
    queued: int
    """Waiting requests, also those that the scheduler has not seen."""
    free_blocks: int
    """Free KV blocks, and those of cached adapters that no running request uses."""
    blocks: int
    block_size: int
    max_num_seqs: int
    max_loras: int
    active_adapters: int
    queued_adapters: int
    running_tokens: int
    partial_tokens: int
    by_rank: Mapping[str, tuple[int, int, int]]
    """Requests, waiting ones, and their prompt tokens, by the rank of their adapter; 0: base model."""
    adapters: Mapping[str, int]
    """Bits ACTIVE, AWAITED and RESIDENT of the adapters that have any."""


def state_report(core: EngineCore, names: Mapping[int, str]) -> StateReport:
    """Return the state of an engine; `names`: of its adapters, by number."""
    state, limits, counters = core.state, core.limits, core.state.counters
    claim, queue_head = state.adapters.claim, state.adapters.queue_head
    is_pool = limits.policy == POOLED
    idle_pages = counters.adapter_pages - state.pooled.counts.pinned_pages if is_pool else 0
    bits = np.where((state.adapters.users > 0) & (claim == NO_CLAIM), ACTIVE, 0)
    bits |= np.where(queue_head != NONE, AWAITED, 0)
    bits |= np.where((state.adapters.resident == 1) & (claim != LOADING), RESIDENT, 0)
    awaited = (queue_head != NONE) | (claim == LOADING)
    partial = state.lists.partial[: counters.n_partial]
    left = np.maximum(0, state.rows.prompt[partial] - state.rows.computed[partial])
    partial_tokens = int(left.sum())
    return StateReport(
        running=int(counters.n_running - counters.n_ending),
        queued=int(counters.n_waiting - counters.n_gone) + core.unseen,
        free_blocks=int(counters.free_blocks + idle_pages),
        blocks=int(counters.capacity),
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_loras=limits.max_loras,
        active_adapters=int(counters.n_active - counters.n_claimed),
        queued_adapters=int(np.count_nonzero(awaited[1:])),
        running_tokens=int(counters.kv_tokens) + partial_tokens,
        partial_tokens=partial_tokens,
        by_rank=_by_rank(core.requests.values(), core.lora.rank_of.tolist()),
        adapters={name: int(bits[number]) for number, name in names.items() if bits[number]},
    )


def _by_rank(requests: Iterable[Request], rank_of: list[int]) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for request in requests:
        rank = str(rank_of[request.adapter])
        present, waiting, tokens = found.get(rank, (0, 0, 0))
        if request.running:
            found[rank] = present + 1, waiting, tokens
        else:
            found[rank] = present + 1, waiting + 1, tokens + request.prompt.size
    return found
