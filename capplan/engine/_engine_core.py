"""Engine core: schedule, load adapters, run, sample, commit.

Scheduling decisions are those of `capplan.serving`, on the same kind of state as the twin's. The core
executes and measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine._input_batch import InputBatch
from capplan.engine._model_runner import Runner
from capplan.engine._pool import BlockTables
from capplan.engine._request import FinishReason, Request
from capplan.engine._sampler import sample, token_logprobs
from capplan.engine._scheduler_output import (
    Decision,
    ScheduledRequests,
    cancel_waiting,
    decision_of,
    new_scheduled,
    scheduler_output,
)
from capplan.engine._timing import EngineClock, PhaseTimer, StepRecord, step_record
from capplan.engine.lora._manager import AdapterLoads
from capplan.serving import NONE, Limits, State, finish
from capplan.serving.pooled import forget_execution, refresh
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
        self._lists = {name: getattr(state.lists, name) for name in ("admitted", "preempted", "finished")}
        self._steps = 0
        self._next_refresh_ns = limits.refresh_ns
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
        async scheduling the next step is decided already, and the request is visible to the one after it.
        """
        if not self.limits.async_scheduling:
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
        """Schedule and run one step; return None if nothing can run."""
        begin_ns = self.clock.now_ns()
        failed = self._accept_loads()
        timer = PhaseTimer()
        self._refresh(begin_ns)
        tokens = self._schedule(begin_ns)
        output = scheduler_output(self.state, self.lora.rank_of, self._scheduled)
        timer.lap("schedule")
        counters = self.state.counter_values()
        if self.decisions is not None and (tokens or counters["n_loads"]):
            self.decisions.append(decision_of(self.state, output.requests, begin_ns))
            timer.skip()
        self._update_running(begin_ns, counters)
        timer.lap("prepare")
        errors = self.loads.run(timer, output.requests["row"])
        if tokens == 0:
            return StepOutput(None, [], failed) if failed else None
        emitted, non_finite = self._execute(output.requests, errors, timer)
        commit(self._memory)
        finished = failed + self._finish(emitted, non_finite, errors)
        timer.lap("commit")
        self.clock.step(timer.total_ns)
        end_ns = self.clock.now_ns()
        for request in emitted:
            request.token_ns.append(end_ns)
        self._steps += 1
        self._take_arrivals()
        loads = counters["n_loads"]
        disk_loads = int(self.state.adapters.load_from_disk[:loads].sum()) if loads else 0
        record = step_record(
            self._steps, begin_ns, end_ns, output, counters, disk_loads, len(finished), timer
        )
        return StepOutput(record, emitted, finished)

    def _schedule(self, begin_ns: int) -> int:
        """Decide a step and return its tokens.

        In async scheduling a decision without tokens ends the overlap: the requests that have ended leave,
        and those that have arrived are visible at once.
        """
        self.state.counters.now_ns = begin_ns
        tokens = schedule(self._memory)
        if tokens == 0 and self.limits.async_scheduling:
            self._update_running(begin_ns, self.state.counter_values())
            commit(self._memory)
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

    def _execute(
        self, scheduled: ScheduledRequests, errors: dict[int, str], timer: PhaseTimer
    ) -> tuple[list[Request], list[Request]]:
        """Run the model and sample; return the requests with a new token, and those without finite logits."""
        prepared = self._input_batch.prepare_inputs(scheduled)
        requests = self._requests_of(prepared.rows)
        timer.lap("prepare")
        logits = self.runner.run(prepared.inputs)
        errors |= self.loads.failed_meanwhile(scheduled["row"])
        if self._device.type == "cuda":
            # Otherwise the model's time counts as the sampler's. Adapter copies on their stream go on.
            torch.cuda.current_stream(self._device).synchronize()
        timer.lap("forward")
        if self._scored:
            self._score_prompts(scheduled[prepared.order])
        tokens, finite = sample(logits, requests)
        self._token_ids[prepared.rows, prepared.next_positions] = tokens
        non_finite = [requests[i] for i in np.flatnonzero(~finite).tolist()]
        if errors or non_finite:
            # Tokens computed with an adapter that failed to load are invalid; other requests' are not.
            good = [i for i, request in enumerate(requests) if finite[i] and request.adapter not in errors]
            requests, tokens = [requests[i] for i in good], tokens[good]
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.output.append(token)
        timer.lap("sample")
        return requests, non_finite

    def _score_prompts(self, scheduled: ScheduledRequests) -> None:
        """Add log-probabilities of prompts whose tokens were computed, a few tokens at a time.

        Parameters
        ----------
        scheduled
            Requests of the step, in the order of their tokens.
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
                following = request.prompt[positions + 1].tolist()
                top = request.params.logprobs or 0
                request.prompt_logprobs += map(token_logprobs, logits, following, repeat(top))
            if last == request.prompt.size - 1:
                self._scored.discard(request.row)

    def _finish(
        self, emitted: list[Request], non_finite: list[Request], errors: Mapping[int, str]
    ) -> list[Request]:
        """Return the requests that ended in the step: by length, by a stop token, or with an error."""
        finished = self._release_finished()
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
        for adapter, error in errors.items():
            for request in finished:
                if request.adapter == adapter:
                    request.finish_reason, request.error = "error", error
            finished += self._fail_all(adapter, error)
            self.loads.discard(adapter)
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
        if request.running:
            self.state.counters.n_finished = 0
            finish(self.state, self.limits, request.row, reason == "stop")
            self._release_finished()
        elif self._arrived.pop(request.number, None) is not None:
            del self.requests[request.number]
        else:
            cancel_waiting(self.state, self.limits, request.row)
            self._release(request)
        request.finish_reason = reason

    def _release_finished(self) -> list[Request]:
        rows: NDArray[np.int64] = self._lists["finished"][: self.state.counters.n_finished]
        if not rows.size:
            return []
        self.blocks.release(rows)
        finished = self._requests_of(rows)
        for request in finished:
            request.running = False
            request.finish_reason = "length"
            self._release(request)
        return finished

    def _release(self, request: Request) -> None:
        del self.requests[request.number]
        self._by_row[request.row] = None
        self._scored.discard(request.row)
