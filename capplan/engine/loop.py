"""The loop: schedule, load adapters, run, sample, commit.

Every decision is `capplan.serving`'s, on the same kind of state that the twin moves; what happens here is
that decisions are carried out and measured.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.batch import build_batch
from capplan.engine.blocks import BlockTables
from capplan.engine.clock import Clock
from capplan.engine.decisions import Decision, Parts, describe, new_parts, read_step
from capplan.engine.lora.loader import Loader
from capplan.engine.lora.residency import Residency
from capplan.engine.records import StepRecord
from capplan.engine.request import Request
from capplan.engine.runner import ModelRunner
from capplan.engine.sampler import sample
from capplan.engine.stopwatch import Stopwatch
from capplan.serving import NONE, Limits, State, adapter_loaded, commit, finish, schedule, submit
from capplan.serving import state as s
from capplan.serving.state import SLORA


class Step(NamedTuple):
    """What one step did."""

    record: StepRecord
    emitted: list[Request]
    """Requests that got a token."""
    finished: list[Request]


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
        self._blocks = blocks
        self._residency = residency
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
        """End a request whose answer nobody wants any more: now if it runs, else when it would."""
        request = self.requests.get(number)
        if request is not None:
            request.finish_reason = "abort"
            if request.running:
                self.state.counters[s.N_FINISHED] = 0
                finish(self.state, self.limits, request.row)
                self._take_finished()

    def step(self) -> Step | None:
        """Decide a step and run it; None when there is nothing to run now."""
        begin_ns = self.clock.now_ns()
        for adapter in self.loader.arrived():
            adapter_loaded(self.state, adapter)
        watch = Stopwatch()
        tokens = schedule(self.state, self.limits)
        parts = read_step(self.state, self._parts)
        watch.lap("schedule")
        if self.decisions is not None and (tokens or self.state.counters[s.N_LOADS]):
            self.decisions.append(describe(self.state, parts, begin_ns))
            watch.skip()
        self._move(begin_ns)
        watch.lap("prepare")
        self._load(watch)
        if tokens == 0:
            return None
        emitted, logits = self._run(parts, watch)
        record = self._describe(parts, begin_ns)
        for request, token in zip(emitted, sample(logits, emitted), strict=True):
            self._append(request, token)
        watch.lap("sample")
        commit(self.state, self.limits)
        finished = self._end(emitted)
        watch.lap("commit")
        self.clock.step(watch.total_ns)
        end_ns = self.clock.now_ns()
        for request in emitted:
            request.token_ns.append(end_ns)
        return Step(_complete(record, end_ns, len(finished), watch), emitted, finished)

    def _move(self, begin_ns: int) -> None:
        """Note who left the running requests and who joined them."""
        c, lists = self.state.counters, self.state.lists
        preempted = lists.preempted[: c[s.N_PREEMPTED]]
        self._blocks.release(preempted)
        for number in self.state.rows.request[preempted]:
            self.requests[int(number)].running = False
            self.requests[int(number)].preemptions += 1
        for number in self.state.rows.request[lists.admitted[: c[s.N_ADMITTED]]]:
            request = self.requests[int(number)]
            request.running = True
            if request.admitted_ns is None:
                request.admitted_ns = begin_ns

    def _load(self, watch: Stopwatch) -> None:
        """Begin the loads of this step, and do those that the step has to wait for."""
        state, slora = self.state, self.limits.policy == SLORA
        beside = bool(self.limits.load_beside)
        if slora or state.counters[s.N_LOADS] > 0:
            for adapter, job in self._residency.follow(state, self.loader.wait):
                if beside or slora:
                    watch.lap("load")
                    self.loader.begin(adapter, job, announce=beside)
                    watch.skip()
                else:
                    job()
        watch.lap("load")
        if slora:  # a batch of prompts waits until all of its adapters are there
            admitted = state.lists.admitted[: state.counters[s.N_ADMITTED]]
            for adapter in set(state.rows.adapter[admitted].tolist()) - {0}:
                ready_ns = self.loader.ready_ns(adapter)
                watch.lap("load")
                watch.until("load", ready_ns - self.clock.now_ns())

    def _run(self, parts: Parts, watch: Stopwatch) -> tuple[list[Request], torch.Tensor]:
        """Return the requests that get a token and their logits."""
        batch = build_batch(parts, self._blocks, self._known, self.limits.block_size, self._device)
        watch.lap("prepare")
        logits = self._runner.run(batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else the sampler's phase would be charged with the model
        watch.lap("forward")
        return [self.requests[int(number)] for number in parts.request[batch.emitting]], logits

    def _append(self, request: Request, token: int) -> None:
        at = request.prompt.size + len(request.output)
        if at < self._known.shape[1]:
            self._known[request.row, at] = token
        request.output.append(token)

    def _end(self, emitted: list[Request]) -> list[Request]:
        """Return the requests that are over: by length, by a stop token, or because nobody waits for them."""
        over = set(self._finished_numbers().tolist())
        for request in emitted:
            stops = request.output[-1] in request.stop_ids
            if stops and request.finish_reason is None:
                request.finish_reason = "stop"
        for request in self.requests.values():
            if request.running and request.finish_reason is not None and request.number not in over:
                finish(self.state, self.limits, request.row)
        return self._take_finished()

    def _finished_numbers(self) -> NDArray[np.int64]:
        c = self.state.counters
        numbers: NDArray[np.int64] = self.state.rows.request[self.state.lists.finished[: c[s.N_FINISHED]]]
        return numbers

    def _take_finished(self) -> list[Request]:
        self._blocks.release(self.state.lists.finished[: self.state.counters[s.N_FINISHED]])
        finished = [self.requests.pop(int(number)) for number in self._finished_numbers()]
        for request in finished:
            request.running = False
            request.finish_reason = request.finish_reason or "length"
        return finished

    def _describe(self, parts: Parts, begin_ns: int) -> StepRecord:
        """Return the record of the step that was decided, its times still to come."""
        c = self.state.counters
        ranks = self._residency.rank_of[parts.adapter]
        decodes = (parts.tokens == 1) & (self.state.rows.output[parts.row] > 0)
        self._steps += 1
        return StepRecord(
            step=self._steps,
            begin_ns=begin_ns,
            tokens=int(c[s.STEP_TOKENS]),
            decode_requests=int(decodes.sum()),
            prefill_requests=int((~decodes).sum()),
            prefill_tokens=int(parts.tokens[~decodes].sum()),
            requests=int(c[s.N_RUNNING] - c[s.N_ENDING]),
            waiting=int(c[s.N_WAITING]),
            kv_tokens=int(c[s.KV_TOKENS]),
            adapters=int(c[s.N_ACTIVE] - c[s.N_CLAIMED]),
            resident=int(c[s.N_RESIDENT]),
            rank_sum=int(ranks.sum()),
            max_rank=int(ranks.max(initial=0)),
            loads=int(c[s.N_LOADS]),
            disk_loads=int(self.state.adapters.load_from_disk[: c[s.N_LOADS]].sum()),
            preemptions=int(c[s.N_PREEMPTED]),
        )


def _complete(record: StepRecord, end_ns: int, finished: int, watch: Stopwatch) -> StepRecord:
    return record._replace(
        finished=finished,
        duration_ns=end_ns - record.begin_ns,
        schedule_ms=watch.ms("schedule"),
        load_ms=watch.ms("load"),
        prepare_ms=watch.ms("prepare"),
        forward_ms=watch.ms("forward"),
        sample_ms=watch.ms("sample"),
        commit_ms=watch.ms("commit"),
    )
