"""Tables of schedulers, queues by request size, and adapter caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from capplan.cli.console import DASH, Table, number, percent

if TYPE_CHECKING:
    from capplan.spec import Group, Queues
    from capplan.twin.pool_metrics import PoolMetrics

_SIZES = {
    "degree2": "lengths x adapter",
    "degree1": "lengths + adapter",
    "output_only": "output",
}

_CHARGES = {
    "per_request": "prompt, output and adapter",
    "none": "prompt and output",
}


def queues_table(queues: Queues) -> Table:
    """Return one row per queue: sizes, quota, share of all quotas."""
    total = sum(each.quota_tokens for each in queues.classes)
    bounds = pairwise([None, *(each.upper_wrs for each in queues.classes)])
    rows = [
        (_range(low, high), number(each.quota_tokens), percent(each.quota_tokens / total))
        for (low, high), each in zip(bounds, queues.classes, strict=True)
    ]
    sizes = f"queue by size of request\n({_SIZES[queues.wrs.form]})"
    return Table((sizes, f"quota, tokens\n({_CHARGES[queues.adapter_charge]})", "share"), rows)


def _range(low: float | None, high: float | None) -> str:
    if high is None:
        return "all" if low is None else f"{low:.3g} and more"
    return f"below {high:.3g}" if low is None else f"{low:.3g} to {high:.3g}"


def scheduling_words(group: Group) -> str:
    """Return scheduler and cache of a group, with what is predicted of the cache; empty without them."""
    pair = group.scheduling
    if pair is None:
        return ""
    scheduler, cache = pair
    words = f"scheduler {scheduler.name}, cache {cache.policy}"
    if cache.policy != "none" and cache.prefetch != "none":
        words += f" with prefetch by {cache.prefetch}"
    predicted = group.predicted.scheduling
    if predicted is None or predicted.hit_rate is None:
        return words
    wait = f"{number(predicted.load_wait_ms, 2)} ms of waiting for loads on average"
    return f"{words}; {percent(predicted.hit_rate)} of the adapters loaded at admission, {wait}"


def sizes_table(group: Group) -> Table | None:
    """Return one row per predicted size class; None without a prediction."""
    predicted = group.predicted.scheduling
    if predicted is None or not predicted.sizes:
        return None
    rows = [(each.name, number(each.ttft_p99_s, 3), percent(each.queue_share)) for each in predicted.sizes]
    return Table(("requests by size", "TTFT p99, s", "queueing, share of E2E"), rows)


_POOL_ROWS: Final = (  # metric of scheduler and cache, its name with unit, decimals
    ("squashes", "squashed requests", 0),
    ("bypasses", "bypassing requests", 0),
    ("evictions", "evicted adapters", 0),
    ("prefetches_useful", "prefetches in time", 0),
    ("prefetches_late", "late prefetches", 0),
    ("prefetches_wasted", "wasted prefetches", 0),
    ("refreshes", "refreshes of the queues", 0),
)


def pool_rows(pools: Sequence[PoolMetrics | None]) -> list[tuple[str, ...]]:
    """Return the metrics of scheduler and cache, one column per simulation; none without either."""
    known = [each for each in pools if each is not None]
    if not known:
        return []

    def cells(cell: Callable[[PoolMetrics], str]) -> list[str]:
        return [DASH if each is None else cell(each) for each in pools]

    rows: list[tuple[str, ...]] = [
        ("adapter was loaded at admission", *cells(lambda pool: percent(pool.hit_rate))),
        ("wait for loads mean, ms", *cells(lambda pool: number(pool.load_wait_ms.mean, 2))),
        ("queueing, share of E2E", *cells(lambda pool: percent(pool.queue_share))),
    ]
    for name in dict.fromkeys(size.name for pool in known for size in pool.sizes):
        found = [next((s for s in pool.sizes if s.name == name), None) if pool else None for pool in pools]
        rows.append(
            (f"{name}: TTFT p99, s", *(number(None if s is None else s.ttft_s.p99, 3) for s in found))
        )
        rows.append(
            (
                f"{name}: queueing, share of E2E",
                *(percent(None if s is None else s.queue_share) for s in found),
            )
        )
    for metric, name, decimals in _POOL_ROWS:
        rows.append((name, *cells(lambda pool, m=metric, d=decimals: number(getattr(pool, m), d))))  # type: ignore[misc]
    return rows
