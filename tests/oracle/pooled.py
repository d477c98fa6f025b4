"""Reference implementation of the rules for one pool: plain lists, one request at a time.

Source: Chameleon, sections 4.1 to 4.4. Everything that the compiled rules keep up to date
is computed from the running rows here: reservations, outstanding tokens, free blocks, pinned adapters.
Tests compare the two.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from capplan.serving import Limits
from capplan.serving.pooled import ASYNCHRONOUS, QUEUES, SJF
from capplan.serving.pooled._state import BY_HISTOGRAM, NO_PREFETCH
from tests.oracle.admission import QueueAdmission
from tests.oracle.caches import CachedAdapter, ReferenceCache
from tests.oracle.merging import Merging
from tests.oracle.scheduler import ReferenceOutput, ReferenceStep
from tests.oracle.size_queues import PooledRequest, SizeQueues

_REQUESTS_TO_PREFETCH_FOR = 64


class ReferencePooled:
    """The rules: calls of `schedule` and `commit` in turn.

    Parameters
    ----------
    limits
        The limits and switches.
    num_blocks
        KV blocks of the pool that requests and adapters share.
    adapters
        By number; the first one is the base model.
    queues
        Queues until the first refresh.
    weights
        Of frequency, recency and size in the score of a cached adapter.
    shares_charge
        Whether an adapter in use takes its tokens from quotas once.
    """

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        adapters: Sequence[CachedAdapter],
        queues: SizeQueues,
        weights: Sequence[float] = (0.45, 0.10, 0.45),
        shares_charge: bool = False,
    ) -> None:
        self.limits = limits
        self.num_blocks = num_blocks
        self.cache = ReferenceCache(limits, adapters, weights)
        self.queues = queues
        self.shares_charge = shares_charge
        self.adapter_books: dict[int, list[int]] = {}
        """Of adapters in use: their charge by queue, if requests share it."""
        self.merging = Merging(limits)
        self.now_ns = 0
        self.waiting: list[PooledRequest] = []
        """In order of arrival."""
        self.running: list[PooledRequest] = []
        """In order of admission."""
        self.scheduled: list[tuple[PooledRequest, int]] = []
        self.scheduled_ns = 0
        self.had_prompts = False
        """Whether the last step had prompts."""
        self.taken = 0
        """Blocks for the tokens of the step so far."""
        self.decode_ns = 0
        self.prefill_ns_per_token = 0
        self.decodes = 0
        """Decode steps since the last admission that was due."""
        self.arrivals = self.admissions = 0
        self.admitted: list[PooledRequest] = []
        self.preempted: list[PooledRequest] = []
        self.loads: list[int] = []
        self.counts = self.cache.counts
        self.window: list[PooledRequest] = []
        """All requests so far, for a refresh."""

    # -- the pool --

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold `tokens`."""
        return -(-tokens // self.limits.block_size)

    def free_blocks(self) -> int:
        """Return the blocks that hold neither adapters nor KV, that of the step included."""
        held = sum(self.blocks_for(request.computed) for request in self.running)
        return self.num_blocks - held - self.taken - self.cache.pages(self.cache.residents())

    def pages(self, adapter: int) -> int:
        """Return the blocks of an adapter."""
        return self.cache.adapters[adapter].pages

    def reservation(self, request: PooledRequest) -> int:
        """Return the blocks that a request reserves."""
        return self.blocks_for(request.prompt + max(request.predicted, request.output + 1))

    def charge(self, request: PooledRequest) -> int:
        """Return the tokens that a request is charged, without an adapter that requests share."""
        adapter = 0 if self.shares_charge else self.cache.adapters[request.adapter].tokens
        return request.prompt + request.predicted + adapter

    def shared_tokens(self, request: PooledRequest, running: Sequence[PooledRequest]) -> int:
        """Return the tokens of its adapter that a request is charged beside that: none if another uses it."""
        is_used = any(other.adapter == request.adapter for other in running)
        return 0 if is_used or not self.shares_charge else self.cache.adapters[request.adapter].tokens

    def largest_output(self, request: PooledRequest) -> int:
        """Return the most output tokens with which a request fits into the empty pool."""
        room = (self.num_blocks - self.pages(request.adapter)) * self.limits.block_size
        return room - request.prompt - self.limits.block_size

    def pinned(self, running: Collection[PooledRequest]) -> set[int]:
        """Return the adapters that must stay if these requests run."""
        loading = {a for a, adapter in enumerate(self.cache.adapters) if adapter.loading}
        return loading | {request.adapter for request in running} - {0}

    def fits_memory(self, request: PooledRequest, running: Sequence[PooledRequest]) -> bool:
        """Return whether memory suffices for a request beside those that run."""
        return self.lacking_blocks(request, running) <= 0

    def lacking_blocks(self, request: PooledRequest, running: Sequence[PooledRequest]) -> int:
        """Return the blocks that a request lacks beside those that run."""
        adapters = self.pinned([*running, request])
        reserved = sum(other.reserved for other in running) + self.reservation(request)
        return reserved + self.cache.pages(adapters) - self.num_blocks

    def fits_to_the_end(self, requests: Sequence[PooledRequest], adapters: Collection[int]) -> bool:
        """Return whether requests can run to their declared ends beside adapters: S-LoRA's look-ahead.

        Requests that start at an unknown time count in full.
        """
        size = self.limits.block_size
        room = (self.num_blocks - self.cache.pages(adapters)) * size
        late = [request for request in requests if self.starts_late(request)]
        held = sum(request.prompt + request.target + size - 1 for request in late)
        if late and held >= room:
            return False
        others = [request for request in requests if request not in late]
        for i, request in enumerate(sorted(others, key=lambda r: r.output - r.target), start=1):
            held += request.prompt + max(1, request.output) + size - 1
            if held + i * (request.target - request.output - 1) >= room:
                return False
        return True

    def starts_late(self, request: PooledRequest) -> bool:
        """Return whether others go on decoding before a request does."""
        return not request.is_decoding and bool(self.limits.chunked or not self.may_start(request))

    def may_start(self, request: PooledRequest) -> bool:
        """Return whether a step may have the prompt of a request, after it or while the adapter is loaded."""
        if not self.merging.serves(request.adapter):
            return False
        return self.limits.loading != ASYNCHRONOUS or self.cache.is_ready(request.adapter)

    def make_room(self, blocks: int, first_tier_only: bool = False) -> bool:
        """Evict idle adapters until `blocks` are free; return whether they are."""
        while self.free_blocks() < blocks:
            wanted = {request.adapter for request in self.waiting}
            if not self.cache.evict(self.now_ns, wanted, first_tier_only):
                return False
        return True

    # -- interface --

    def submit(
        self,
        request: int,
        adapter: int,
        prompt: int,
        output: int,
        prefix_group: int = 0,
        shared_prefix_tokens: int = 0,
        predicted: int = 0,
        arrival_ns: int = 0,
    ) -> bool:
        """Queue a request; return False if it could not run alone."""
        target = min(output, self.limits.max_model_len - prompt)
        if target <= 0:
            return False
        new = PooledRequest(request, adapter, prompt, target, prefix_group, shared_prefix_tokens)
        if target > self.largest_output(new):
            return False
        new.predicted = min(predicted or target, self.largest_output(new))
        new.predicted_at_first = new.predicted
        new.arrival_ns = arrival_ns
        new.arrival = self.arrivals
        self.arrivals += 1
        new.queue = self.queue_of(new)
        if adapter:
            wanted = any(other.adapter == adapter for other in self.waiting)
            self.cache.note_arrival(adapter, arrival_ns, wanted)
        self.waiting.append(new)
        self.window.append(new)
        return True

    def queue_of(self, request: PooledRequest) -> int:
        """Return the size queue of a request."""
        size_bytes = self.cache.adapters[request.adapter].size_bytes
        return self.queues.queue_of(self.queues.size(request.prompt, request.predicted, size_bytes))

    def adapters_in_use(self) -> set[int]:
        """Return the adapters of running requests."""
        return {request.adapter for request in self.running} - {0}

    def residents(self) -> set[int]:
        """Return the adapters in memory or on their way."""
        return self.cache.residents()

    def adapter_loaded(self, adapter: int) -> None:
        """Note that a load is complete."""
        self.cache.complete_load(adapter)

    def abort(self, number: int) -> None:
        """End a running request, or remove a waiting one."""
        for request in [r for r in self.running if r.number == number]:
            self._leave(request)
        self.waiting = [r for r in self.waiting if r.number != number]

    def refresh(self, queues: SizeQueues | None, at_ns: int) -> None:
        """Begin a window of uses, and replace the queues unless None: running requests are booked again."""
        self.cache.rotate_uses(at_ns)
        if queues is None:
            return
        self.queues = queues
        self.counts["refreshes"] += 1
        for request in [*self.waiting, *self.running]:
            request.queue = self.queue_of(request)
        self.adapter_books = {}
        for number, request in enumerate(self.running):
            request.book = self.whole_book(request, request.charge)
            if shared := self.shared_tokens(request, self.running[:number]):
                self.adapter_books[request.adapter] = self.whole_book(request, shared)

    def schedule(self, now_ns: int) -> ReferenceStep:
        """Decide a step: prompts, a token for each request that decodes, or both if prompts are chunked."""
        self.now_ns = now_ns
        self._measure_step()
        self.admitted, self.preempted, self.loads = [], [], []
        self._merge()
        if self.limits.order == QUEUES:
            self._grow_reservations()
        if self.decodes >= self.limits.admit_every or self.limits.admit_every <= 1 or not self._decoding():
            self.decodes = 0
            self._admit_waiting()
        self.scheduled = self._make_step()
        prefetch = self._prefetch()
        return ReferenceStep(
            [(request.number, tokens) for request, tokens in self.scheduled],
            [request.number for request in self.admitted],
            [request.number for request in self.preempted],
            [(adapter, False) for adapter in self.loads],  # the host holds all adapters
            self.free_blocks(),
            prefetch,
        )

    def commit(self) -> ReferenceOutput:
        """Append a token to every request with a complete sequence, and remove finished ones."""
        output = ReferenceOutput([], [], [])
        for request, _ in self.scheduled:
            if request.computed < request.known:
                continue
            (output.later if request.output else output.first).append(request.number)
            request.output += 1
            request.is_decoding = True
            if request.output == request.target:
                output.finished.append(request.number)
                request.execution_ns = self.now_ns - (request.admitted_ns or 0)
                self._leave(request)
        return output

    # -- one step --

    def _measure_step(self) -> None:
        """Take the time since the last `schedule` as the duration of the step that it decided."""
        duration_ns = self.now_ns - self.scheduled_ns
        tokens = sum(tokens for _, tokens in self.scheduled)
        if self.scheduled and self.had_prompts:
            self.prefill_ns_per_token = duration_ns // tokens
        elif self.scheduled:
            self.decode_ns = duration_ns
        self.scheduled_ns = self.now_ns

    def _decoding(self) -> list[PooledRequest]:
        return [request for request in self.running if request.is_decoding]

    def _merge(self) -> None:
        """Choose the merged adapter; requests of others wait, and keep their KV."""
        self.merging.choose([request.adapter for request in [*self.running, *self.waiting]])
        for request in self._decoding():
            request.is_decoding = self.merging.serves(request.adapter)

    def _grow_reservations(self) -> None:
        """Raise the prediction of requests that have outgrown it by a quarter of their charge."""
        for request in self._decoding():
            if request.output >= request.predicted:
                more = min(-(-request.charge // 4), self.largest_output(request) - request.predicted)
                request.predicted += more
                request.charge += more
                request.book[request.queue] += more
                request.reserved = self.reservation(request)
                self.counts["overruns"] += 1

    def _make_step(self) -> list[tuple[PooledRequest, int]]:
        """Choose the tokens of a step: prompts, else decodes, or both if prompts are chunked."""
        limits = self.limits
        if limits.chunked:
            decodes = self._decodes()
            prompts = self._prompts(limits.max_num_batched_tokens - len(decodes))
        else:
            prompts = self._prompts(limits.max_num_batched_tokens)
            decodes = [] if prompts else self._decodes()
            if not decodes and not prompts:  # all decoding requests may have been preempted
                prompts = self._prompts(limits.max_num_batched_tokens)
        if not decodes and not prompts and self.merging.adapter is not None:
            self.merging.end()
            prompts = self._prompts(limits.max_num_batched_tokens)
        self.had_prompts = bool(prompts)
        self.decodes += bool(decodes)
        step = sorted([*prompts, *decodes], key=lambda part: part[0].admission)
        for request, tokens in step:
            request.computed += tokens
        self.taken = 0
        return step

    def _decodes(self) -> list[tuple[PooledRequest, int]]:
        """Give each decoding request a token, preempting from the end until their blocks are free."""
        while True:
            parts = [(request, 1) for request in self._decoding()]
            blocks = sum(self._blocks_to_take(*part) for part in parts)
            if self.make_room(blocks):
                self.taken += blocks
                return parts
            self._preempt_last()

    def _prompts(self, left: int) -> list[tuple[PooledRequest, int]]:
        """Give prompts whose adapter is loaded tokens in order, up to the first without tokens or blocks."""
        chosen: list[tuple[PooledRequest, int]] = []
        for request in [r for r in self.running if not r.is_decoding and self.may_start(r)]:
            tokens = request.known - request.computed
            if tokens > left and chosen and not self.limits.chunked:
                break
            tokens = min(tokens, left)
            blocks = self._blocks_to_take(request, tokens)
            alone = not chosen and not self._decoding()
            if tokens <= 0 or not request.running or not self._make_room_for(request, blocks, alone):
                break
            self.taken += blocks
            chosen.append((request, tokens))
            left -= tokens
        return chosen

    def _make_room_for(self, request: PooledRequest, blocks: int, alone: bool) -> bool:
        """Evict idle adapters; `alone`: nothing else computes, so preempt from the end as well."""
        while not self.make_room(blocks):
            if not alone or self.running[-1] is request:
                return False
            self._preempt_last()
        return True

    def _blocks_to_take(self, request: PooledRequest, tokens: int) -> int:
        return self.blocks_for(request.computed + tokens) - self.blocks_for(request.computed)

    def _preempt_last(self) -> None:
        self._return_to_queue(self.running[-1])
        self.counts["recomputes"] += 1

    # -- admission --

    def _admit_waiting(self) -> None:
        admission = QueueAdmission(self)
        if self.limits.order == QUEUES:
            admission.run()
            return
        while any(self.merging.serves(request.adapter) for request in self.waiting):
            request = self._next_in_order()
            if not admission.fits_step(request) or not self._fits_ahead(request):
                break
            admission.admit(request, [0], [0])

    def _next_in_order(self) -> PooledRequest:
        """Return the first waiting request, by arrival if that one has waited for too long."""
        if self.limits.merged_ns:
            return next(request for request in self.waiting if self.merging.serves(request.adapter))
        oldest = self.waiting[0]
        overdue = 0 < self.limits.ageing_ns < self.now_ns - oldest.arrival_ns
        return oldest if overdue else self.in_order()[0]

    def in_order(self) -> list[PooledRequest]:
        """Return the waiting requests queue by queue."""
        if self.limits.order == SJF:
            return sorted(self.waiting, key=lambda r: (r.predicted, r.arrival))
        return sorted(self.waiting, key=lambda r: (r.queue, r.arrival))

    def _fits_ahead(self, request: PooledRequest) -> bool:
        together = [*self.running, request]
        return self.fits_to_the_end(together, self.pinned(together))

    def whole_book(self, request: PooledRequest, tokens: int) -> list[int]:
        """Return the book of tokens that are charged to the queue of a request."""
        return [tokens * (q == request.queue) for q in range(len(self.queues.quotas))]

    def start(self, request: PooledRequest, book: list[int], adapter_book: list[int]) -> None:
        """Make a waiting request a running one, and begin the load of its adapter."""
        self.waiting.remove(request)
        if not self.cache.adapters[request.adapter].resident and request.adapter:
            self.make_room(self.pages(request.adapter))
            self.cache.begin_load(request.adapter, self.now_ns)
            self.loads.append(request.adapter)
        if request.adapter:
            self.cache.acquire(request.adapter, self.now_ns, request.admitted_ns is None)
        request.charge, request.book = self.charge(request), book
        if any(adapter_book):
            self.adapter_books[request.adapter] = adapter_book
        request.reserved = self.reservation(request)
        self.admissions += 1
        request.admission = self.admissions
        if request.admitted_ns is None:
            request.admitted_ns = self.now_ns
        request.running = True
        self.running.append(request)
        self.admitted.append(request)

    def _leave(self, request: PooledRequest) -> None:
        self.running.remove(request)
        if not any(other.adapter == request.adapter for other in self.running):
            self.adapter_books.pop(request.adapter, None)
        request.running = request.is_decoding = False
        request.bypassed = None
        request.book, request.reserved, request.charge = [], 0, 0
        if request.adapter:
            self.cache.release(request.adapter, self.now_ns)

    def _return_to_queue(self, request: PooledRequest) -> None:
        """Stop a running request, which will compute its known tokens again."""
        self._leave(request)
        if request in self.admitted:
            self.admitted.remove(request)
        else:
            self.preempted.append(request)
        request.computed = 0
        request.queue = self.queue_of(request)
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: r.arrival)

    def squash(self, request: PooledRequest) -> None:
        """Stop a request that bypassed another one, for that one."""
        self._return_to_queue(request)
        request.squashed = True
        self.counts["squashes"] += 1

    # -- prefetch --

    def _prefetch(self) -> int | None:
        """Load an absent adapter that will be used, if the link is idle and the memory can be spared."""
        if self.limits.prefetch == NO_PREFETCH or any(adapter.loading for adapter in self.cache.adapters):
            return None
        expected = self.cache.due(self.now_ns) if self.limits.prefetch == BY_HISTOGRAM else None
        for adapter in (expected, self._wanted_by_queue()):
            if adapter is not None and self._may_prefetch(adapter):
                self.cache.begin_prefetch(adapter, self.now_ns, protect=adapter == expected)
                self.counts["prefetches_by_histogram"] += adapter == expected
                self.loads.append(adapter)
                return adapter
        return None

    def _wanted_by_queue(self) -> int | None:
        for request in self.in_order()[:_REQUESTS_TO_PREFETCH_FOR]:
            if request.adapter and not self.cache.adapters[request.adapter].resident:
                return request.adapter
        return None

    def _may_prefetch(self, adapter: int) -> bool:
        """Return whether requests can keep their memory, after evicting adapters that no request needs."""
        adapters = self.pinned(self.running) | {adapter}
        if self.limits.order == QUEUES:
            reserved = sum(request.reserved for request in self.running)
            if reserved + self.cache.pages(adapters) > self.num_blocks:
                return False
        elif not self.fits_to_the_end(self.running, adapters):
            return False
        first, _ = self.cache.tiers(self.now_ns, {request.adapter for request in self.waiting})
        if self.free_blocks() + self.cache.pages(first) < self.pages(adapter):
            return False
        return self.make_room(self.pages(adapter), first_tier_only=True)
