"""The loop: schedule, load adapters, run, sample, commit.

Every decision is `capplan.serving`'s, on the same kind of state that the twin moves; what happens here is
that decisions are carried out and measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from capplan.engine.batch import build_batch
from capplan.engine.blocks import BlockTables
from capplan.engine.clock import Clock
from capplan.engine.decisions import Decision, Parts, describe, new_parts, read_step
from capplan.engine.lora.loader import Loader
from capplan.engine.lora.residency import Residency
from capplan.engine.lora.sources import AdapterSource
from capplan.engine.records import StepRecord, begin_record, complete_record
from capplan.engine.request import FinishReason, Request
from capplan.engine.runner import ModelRunner
from capplan.engine.sampler import sample
from capplan.engine.stopwatch import Stopwatch
from capplan.engine.withdraw import forget_adapter, withdraw
from capplan.serving import NONE, Limits, State, adapter_loaded, commit, finish, schedule, submit
from capplan.serving import state as s
from capplan.serving.state import SLORA


class Step(NamedTuple):
    """What one step did."""

    record: StepRecord | None
    """None where nothing ran: requests have ended because their adapter could not be loaded, no more."""
    emitted: list[Request]
    """Requests that got a token."""
    finished: list[Request]
    """Requests that are over, be it for good or because of an error."""


class Loop:
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
        residency: Residency,
        loader: Loader,
        clock: Clock,
        device: torch.device,
    ) -> None:
        self.state = state
        self.limits = limits
        self.clock = clock
        self.loader = loader
        self.requests: dict[int, Request] = {}
        self._runner = runner
        self.blocks = blocks
        self.residency = residency
        self._device = device
        self._known = np.zeros((state.rows.size, limits.max_model_len), np.int32)
        self._parts = new_parts(min(state.rows.size, limits.max_num_seqs))
        self._steps = 0
        self.decisions: list[Decision] | None = None

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
        self.requests[request.number] = request
        return True

    def abort(self, number: int) -> None:
        """End a request whose answer nobody wants any more, and free at once what it holds."""
        request = self.requests.get(number)
        if request is not None:
            self._end_early(request, "abort")

    def add_adapter(self, number: int, source: AdapterSource, max_rank: int) -> None:
        """Take an adapter in; the first request of it loads it."""
        self.residency.enter(number, source, max_rank)
        self.adapter_entered(number)

    def adapter_entered(self, number: int) -> None:
        """Tell the scheduler what it must know of a new adapter."""
        if self.limits.policy == SLORA:
            self.state.adapters.pages[number] = self.residency.pages(number)

    def remove_adapter(self, number: int) -> None:
        """Drop an adapter, which no request in flight may have."""
        if self.state.adapters.claim[number] == s.LOADING:  # for a request that is gone
            self.loader.recall(number)
            adapter_loaded(self.state, number)
        self.loader.wait(number)
        forget_adapter(self.state, number)
        self.residency.leave(number)
        self.state.adapters.pages[number] = 0

    def step(self) -> Step | None:
        """Decide a step and run it; None when there is nothing to run now."""
        begin_ns = self.clock.now_ns()
        failed = self._take_arrived()
        watch = Stopwatch()
        tokens = schedule(self.state, self.limits)
        parts = read_step(self.state, self._parts)
        watch.lap("schedule")
        if self.decisions is not None and (tokens or self.state.counters[s.N_LOADS]):
            self.decisions.append(describe(self.state, parts, begin_ns))
            watch.skip()
        self._move(begin_ns)
        watch.lap("prepare")
        errors = self._load(watch)
        if tokens == 0:
            return Step(None, [], failed) if failed else None
        emitted, logits = self._run(parts, watch)
        self._steps += 1
        record = begin_record(self.state, parts, self.residency.rank_of, self._steps, begin_ns)
        tokens_out = zip(emitted, sample(logits, emitted), strict=True)
        # What ran with an adapter that could not be loaded is nonsense, and nobody else's.
        emitted = [
            self._append(request, token) for request, token in tokens_out if request.adapter not in errors
        ]
        watch.lap("sample")
        commit(self.state, self.limits)
        finished = failed + self._end(emitted, errors)
        watch.lap("commit")
        self.clock.step(watch.total_ns)
        end_ns = self.clock.now_ns()
        for request in emitted:
            request.token_ns.append(end_ns)
        return Step(complete_record(record, end_ns, len(finished), watch), emitted, finished)

    def _take_arrived(self) -> list[Request]:
        """Note the adapters that have been loaded beside the batch; return the requests of broken ones."""
        failed: list[Request] = []
        for adapter, error in self.loader.arrived():
            if error is not None:
                failed += self._fail(adapter, error)
            adapter_loaded(self.state, adapter)
            if error is not None:
                self._forget(adapter)
        return failed

    def _move(self, begin_ns: int) -> None:
        """Note who left the running requests and who joined them."""
        c, lists = self.state.counters, self.state.lists
        preempted = lists.preempted[: c[s.N_PREEMPTED]]
        self.blocks.release(preempted)
        for number in self.state.rows.request[preempted]:
            self.requests[int(number)].running = False
            self.requests[int(number)].preemptions += 1
        for number in self.state.rows.request[lists.admitted[: c[s.N_ADMITTED]]]:
            request = self.requests[int(number)]
            request.running = True
            if request.admitted_ns is None:
                request.admitted_ns = begin_ns

    def _load(self, watch: Stopwatch) -> dict[int, str]:
        """Begin the loads of this step, do those that it has to wait for, and return what went wrong."""
        state, slora = self.state, self.limits.policy == SLORA
        beside = bool(self.limits.load_beside)
        errors: dict[int, str | None] = {}
        if slora or state.counters[s.N_LOADS] > 0:
            for adapter, job in self.residency.follow(state, self.loader.wait):
                if beside or slora:
                    watch.lap("load")
                    self.loader.begin(adapter, job, announce=beside)
                    watch.skip()
                else:
                    errors[adapter] = job()
        watch.lap("load")
        if slora:  # a batch of prompts waits until all of its adapters are there
            admitted = state.lists.admitted[: state.counters[s.N_ADMITTED]]
            for adapter in set(state.rows.adapter[admitted].tolist()) - {0}:
                ready_ns = self.loader.ready_ns(adapter)
                errors[adapter] = self.loader.wait(adapter)
                watch.lap("load")
                watch.until("load", ready_ns - self.clock.now_ns())
        return {adapter: error for adapter, error in errors.items() if error is not None}

    def _run(self, parts: Parts, watch: Stopwatch) -> tuple[list[Request], torch.Tensor]:
        """Return the requests that get a token and their logits."""
        batch = build_batch(parts, self.blocks, self._known, self.limits.block_size, self._device)
        watch.lap("prepare")
        logits = self._runner.run(batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else the sampler's phase would be charged with the model
        watch.lap("forward")
        return [self.requests[int(number)] for number in parts.request[batch.emitting]], logits

    def _append(self, request: Request, token: int) -> Request:
        at = request.prompt.size + len(request.output)
        if at < self._known.shape[1]:
            self._known[request.row, at] = token
        request.output.append(token)
        return request

    def _end(self, emitted: list[Request], errors: Mapping[int, str]) -> list[Request]:
        """Return the requests that are over: by length, by a stop token, or with the error of an adapter."""
        finished = self._take_finished()
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
            self._forget(adapter)
        return finished

    def _fail(self, adapter: int, error: str) -> list[Request]:
        """End all requests of an adapter that cannot be loaded."""
        failed = [request for request in self.requests.values() if request.adapter == adapter]
        for request in failed:
            self._end_early(request, "error")
            request.error = error
        return failed

    def _forget(self, adapter: int) -> None:
        """Have an adapter that could not be loaded loaded anew when it is asked for again."""
        forget_adapter(self.state, adapter)
        self.residency.drop(adapter)

    def _end_early(self, request: Request, reason: FinishReason) -> None:
        """End a request between two steps, whether it runs or waits."""
        if request.running:
            self.state.counters[s.N_FINISHED] = 0
            finish(self.state, self.limits, request.row)
            self._take_finished()
        else:
            withdraw(self.state, self.limits, request.row)
            del self.requests[request.number]
        request.finish_reason = reason

    def _take_finished(self) -> list[Request]:
        rows = self.state.lists.finished[: self.state.counters[s.N_FINISHED]]
        self.blocks.release(rows)
        finished = [self.requests.pop(int(number)) for number in self.state.rows.request[rows]]
        for request in finished:
            request.running = False
            request.finish_reason = "length"
        return finished
