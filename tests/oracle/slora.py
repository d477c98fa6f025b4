"""Reference implementation of S-LoRA's scheduler: plain lists, one request at a time.

Source: S-LoRA c1ddf48, ``slora/server/router/manager.py`` and ``req_queue.py``, with two differences. KV is
allocated in blocks instead of single tokens, so the last block of each request counts in full. Prefetched
adapters take memory, and release it when a due request needs it. Tests compare the compiled
`capplan.serving.pooled._slora` with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from capplan.serving import Limits
from tests.oracle.scheduler import ReferenceOutput, ReferenceRequest, ReferenceStep


class ReferenceSlora:
    """The rules: calls of `schedule` and `commit` in turn.

    Parameters
    ----------
    limits
        The limits; those of vLLM on slots, prefill chunks and admission are ignored.
    num_blocks
        KV blocks of the pool that requests and adapters share.
    pages
        KV blocks that each adapter takes; the first entry is the base model's.
    """

    def __init__(self, limits: Limits, num_blocks: int, pages: Sequence[int]) -> None:
        self.limits = limits
        self.num_blocks = num_blocks
        self.pages = pages
        self.waiting: deque[ReferenceRequest] = deque()
        self.running: list[ReferenceRequest] = []
        self.fetched: set[int] = set()
        """Prefetched adapters that no running request uses."""
        self.decodes = 0
        """Decode steps since the last batch of prompts."""
        self.scheduled: list[ReferenceRequest] = []

    def submit(
        self,
        request: int,
        adapter: int,
        prompt: int,
        output: int,
        prefix_group: int = 0,
        shared_prefix_tokens: int = 0,
    ) -> bool:
        """Queue a request; return False if it could not run alone."""
        room = self.limits.max_model_len - prompt
        if room <= 0 or prompt > self.limits.max_num_batched_tokens:
            return False
        new = ReferenceRequest(
            request, adapter, prompt, min(output, room), prefix_group, shared_prefix_tokens
        )
        if not self._fit([new], {adapter}):
            return False
        self.waiting.append(new)
        return True

    def residents(self) -> set[int]:
        """Return the adapters in memory: those in use, and prefetched ones."""
        return {request.adapter for request in self.running} - {0} | self.fetched

    def schedule(self) -> ReferenceStep:
        """Decide a step: either a batch of prompts, or a token for each request that runs."""
        loads: list[int] = []
        batch: list[ReferenceRequest] = []
        if not self.running or self.decodes >= self.limits.admit_every:
            batch, loads = self._admit()
        if batch:
            self.decodes = 0
        elif self.running:
            if self.decodes in (self.limits.admit_every // 2, self.limits.admit_every - 3):
                loads += self._fetch_ahead()
            self.decodes += 1
        self.scheduled = batch or list(self.running)
        tokens = [(request.number, request.known - request.computed) for request in self.scheduled]
        for request in self.scheduled:
            request.computed = request.known
        return ReferenceStep(
            tokens,
            admitted=[request.number for request in batch],
            preempted=[],
            loads=[(adapter, False) for adapter in loads],  # the host holds all adapters
            free_blocks=self.num_blocks - self._pages_of(self.residents()) - self._held_blocks(),
        )

    def _pages_of(self, adapters: Iterable[int]) -> int:
        return sum(self.pages[adapter] for adapter in adapters)

    def _held_blocks(self) -> int:
        return sum(-(-request.computed // self.limits.block_size) for request in self.running)

    def _admit(self) -> tuple[list[ReferenceRequest], list[int]]:
        """Admit waiting requests in order up to the first that does not fit; return them and the loads."""
        batch: list[ReferenceRequest] = []
        loads: list[int] = []
        tokens_left = self.limits.max_num_batched_tokens
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            if request.prompt > tokens_left:
                break
            if not self._fit([*self.running, request], self.residents() | {request.adapter}):
                self.fetched &= {request.adapter}
                if not self._fit([*self.running, request], self.residents() | {request.adapter}):
                    break
            if request.adapter and request.adapter not in self.residents():
                loads.append(request.adapter)
            self.fetched.discard(request.adapter)
            self.waiting.popleft()
            self.running.append(request)
            request.running = True
            batch.append(request)
            tokens_left -= request.prompt
        return batch, loads

    def _fit(self, requests: Sequence[ReferenceRequest], adapters: Iterable[int]) -> bool:
        """Return whether these requests can run to their declared ends together with these adapters.

        At the end of the i-th request in the descending order of ends, the first i have each grown by the
        tokens left of the i-th. The first output token counts as held.
        """
        size = self.limits.block_size
        room = (self.num_blocks - self._pages_of(adapters)) * size
        held = 0
        for i, request in enumerate(sorted(requests, key=lambda r: r.output - r.target), start=1):
            held += request.prompt + max(1, request.output) + size - 1
            left = request.target - request.output - 1
            if held + i * left >= room:
                return False
        return True

    def _fetch_ahead(self) -> list[int]:
        """Prefetch the adapters of a possible next batch while the running requests fit."""
        loads: list[int] = []
        tokens = 0
        for request in self.waiting:
            tokens += request.prompt
            adapters = self.residents() | {request.adapter}
            if tokens > self.limits.max_num_batched_tokens or not self._fit(self.running, adapters):
                break
            if request.adapter and request.adapter not in self.residents():
                self.fetched.add(request.adapter)
                loads.append(request.adapter)
        return loads

    def commit(self) -> ReferenceOutput:
        """Append a token to every request of the step, and remove finished ones."""
        output = ReferenceOutput([], [], [])
        for request in self.scheduled:
            (output.later if request.output else output.first).append(request.number)
            request.output += 1
            if request.output == request.target:
                output.finished.append(request.number)
                self.running.remove(request)
        return output
