"""Reference implementation of Chameleon's admission: squash, two phases, bypass.

Source: Chameleon, Algorithm 1 and section 4.3.3. Outstanding tokens are the sum of the running rows' books.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.oracle.pooled import ReferencePooled
    from tests.oracle.size_queues import PooledRequest


class QueueAdmission:
    """One call of the admission with the limits of its step."""

    def __init__(self, engine: ReferencePooled) -> None:
        self.engine = engine
        self.is_first = True
        self.is_over = False
        """A request met the limits of the step, which ends the call."""
        limits = engine.limits
        self.tokens_left = limits.max_num_batched_tokens
        if limits.chunked:
            self.tokens_left -= sum(request.known - request.computed for request in engine.running)

    def run(self) -> None:
        """Admit waiting requests."""
        if self.engine.limits.bypass:
            self._squash()
        if self._admit_overdue():
            self._second_phase(self._first_phase())

    def fits_step(self, request: PooledRequest) -> bool:
        """Return whether the limits of the step permit a request."""
        has_place = len(self.engine.running) < self.engine.limits.max_num_seqs
        return has_place and self._has_tokens(request)

    def _has_tokens(self, request: PooledRequest) -> bool:
        if request.known > self.engine.limits.max_num_batched_tokens:
            return self.is_first
        return request.known <= self.tokens_left

    def admit(self, request: PooledRequest, book: list[int], adapter_book: list[int]) -> None:
        """Admit a request, and take its tokens from those of the step."""
        self.engine.start(request, book, adapter_book)
        self.tokens_left -= request.known
        self.is_first = False

    def _queue(self, q: int) -> list[PooledRequest]:
        return [request for request in self.engine.waiting if request.queue == q]

    def outstanding(self, running: Sequence[PooledRequest]) -> list[int]:
        """Return the tokens booked on each queue for these requests and the adapters that they use."""
        adapters = {request.adapter for request in running}
        books = [request.book for request in running]
        books += [book for adapter, book in self.engine.adapter_books.items() if adapter in adapters]
        return [sum(book[q] for book in books) for q in range(len(self.engine.queues.quotas))]

    def _charge(self, request: PooledRequest, running: Sequence[PooledRequest]) -> int:
        """Return the tokens that the admission of a request beside these would take from quotas."""
        return self.engine.charge(request) + self.engine.shared_tokens(request, running)

    def _available(self, q: int, running: Sequence[PooledRequest]) -> int:
        """Return the tokens of a queue that none of the running requests holds."""
        return self.engine.queues.quotas[q] - self.outstanding(running)[q]

    def _left(self, running: Sequence[PooledRequest]) -> int:
        """Return the tokens of all queues that none of the running requests holds."""
        return sum(self.engine.queues.quotas) - sum(self.outstanding(running))

    def fits_own(self, request: PooledRequest) -> bool:
        """Return whether the quota of its queue permits a request, and the tokens left of all queues.

        These are fewer if a request larger than its quota runs, or after a refresh.
        """
        charge = self._charge(request, self.engine.running)
        return charge <= min(
            self._available(request.queue, self.engine.running), self._left(self.engine.running)
        )

    def fits_quota(self, request: PooledRequest) -> bool:
        """Return whether a request fits the quota; one that is larger runs alone of its queue."""
        running = self.engine.running
        charge = self._charge(request, running)
        if self.fits_own(request):
            return True
        if charge <= self.engine.queues.quotas[request.queue]:
            return False
        alone = all(other.queue != request.queue for other in running)
        return alone and (charge <= self._left(self.engine.running) or not running)

    def _squash(self) -> None:
        """Admit heads of queues in place of the fewest requests that bypassed them, youngest first."""
        engine = self.engine
        for q in range(len(engine.queues.quotas)):
            for head in self._queue(q)[:1]:
                bypassers = [request for request in reversed(engine.running) if request.bypassed is head]
                for count in range(len(bypassers) + 1):
                    rest = [request for request in engine.running if request not in bypassers[:count]]
                    tokens = min(self._available(q, rest), self._left(rest))
                    if self._charge(head, rest) <= tokens and engine.fits_memory(head, rest):
                        if count > 0 and self._has_tokens(head):
                            for request in bypassers[:count]:
                                engine.squash(request)
                            self._admit_whole(head)
                        break

    def _admit_overdue(self) -> bool:
        """Admit the heads that have waited for longer than a refresh; return False if one does not fit.

        A head that waits for others of its queue, which hold its quota, is passed over.
        """
        engine = self.engine
        while engine.limits.refresh_ns > 0:
            heads = [head for q in range(len(engine.queues.quotas)) for head in self._queue(q)[:1]]
            overdue = [
                head
                for head in heads
                if engine.now_ns - head.arrival_ns > engine.limits.refresh_ns
                and not self._waits_for_own_queue(head)
            ]
            if not overdue:
                break
            head = min(overdue, key=lambda request: request.arrival)
            fits = self.fits_quota(head) and self.fits_step(head)
            if not fits or not engine.fits_memory(head, engine.running):
                return False
            self._admit_whole(head)
        return True

    def _waits_for_own_queue(self, head: PooledRequest) -> bool:
        running, q = self.engine.running, head.queue
        of_adapters = sum(book[q] for book in self.engine.adapter_books.values())
        most = self.engine.queues.quotas[q] - of_adapters
        return self._available(q, running) < self._charge(head, running) <= most

    def _admit_whole(self, request: PooledRequest) -> None:
        """Admit a request, and book its charge on its own queue."""
        engine = self.engine
        own, shared = engine.charge(request), engine.shared_tokens(request, engine.running)
        self.admit(request, engine.whole_book(request, own), engine.whole_book(request, shared))

    def _first_phase(self) -> list[int]:
        """Admit requests within the quota of their queue; return what empty queues have left."""
        engine = self.engine
        spare = [0] * len(engine.queues.quotas)
        for q in range(len(spare)):
            for request in self._queue(q):
                if not self.fits_quota(request):
                    break
                if not self.fits_step(request):
                    self.is_over = True
                    return spare
                if not engine.fits_memory(request, engine.running):
                    if engine.limits.bypass:
                        self._bypass(request)
                    break
                self._admit_whole(request)
            if not self._queue(q):
                spare[q] = max(0, self._available(q, engine.running))
        return spare

    def _second_phase(self, spare: list[int]) -> None:
        """Admit further requests on loans from the empty queues."""
        engine = self.engine
        for q in range(len(spare)):
            for request in self._queue(q):
                charge = self._charge(request, engine.running)
                if self.is_over or charge > min(sum(spare), self._left(engine.running)):
                    break
                if not self.fits_step(request):
                    self.is_over = True
                    break
                if not engine.fits_memory(request, engine.running):
                    break
                book = _borrow(spare, engine.charge(request))
                self.admit(request, book, _borrow(spare, engine.shared_tokens(request, engine.running)))

    def _bypass(self, head: PooledRequest) -> None:
        """Admit younger requests of the queue that end before the memory for `head` is free."""
        engine = self.engine
        free_ns = self.wait_ns(head)
        for request in self._queue(head.queue)[1:]:
            fits = (
                not request.squashed
                and self.fits_step(request)
                and self.fits_own(request)
                and engine.fits_memory(request, engine.running)
            )
            if fits and free_ns is not None and free_ns > self.run_ns(request):
                self._admit_whole(request)
                request.bypassed = head
                engine.counts["bypasses"] += 1

    def wait_ns(self, head: PooledRequest) -> int | None:
        """Return the predicted time until memory for a request is free; None if it is never."""
        engine = self.engine
        left = list(engine.running)
        for request in sorted(left, key=lambda r: (r.predicted - r.output, r.admission)):
            left.remove(request)
            if engine.fits_memory(head, left):
                return (request.predicted - request.output) * engine.decode_ns
        return None

    def run_ns(self, request: PooledRequest) -> int:
        """Return the predicted run time of a request."""
        engine = self.engine
        decodes_ns = (request.predicted - request.output) * engine.decode_ns
        return engine.prefill_ns_per_token * request.known + decodes_ns


def _borrow(spare: list[int], tokens: int) -> list[int]:
    """Take tokens from the queues with the most, the lower number first; return them by queue."""
    book = [0] * len(spare)
    for q in sorted(range(len(spare)), key=lambda q: -spare[q]):
        book[q] = min(spare[q], tokens)
        spare[q] -= book[q]
        tokens -= book[q]
    return book
