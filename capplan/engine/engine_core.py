"""Engine core: schedule, load adapters, run, sample, commit.

Scheduling decisions are those of `capplan.serving`, on the same kind of state as the twin's. The core
executes and measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.input_batch import InputBatch
from capplan.engine.lora.manager import AdapterLoads
from capplan.engine.model_runner import ModelRunner
from capplan.engine.pool import BlockTables
from capplan.engine.request import FinishReason, Request
from capplan.engine.sampler import sample
from capplan.engine.scheduler_output import (
    Decision,
    ScheduledRequests,
    cancel_waiting,
    decision_of,
    new_scheduled,
    read_step,
)
from capplan.engine.timing import EngineClock, PhaseTimer, StepRecord, step_record, with_times
from capplan.serving import NONE, Limits, State, commit, finish, schedule, submit
from capplan.serving import state as s
from capplan.serving.state import SLORA

_NOT_FINITE: Final = "the model's logits are not finite: weights or adapter overflow its dtype"


class StepOutput(NamedTuple):
    """What one step did."""

    record: StepRecord | None
    """None where nothing ran: requests have ended because their adapter could not be loaded, no more."""
    emitted: list[Request]
    """Requests that got a token."""
    finished: list[Request]
    """Requests that are over, be it for good or because of an error."""


class EngineCore:
    """One engine instance.

    Attributes
    ----------
    state, limits
        The scheduler's.
    requests
        Those in flight, by number.
    decisions
        Where every decision is written down, if anywhere.
    """

    def __init__(
        self,
        state: State,
        limits: Limits,
        runner: ModelRunner,
        blocks: BlockTables,
        loads: AdapterLoads,
        clock: EngineClock,
        device: torch.device,
    ) -> None:
        self.state = state
        self.limits = limits
        self.clock = clock
        self.loads = loads
        self.loader = loads.loader
        self.residency = loads.residency
        self.requests: dict[int, Request] = {}
        self.blocks = blocks
        self.decisions: list[Decision] | None = None
        self._runner = runner
        self._device = device
        self._known = np.zeros((state.rows.size, limits.max_model_len), np.int32)
        self._composer = InputBatch(limits, state.adapters.size - 1, self._known, blocks, device)
        self._parts = new_scheduled(min(state.rows.size, limits.max_num_seqs))
        self._by_row: list[Request | None] = [None] * state.rows.size
        self._lists = {name: getattr(state.lists, name) for name in ("admitted", "preempted", "finished")}
        self._steps = 0

    @property
    def has_room(self) -> bool:
        """Whether a further request can be queued."""
        return bool(self.state.counters[s.N_FREE_ROWS] > 0)

    def ever_runs(self, request: Request) -> bool:
        """Tell whether an engine with nothing else to do takes a request; `submit` refuses the others."""
        limits, prompt = self.limits, request.prompt.size
        if limits.policy != SLORA or prompt >= limits.max_model_len:
            return bool(prompt < limits.max_model_len)
        # S-LoRA's rules: a prompt is not cut, and prompt, adapter and declared output fit together.
        tokens = (
            prompt + min(request.params.max_tokens, limits.max_model_len - prompt) + limits.block_size - 1
        )
        pages = self.state.counters[s.CAPACITY] - self.state.adapters.pages[request.adapter]
        return bool(prompt <= limits.max_num_batched_tokens and tokens < pages * limits.block_size)

    def prepare(self) -> None:
        """Do what the model needs once, where it is not to be done in the first steps."""
        self._runner.prepare()

    def submit(self, request: Request, prefix: int = 0, shared_tokens: int = 0) -> bool:
        """Queue a request; False when there is no room, or it can never run.

        Its first `shared_tokens` must be those of all requests of its adapter with that `prefix`.
        """
        size, most = request.prompt.size, request.params.max_tokens
        row = submit(
            self.state, self.limits, request.number, request.adapter, size, most, prefix, shared_tokens
        )
        if row == NONE:
            return False
        request.row = row
        self._known[row, :size] = request.prompt
        self._by_row[row] = self.requests[request.number] = request
        return True

    def abort(self, number: int, reason: FinishReason) -> None:
        """End a request of whose answer nobody wants more, and free at once what it holds."""
        request = self.requests.get(number)
        if request is not None:
            self._end_early(request, reason)

    def step(self) -> StepOutput | None:
        """Decide a step and run it; None when there is nothing to run now."""
        begin_ns = self.clock.now_ns()
        failed = self._take_arrived()
        watch = PhaseTimer()
        tokens = schedule(self.state, self.limits)
        parts, tally = read_step(self.state, self.residency.rank_of, self._parts)
        watch.lap("schedule")
        counters = self.state.counters.copy()
        if self.decisions is not None and (tokens or counters[s.N_LOADS]):
            self.decisions.append(decision_of(self.state, parts, begin_ns))
            watch.skip()
        self._move(begin_ns)
        watch.lap("prepare")
        errors = self.loads.run(watch)
        if tokens == 0:
            return StepOutput(None, [], failed) if failed else None
        emitted, unsound = self._run(parts, errors, watch)
        commit(self.state, self.limits)
        finished = failed + self._end(emitted, unsound, errors)
        watch.lap("commit")
        self.clock.step(watch.total_ns)
        end_ns = self.clock.now_ns()
        for request in emitted:
            request.token_ns.append(end_ns)
        self._steps += 1
        record = step_record(self._steps, begin_ns, tally, counters, self._disk_loads())
        return StepOutput(with_times(record, end_ns, len(finished), watch), emitted, finished)

    def _take_arrived(self) -> list[Request]:
        """Note the adapters that have been loaded beside the batch; return the requests of broken ones."""
        failed: list[Request] = []
        for arrival in self.loads.arrived():
            if arrival.error is not None:
                failed += self._fail(arrival.adapter, arrival.error)
            self.loads.accept(arrival)
        return failed

    def _move(self, begin_ns: int) -> None:
        """Note who left the running requests and who joined them."""
        if self.state.counters[s.N_PREEMPTED]:
            preempted = self._listed("preempted", s.N_PREEMPTED)
            self.blocks.release(preempted)
            for request in self._requests_of(preempted):
                request.running = False
                request.preemptions += 1
        if self.state.counters[s.N_ADMITTED]:
            for request in self._requests_of(self._listed("admitted", s.N_ADMITTED)):
                request.running = True
                if request.admitted_ns is None:
                    request.admitted_ns = begin_ns

    def _listed(self, name: str, counter: int) -> NDArray[np.int64]:
        """Return one of the scheduler's lists of rows."""
        rows: NDArray[np.int64] = self._lists[name][: self.state.counters[counter]]
        return rows

    def _requests_of(self, rows: NDArray[np.int64]) -> list[Request]:
        by_row = self._by_row
        return [request for row in rows.tolist() if (request := by_row[row]) is not None]

    def _disk_loads(self) -> int:
        loads = self.state.counters[s.N_LOADS]
        return int(self.state.adapters.load_from_disk[:loads].sum()) if loads else 0

    def _run(
        self, parts: ScheduledRequests, errors: Mapping[int, str], watch: PhaseTimer
    ) -> tuple[list[Request], list[Request]]:
        """Run the model on the step; return the requests that got a token, and those that cannot get one."""
        batch = self._composer.compose(parts)
        requests = self._requests_of(batch.rows)
        watch.lap("prepare")
        logits = self._runner.run(batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else the sampler's phase would be charged with the model
        watch.lap("forward")
        tokens, sound = sample(logits, requests)
        self._known[batch.rows, batch.next_positions] = tokens
        unsound = [requests[i] for i in np.flatnonzero(~sound).tolist()]
        if errors or unsound:
            # What ran with an adapter that could not be loaded is nonsense, and no other request's.
            good = [i for i, request in enumerate(requests) if sound[i] and request.adapter not in errors]
            requests, tokens = [requests[i] for i in good], tokens[good]
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.output.append(token)
        watch.lap("sample")
        return requests, unsound

    def _end(
        self, emitted: list[Request], unsound: list[Request], errors: Mapping[int, str]
    ) -> list[Request]:
        """Return the requests that are over: by length, by a stop token, or with an error."""
        finished = self._take_finished()
        for request in unsound:
            if request.finish_reason is None:
                self._end_early(request, "error")
                finished.append(request)
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
            finished += self._fail(adapter, error)
            self.loads.forget(adapter)
        return finished

    def _fail(self, adapter: int, error: str) -> list[Request]:
        """End all requests of an adapter that cannot be loaded."""
        failed = [request for request in self.requests.values() if request.adapter == adapter]
        for request in failed:
            self._end_early(request, "error")
            request.error = error
        return failed

    def _end_early(self, request: Request, reason: FinishReason) -> None:
        """End a request between two steps, whether it runs or waits."""
        if request.running:
            self.state.counters[s.N_FINISHED] = 0
            finish(self.state, self.limits, request.row)
            self._take_finished()
        else:
            cancel_waiting(self.state, self.limits, request.row)
            self._release(request)
        request.finish_reason = reason

    def _take_finished(self) -> list[Request]:
        rows = self._listed("finished", s.N_FINISHED)
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
