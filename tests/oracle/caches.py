"""Reference implementation of Chameleon's adapter cache: scores, tiers and prefetch candidates by definition.

Source: Chameleon, sections 4.2 and 5.3. The cache is what is idle: an adapter that no running request uses
stays until its memory is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from capplan.serving import Limits
from capplan.serving.pooled import GDSF, NO_CACHE
from capplan.serving.pooled._state import BY_HISTOGRAM, FAIRSHARE, LRU

_NS_PER_S = 1_000_000_000
_BINS = 600
_FEWEST_SAMPLES = 10
_LEAST_VARIATION = 2.0


@dataclass(eq=False)
class CachedAdapter:
    """An adapter of the pool; the base model is one without pages."""

    pages: int = 0
    """KV blocks that it takes."""
    size_bytes: int = 0
    tokens: int = 0
    """Its part of the charge of a request."""
    cost_ns: int = 0
    """Duration of its load."""
    resident: bool = False
    loading: bool = False
    prefetched: bool = False
    """Loaded ahead, and not used since."""
    users: int = 0
    """Running requests."""
    uses: int = 0
    """Admissions since the last refresh."""
    uses_before: int = 0
    """Admissions between the last two."""
    last_used_ns: int = 0
    inflation: float = 0.0
    """GDSF: score of the last victim when it was last used."""
    released_ns: int | None = None
    """When its last user left."""
    protected_ns: int = 0
    """End of the protection of a prefetched one."""
    idle_bins: Counter[int] = field(default_factory=Counter)
    """Idle times by second."""

    @property
    def pinned(self) -> bool:
        """Whether it must stay, or takes none of the pool."""
        return self.users > 0 or self.loading or self.pages == 0


class ReferenceCache:
    """Resident adapters.

    Parameters
    ----------
    limits
        Switches `cache` and `prefetch`.
    adapters
        By number; the first one is the base model.
    weights
        Of frequency, recency and size.
    """

    def __init__(self, limits: Limits, adapters: Sequence[CachedAdapter], weights: Sequence[float]) -> None:
        self.limits = limits
        self.adapters = adapters
        self.weights = weights
        self.window_start_ns = 0
        self.last_victim_score = 0.0
        self.counts: Counter[str] = Counter()
        self.victims: list[int] = []
        """Adapters evicted so far."""

    def residents(self) -> set[int]:
        """Return the adapters in memory or on their way."""
        return {a for a, adapter in enumerate(self.adapters) if adapter.resident}

    def pinned(self) -> set[int]:
        """Return the adapters that must stay."""
        return {a for a, adapter in enumerate(self.adapters) if a > 0 and adapter.pinned}

    def is_ready(self, number: int) -> bool:
        """Return whether requests of an adapter can compute."""
        return number == 0 or (self.adapters[number].resident and not self.adapters[number].loading)

    def pages(self, adapters: Collection[int]) -> int:
        """Return the blocks that adapters take."""
        return sum(self.adapters[a].pages for a in adapters)

    def begin_load(self, number: int, now_ns: int) -> None:
        """Take the blocks of an adapter; `complete_load` ends the load."""
        adapter = self.adapters[number]
        adapter.resident = adapter.loading = True
        self._touch(adapter, now_ns)

    def begin_prefetch(self, number: int, now_ns: int, protect: bool) -> None:
        """Load an adapter ahead of its requests; `protect`: as long as its idle times let expect them."""
        expected = self._expected_ns(number)
        self.begin_load(number, now_ns)
        self.adapters[number].prefetched = True
        if protect and expected is not None:
            self.adapters[number].protected_ns = expected[1]
        self.counts["prefetches"] += 1

    def complete_load(self, number: int) -> None:
        """Note that an adapter can be used."""
        adapter = self.adapters[number]
        adapter.loading = False
        self._drop_unused(adapter)

    def acquire(self, number: int, now_ns: int, first_admission: bool) -> None:
        """Count one more running request of a resident adapter."""
        adapter = self.adapters[number]
        if first_admission:
            self.counts["misses" if adapter.loading else "hits"] += 1
        adapter.users += 1
        adapter.uses += 1
        if adapter.prefetched:
            self.counts["late_prefetches" if adapter.loading else "useful_prefetches"] += 1
            adapter.prefetched = False
        adapter.protected_ns = 0
        self._touch(adapter, now_ns)

    def release(self, number: int, now_ns: int) -> None:
        """Count one running request less."""
        adapter = self.adapters[number]
        adapter.users -= 1
        self._touch(adapter, now_ns)
        if adapter.users == 0:
            adapter.released_ns = now_ns
            self._drop_unused(adapter)

    def _touch(self, adapter: CachedAdapter, now_ns: int) -> None:
        adapter.last_used_ns = now_ns
        adapter.inflation = self.last_victim_score

    def _drop_unused(self, adapter: CachedAdapter) -> None:
        if self.limits.cache == NO_CACHE and not adapter.pinned and not adapter.prefetched:
            adapter.resident = False
            self.counts["evictions"] += 1

    def rotate_uses(self, at_ns: int) -> None:
        """Begin a window of uses."""
        self.window_start_ns = at_ns
        for adapter in self.adapters:
            adapter.uses_before, adapter.uses = adapter.uses, 0

    # -- eviction --

    def tiers(self, now_ns: int, wanted: Collection[int]) -> tuple[list[int], list[int]]:
        """Return the idle adapters that go first, and those that waiting or expected requests want."""
        idle = [a for a in sorted(self.residents()) if not self.adapters[a].pinned]
        second = [a for a in idle if a in wanted or now_ns < self.adapters[a].protected_ns]
        return [a for a in idle if a not in second], second

    def scores(self, now_ns: int) -> dict[int, float]:
        """Return the score of every resident adapter; the lowest one is evicted first."""
        residents = {a: self.adapters[a] for a in sorted(self.residents())}
        if self.limits.cache == GDSF:
            return {
                a: self._frequency(each, now_ns) * (each.cost_ns / each.size_bytes) + each.inflation
                for a, each in residents.items()
            }
        if self.limits.cache in (NO_CACHE, LRU):  # without a cache only prefetched ones are idle
            return {a: float(each.last_used_ns) for a, each in residents.items()}
        uses = {a: self._frequency(each, now_ns) for a, each in residents.items()}
        age_ns = {a: 0 if each.pinned else now_ns - each.last_used_ns for a, each in residents.items()}
        most, oldest_ns = max(uses.values()), max(age_ns.values())
        largest_bytes = max(each.size_bytes for each in residents.values())
        scores = {}
        for a, each in residents.items():
            frequency = uses[a] / most if most else 0.0
            recency = 1.0 - age_ns[a] / oldest_ns if oldest_ns else 1.0
            size = each.size_bytes / largest_bytes
            if self.limits.cache == FAIRSHARE:
                scores[a] = (frequency + recency + size) / 3
            else:
                scores[a] = self.weights[0] * frequency + self.weights[1] * recency + self.weights[2] * size
        return scores

    def _frequency(self, adapter: CachedAdapter, now_ns: int) -> float:
        """Return the uses of about the last `refresh_ns`."""
        if self.limits.refresh_ns == 0:
            return float(adapter.uses)
        left = max(0.0, 1.0 - (now_ns - self.window_start_ns) / self.limits.refresh_ns)
        return adapter.uses + adapter.uses_before * left

    def evict(self, now_ns: int, wanted: Collection[int], first_tier_only: bool = False) -> bool:
        """Evict one idle adapter; return False without any."""
        first, second = self.tiers(now_ns, wanted)
        candidates = first if first or first_tier_only else second
        if not candidates:
            return False
        scores = self.scores(now_ns)
        number = min(candidates, key=lambda a: (scores[a], a))
        victim = self.adapters[number]
        self.counts["wasted_prefetches"] += victim.prefetched
        self.counts["evictions"] += 1
        self.counts["evictions_of_wanted"] += not first
        victim.resident = victim.prefetched = False
        self.last_victim_score = scores[number]
        self.victims.append(number)
        return True

    # -- histogram of idle times --

    def note_arrival(self, number: int, arrival_ns: int, is_wanted: bool) -> None:
        """Add an idle time that ends with an arrival; `is_wanted`: other requests wait for the adapter."""
        adapter = self.adapters[number]
        if adapter.users == 0 and not is_wanted and adapter.released_ns is not None:
            idle_s = max(0, arrival_ns - adapter.released_ns) // _NS_PER_S
            adapter.idle_bins[min(idle_s, _BINS - 1)] += 1

    def _expected_ns(self, number: int) -> tuple[int, int] | None:
        """Return the times between which the next request is expected; None if they are not predictable."""
        adapter = self.adapters[number]
        samples = adapter.idle_bins.total()
        if self.limits.prefetch != BY_HISTOGRAM or samples < _FEWEST_SAMPLES or adapter.released_ns is None:
            return None
        mean = samples / _BINS
        variance = sum(count**2 for count in adapter.idle_bins.values()) / _BINS - mean * mean
        if variance < (_LEAST_VARIATION * mean) ** 2:
            return None
        begin_s, end_s = _percentile(adapter.idle_bins, 5), _percentile(adapter.idle_bins, 99) + 1
        return adapter.released_ns + begin_s * _NS_PER_S, adapter.released_ns + end_s * _NS_PER_S

    def due(self, now_ns: int) -> int | None:
        """Return the absent adapter whose next request is expected first, if the time has come."""
        found = []
        for number, adapter in enumerate(self.adapters):
            expected = None if adapter.resident else self._expected_ns(number)
            if expected is not None and expected[0] <= now_ns < expected[1]:
                found.append((expected[0], number))
        return min(found)[1] if found else None


def _percentile(bins: Counter[int], percent: int) -> int:
    """Return the first bin up to which at least `percent` of the samples lie."""
    upto = 0
    for index in range(_BINS):
        upto += bins[index]
        if 100 * upto >= percent * bins.total():
            return index
    return _BINS - 1
