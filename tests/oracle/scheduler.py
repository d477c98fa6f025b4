"""Reference implementation of vLLM's V1 scheduler: plain lists, one request at a time.

Source: vLLM 0.32.0, ``vllm/v1/core/sched/scheduler.py`` and ``async_scheduler.py``, with switches for the
differences of other versions. It reproduces the recorded decisions of that scheduler (``tests/golden``), and
tests compare the compiled rules of `capplan.serving` with it. Each step scans the whole queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from capplan.serving import Limits
from tests.oracle.memory import ReferenceAdapters, ReferenceBlocks


class ReferenceScheduler:
    """The rules: calls of `schedule` and `commit` in turn, whether steps overlap or not.

    With asynchronous scheduling `commit` processes the output of the step before, so that the next step is
    scheduled without knowing the tokens of this one.
    """

    def __init__(self, limits: Limits, num_blocks: int, adapters: int) -> None:
        self.limits = limits
        self.blocks = ReferenceBlocks(num_blocks, bool(limits.unhashed_to_front))
        self.adapters = ReferenceAdapters(adapters, limits.max_loras, limits.max_cpu_loras)
        self.waiting: deque[ReferenceRequest] = deque()
        self.running: list[ReferenceRequest] = []
        self.scheduled: list[tuple[ReferenceRequest, int]] = []
        # Scheduled requests of steps in flight, and whether each gets a token.
        self.in_flight: deque[list[tuple[ReferenceRequest, bool]]] = deque()

    def submit(
        self,
        request: int,
        adapter: int,
        prompt: int,
        output: int,
        prefix_group: int = 0,
        shared_prefix_tokens: int = 0,
    ) -> bool:
        """Queue a request; return False if its prompt leaves no room for output."""
        room = self.limits.max_model_len - prompt
        if room <= 0:
            return False
        shared = min(shared_prefix_tokens, prompt)
        self.waiting.append(
            ReferenceRequest(request, adapter, prompt, min(output, room), prefix_group, shared)
        )
        return True

    def adapters_in_use(self) -> set[int]:
        """Return the adapters of running requests that need a further step."""
        return {r.adapter for r in self.running if not r.draining} - {0}

    def _kept(self) -> set[int]:
        """Return the adapters that keep their slots for running requests."""
        if self.limits.hold_ending:
            return {request.adapter for request in self.running} - {0}
        return self.adapters_in_use()

    def residents(self) -> set[int]:
        """Return the adapters in slots."""
        return set(self.adapters.slots.order)

    def adapter_loaded(self, adapter: int) -> None:
        """Note that an asynchronously loaded adapter is in its slot."""
        self.adapters.arrive(adapter, any(request.adapter == adapter for request in self.waiting))

    def schedule(self) -> ReferenceStep:
        """Decide a step."""
        self.scheduled = []
        cap = self._prefill_cap()
        budget, preempted = self._serve_running(self.limits.max_num_batched_tokens, cap)
        served = len(self.scheduled)
        loads = [] if preempted else self._admit(budget, cap)
        for request, tokens in self.scheduled:
            request.computed += tokens
        return ReferenceStep(
            [(request.number, tokens) for request, tokens in self.scheduled],
            [request.number for request, _ in self.scheduled[served:]],
            [request.number for request in preempted],
            loads,
            len(self.blocks.free),
        )

    def _prefill_cap(self) -> int:
        """Return the maximum of tokens of one request in this step."""
        limits = self.limits
        lone = len(self.running) + len(self.waiting) <= 1
        if limits.long_prefill_tokens == 0 or (lone and limits.lone_prefill_exempt):
            return limits.max_num_batched_tokens
        return limits.long_prefill_tokens

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _serve_running(self, budget: int, cap: int) -> tuple[int, list[ReferenceRequest]]:
        """Serve running requests in order of admission; return the remaining budget and the preempted."""
        preempted: list[ReferenceRequest] = []
        at = 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            if not request.draining:
                tokens = min(request.known + request.promised - request.computed, cap, budget)
                needed = self._blocks_for(request.computed + tokens) - len(request.blocks)
                while needed > len(self.blocks.free) and len(self.running) > at:
                    preempted.append(self._preempt_last())
                if len(self.running) == at:
                    break
                self._grant(request, tokens)
                budget -= tokens
            at += 1
        return budget, preempted

    def _grant(self, request: ReferenceRequest, tokens: int) -> None:
        """Allocate the blocks for the next tokens of a request, and register the full ones."""
        after = request.computed + tokens
        request.blocks += self.blocks.take(self._blocks_for(after) - len(request.blocks))
        self._register(request, min(after, request.known))
        self.scheduled.append((request, tokens))

    def _register(self, request: ReferenceRequest, tokens: int) -> None:
        if not self.limits.prefix_caching:
            return
        size = self.limits.block_size
        for block in range(request.registered, tokens // size):
            self.blocks.register(request.blocks[block], request.key(block, size))
            request.registered = block + 1

    def _preempt_last(self) -> ReferenceRequest:
        """Preempt the request admitted last; a token in flight will still arrive."""
        request = self.running[-1]
        resting = self.limits.hold_ending or not request.draining
        self._leave_running(request)
        request.computed = request.promised = 0
        self.waiting.appendleft(request)
        if resting:
            self._rest(request.adapter)
        return request

    def _leave_running(self, request: ReferenceRequest) -> None:
        self.running.remove(request)
        request.running = False
        self.blocks.release(request.blocks)
        request.blocks, request.registered = [], 0

    def _rest(self, adapter: int) -> None:
        if adapter and adapter not in self._kept():
            self.adapters.rest(adapter)

    def _admit(self, budget: int, cap: int) -> list[tuple[int, bool]]:
        """Admit waiting requests while tokens, places, slots and blocks last; return the adapter loads.

        In vLLM a preempted request waits for its output in flight (``num_stale_output_tokens``). With one
        step in flight that never occurs: the step of the preemption admits no request, and the output arrives
        before the next one.
        """
        limits = self.limits
        counted = self.running if limits.hold_ending else [request for request, _ in self.scheduled]
        active = {request.adapter for request in counted} - {0} | self.adapters.claimed()
        skipped: list[ReferenceRequest] = []
        loads: list[tuple[int, bool]] = []
        while self.waiting and budget > 0 and len(self.running) < limits.max_num_seqs:
            request = self.waiting[0]
            if not self._may_run(request.adapter, active, loads):
                skipped.append(self.waiting.popleft())
                continue
            hit = self._cached_blocks(request)
            computed = len(hit) * limits.block_size
            tokens = min(request.known - computed, cap, budget)
            must_fit = request.known if limits.reserve_full_sequence else computed + tokens
            needed = self._blocks_for(must_fit) - len(hit) + self.blocks.unused(hit)
            spare = limits.watermark_blocks if self.running else 0
            if needed + spare > len(self.blocks.free):
                break
            self.waiting.popleft()
            if request.adapter and request.adapter not in active:
                loads += self.adapters.load(request.adapter, active)
                active.add(request.adapter)
            self.adapters.unclaim(request.adapter)
            self._start(request, hit, tokens)
            budget -= tokens
        self.waiting.extendleft(skipped if limits.reverse_skipped else reversed(skipped))
        return loads

    def _may_run(self, adapter: int, active: set[int], loads: list[tuple[int, bool]]) -> bool:
        """Return whether a request of this adapter may run now, or is skipped.

        With asynchronous loads, an adapter that is not resident takes a slot, counts as active from now on,
        and is added to `loads`.
        """
        if adapter == 0 or adapter in active:
            return adapter not in self.adapters.coming
        if len(active) == self.limits.max_loras:
            return False
        if not self.limits.load_beside or self.adapters.is_resident(adapter):
            return True
        loads += self.adapters.claim(adapter, active)
        active.add(adapter)
        return False

    def _start(self, request: ReferenceRequest, hit: list[int], tokens: int) -> None:
        self.running.append(request)
        request.running = True
        self.blocks.share(hit)
        request.blocks, request.registered = list(hit), len(hit)
        request.computed = len(hit) * self.limits.block_size
        self._grant(request, tokens)

    def _cached_blocks(self, request: ReferenceRequest) -> list[int]:
        """Return the cached blocks of a waiting request, without the block of its last token."""
        if not self.limits.prefix_caching:
            return []
        size = self.limits.block_size
        keys: Iterator[Hashable] = (request.key(block, size) for block in range((request.known - 1) // size))
        return self.blocks.find(keys)

    def commit(self) -> ReferenceOutput:
        """Run the decided step, and process the output that has arrived."""
        output = ReferenceOutput([], [], [])
        batch = []
        for request, _ in self.scheduled:
            emits = request.computed == request.known + request.promised
            batch.append((request, emits))
            if emits:
                later = request.output + request.promised > 0
                (output.later if later else output.first).append(request.number)
                request.promised += 1
        for request, _ in self.scheduled:
            if request.draining:
                output.finished.append(request.number)
                if not self.limits.hold_ending:
                    self._rest(request.adapter)
        self.in_flight.append(batch)
        if len(self.in_flight) > self.limits.async_scheduling:
            for request, emits in self.in_flight.popleft():
                if emits:
                    self._process(request)
        return output

    def _process(self, request: ReferenceRequest) -> None:
        """Append the token of a request; a preempted one also gets it, and may end while waiting."""
        request.output += 1
        if request.running:
            request.promised -= 1
            self._register(request, request.computed - request.promised)
        if request.output == request.target:
            if request.running:
                self._leave_running(request)
                if self.limits.hold_ending:
                    self._rest(request.adapter)
            else:
                self.waiting.remove(request)


@dataclass(eq=False)
class ReferenceRequest:
    """A request in flight; all lengths in tokens."""

    number: int
    adapter: int
    prompt: int
    target: int
    """Output tokens after which it ends."""
    prefix_group: int
    shared_prefix: int
    """Prompt tokens shared with its group."""
    output: int = 0
    computed: int = 0
    """Tokens with valid KV, including those of steps in flight."""
    promised: int = 0
    """Output tokens of steps in flight."""
    running: bool = False
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    """Number of its registered blocks."""

    @property
    def known(self) -> int:
        """Prompt tokens and processed output tokens."""
        return self.prompt + self.output

    @property
    def draining(self) -> bool:
        """Whether its last token is in flight."""
        return self.computed == self.prompt + self.target - 1

    def key(self, block: int, block_size: int) -> Hashable:
        """Return the key of the content of a full block and all blocks before it.

        Requests whose whole prompt is shared prefix have the same output.
        """
        if (block + 1) * block_size <= self.shared_prefix:
            return self.adapter, self.prefix_group, block
        if self.shared_prefix < self.prompt:
            return "own", self.number, block
        return self.adapter, self.prefix_group, self.prompt, block


class ReferenceStep(NamedTuple):
    """Decision of one step; requests by number."""

    tokens: list[tuple[int, int]]
    """(request, tokens) in the order in which they were scheduled."""
    admitted: list[int]
    """Those that were waiting."""
    preempted: list[int]
    loads: list[tuple[int, bool]]
    """(adapter, from disk)"""
    free_blocks: int
    """After scheduling."""
    prefetch: int | None = None
    """The last one of `loads`, if no request needs it yet."""


class ReferenceOutput(NamedTuple):
    """Tokens of one step; requests by number."""

    first: list[int]
    """Requests with their first token."""
    later: list[int]
    """Requests with a later token."""
    finished: list[int]
    """Requests of both with their last token; in async scheduling they hold blocks one step longer."""
