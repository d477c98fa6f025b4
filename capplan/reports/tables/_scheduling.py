"""Tables of schedulers, queues by request size, and adapter caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from capplan.reports._console import DASH, Table, number, percent
from capplan.spec import Cache, Predictor, QueueConfig, Scheduler, SpecModel

if TYPE_CHECKING:
    from capplan.spec import Group, Queues
    from capplan.twin.instance import PoolMetrics, SizeMetrics

_SIZES = {
    "degree2": "lengths x adapter",
    "degree1": "lengths + adapter",
    "output_only": "output",
}

_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "queues": QueueConfig().model_dump(mode="json"),
    "predictor": Predictor().model_dump(mode="json"),
}

_CHARGES = {
    "per_request": "prompt, output and adapter",
    "shared": "prompt, output and adapter once",
    "none": "prompt and output",
}


_BY_SIZE: Final = (
    "TTFT p99, s",
    "queueing mean, s",
    "queueing, share of E2E",
    "interruptions mean",
    "interrupted share of E2E, mean",
)
SIZES_HEAD: Final = ("requests by size", *_BY_SIZE)

_SIZE_CELLS: Final[tuple[Callable[[SizeMetrics], str], ...]] = (  # of the metrics of `_BY_SIZE`
    lambda size: number(size.ttft_s.p99, 3),
    lambda size: number(size.queue_s.mean, 3),
    lambda size: percent(size.queue_share),
    lambda size: number(size.interruption_count.mean, 1),
    lambda size: percent(size.interruption_share.mean),
)


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
    words = f"scheduler {scheduler.name}{_changed(scheduler, Scheduler(policy=scheduler.name))}"
    words += f", cache {cache.policy}{_changed(cache, Cache(policy=cache.policy))}"
    predicted = group.predicted.scheduling
    if predicted is None or predicted.hit_rate is None:
        return words
    wait = f"{number(predicted.load_wait_ms, 2)} ms of waiting for loads on average"
    return f"{words}; {percent(predicted.hit_rate)} of the adapters loaded at admission, {wait}"


def _changed(settings: SpecModel, usual: SpecModel) -> str:
    """Return the settings that differ from the usual ones, in parentheses; empty without any."""
    defaults = usual.model_dump(mode="json")
    words = [
        _setting_words(key, value)
        for key, value in settings.model_dump(mode="json").items()
        if value != defaults.get(key)
    ]
    return f" ({', '.join(words)})" if words else ""


def _setting_words(key: str, value: Any) -> str:
    """Return a setting as text, such as ``refresh_s 60`` or ``queues clusters wcss``."""
    if isinstance(value, dict):
        usual = _DEFAULTS.get(key, {})
        parts = [_setting_words(name, each) for name, each in value.items() if each != usual.get(name)]
        return f"{key} {' '.join(parts)}"
    if isinstance(value, bool):
        return f"{key} {str(value).lower()}"
    return f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"


def sizes_table(group: Group) -> Table | None:
    """Return one row per predicted size class; None without a prediction."""
    predicted = group.predicted.scheduling
    if predicted is None or not predicted.sizes:
        return None
    rows = [
        (
            each.name,
            number(each.ttft_p99_s, 3),
            number(each.queue_mean_s, 3),
            percent(each.queue_share),
            number(each.interruption_mean_count, 1),
            percent(each.interruption_mean_share),
        )
        for each in predicted.sizes
    ]
    return Table(SIZES_HEAD, rows)


def _occurs(metric: str, scheduler: Scheduler, cache: Cache) -> bool:
    """Return whether a metric can differ from 0."""
    if metric in ("squashes", "bypasses"):
        return scheduler.has_queues and scheduler.bypass
    if metric == "refreshes":
        return scheduler.has_queues
    if scheduler.policy == "slora":
        return False
    return cache.policy != "none" if metric == "evictions" else cache.prefetch != "none"


_POOL_ROWS: Final = (  # metric of scheduler and cache, its name with unit, decimals
    ("squashes", "squashed requests", 0),
    ("bypasses", "bypassing requests", 0),
    ("evictions", "evicted adapters", 0),
    ("prefetches_useful", "prefetches in time", 0),
    ("prefetches_late", "late prefetches", 0),
    ("prefetches_wasted", "wasted prefetches", 0),
    ("refreshes", "refreshes of the queues", 0),
)


def pool_rows(
    pools: Sequence[PoolMetrics | None], pair: tuple[Scheduler, Cache] | None
) -> list[tuple[str, ...]]:
    """Return the metrics of scheduler and cache, one column per simulation; none without either.

    `pair` are scheduler and cache of all simulations: metrics that do not occur under them are left out.
    """
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
        for metric, cell in zip(_BY_SIZE, _SIZE_CELLS, strict=True):
            rows.append((f"{name}: {metric}", *(DASH if each is None else cell(each) for each in found)))
    for metric, name, decimals in _POOL_ROWS:
        if pair is not None and not _occurs(metric, *pair):
            continue
        rows.append((name, *cells(lambda pool, m=metric, d=decimals: number(getattr(pool, m), d))))  # type: ignore[misc]
    return rows
