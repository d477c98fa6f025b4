"""Traffic by metrics: vLLM's and SGLang's own, scraped twice, or as a Prometheus server keeps them.

Counters give rates, histograms give lengths, labels give adapters. Alternatives of one metric, as servers of
several versions report them, are never added: the first of them that is there counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.error import URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.observe._distributions import prefix_of_share, quantiles_of, rate_steps, sample_of_buckets
from capplan.observe._observation import Observation, ObserveOptions, Tokens, adapters_of
from capplan.observe._requests import span_s

REQUESTS: Final = ("vllm:request_success_total", "sglang:num_requests_total", "request_success_total")
PROMPTS: Final = ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram", "request_prompt_tokens")
OUTPUTS: Final = (
    *("vllm:request_generation_tokens", "sglang:generation_tokens_histogram", "request_generation_tokens"),
)
HITS: Final = (("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),)
"""Tokens found in the prefix cache, and looked up there."""
_ADAPTER_LABELS: Final = ("lora_name", "lora", "adapter", "model_name", "model")
_LORA_INFO: Final = "vllm:lora_requests_info"
_INFO_LABELS: Final = ("running_lora_adapters", "waiting_lora_adapters")

_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 2**26
_STEP_S: Final = 300.0
_FEW_REQUESTS: Final = 200

Series = Mapping[tuple[tuple[str, str], ...], float]
"""Values of one metric by labels."""


@dataclass(frozen=True)
class _Reading:
    """What was counted in a span of time."""

    source: str
    duration_s: float
    start: datetime | None
    requests: Series
    prompts: tuple[Series, float, float]
    """Buckets of a histogram by labels with ``le``; sum and count."""
    outputs: tuple[Series, float, float]
    hit_share: float | None
    counts: NDArray[np.int64]
    """Requests over time."""
    step_s: float
    seen: tuple[str, ...]
    """Adapters that were in use, where they are not counted."""


def observe_metrics(url: str, options: ObserveOptions, for_s: float) -> Observation:
    """Observe a server by its ``/metrics``, or a fleet by its Prometheus server.

    `options` are those for logs; the window is that of a Prometheus server. ``/metrics`` are scraped twice,
    `for_s` seconds apart.
    """
    if options.columns or options.time_unit is not None:
        raise InputError("does not go with metrics", url, "map")
    reading = (
        _scraped(url, for_s)
        if urlsplit(url).path.rstrip("/").endswith("metrics")
        else _queried(url, options.window)
    )
    return _observed(reading, options)


def _observed(reading: _Reading, options: ObserveOptions) -> Observation:
    total = round(sum(reading.requests.values()))
    if total < 1:
        raise InputError(
            "must count at least one request in the time that is observed", total, reading.source
        )
    counted, by_label = _by_adapter(reading.requests, options.base_model)
    warnings, notes = [], []
    if by_label:
        notes.append(f"adapters are told apart by the label {by_label}")
    elif reading.seen:
        share, rest = divmod(total, len(reading.seen))
        counted = {name: share + (at < rest) for at, name in enumerate(reading.seen)}
        warnings.append(
            "no counter tells adapters apart: the requests are shared out evenly among those that were in use"
        )
    else:
        warnings.append("no adapter is named: all requests are those of the base model")
    if total < _FEW_REQUESTS:
        warnings.append(f"{total} requests are few: observe longer")
    base = counted.pop(None, 0) if counted else total
    adapters, tail, more = adapters_of(counted, options, reading.duration_s)
    prompts, outputs = _sample(*reading.prompts), _sample(*reading.outputs)
    notes.append("prompt and output lengths are independent: metrics do not pair them")
    rng = np.random.default_rng(0)
    starts, means = rate_steps(reading.counts, reading.step_s)
    mean = max(float(reading.counts.mean()), 1e-12)
    hits = reading.hit_share
    return Observation(
        source=reading.source,
        columns=(),
        rows=total,
        requests=total,
        dropped=(),
        start=reading.start,
        duration_s=reading.duration_s,
        rate_rps=options.scale * total / reading.duration_s,
        steps=tuple(
            (float(at * reading.step_s), float(v / mean)) for at, v in zip(starts, means, strict=True)
        ),
        minutes=_minutes(reading),
        adapters=adapters,
        tail=tail,
        base_rate_rps=options.scale * base / reading.duration_s,
        prompts=rng.permutation(prompts),
        outputs=rng.permutation(outputs),
        base_model=options.base_model,
        profile=options.profile,
        prefix_hit_share=hits,
        shared_prefix_tokens=0 if hits is None else prefix_of_share(hits, prompts),
        scale=options.scale,
        quantiles={
            "prompt_tokens": quantiles_of(np.unique(prompts, return_counts=True)),
            "output_tokens": quantiles_of(np.unique(outputs, return_counts=True)),
        },
        warnings=tuple(warnings),
        notes=(*notes, *more),
    )


def _minutes(reading: _Reading) -> NDArray[np.int64]:
    """Return the requests of each minute, evenly within a step of the reading."""
    minutes = max(1, math.ceil(reading.duration_s / 60.0))
    edges = np.minimum(np.arange(minutes + 1) * 60.0, reading.duration_s)
    passed = np.concatenate([[0.0], np.cumsum(reading.counts, dtype=float)])
    at = np.minimum(np.arange(len(passed)) * reading.step_s, reading.duration_s)
    counts: NDArray[np.int64] = np.rint(np.diff(np.interp(edges, at, passed))).astype(np.int64)
    return counts


def _by_adapter(requests: Series, base_model: str) -> tuple[dict[str | None, int], str]:
    """Return the requests of each adapter by the first label that has several values, and that label."""
    for label in _ADAPTER_LABELS:
        counted: dict[str | None, float] = {}
        for labels, value in requests.items():
            name = dict(labels).get(label, "")
            key = None if name in ("", base_model) else name
            counted[key] = counted.get(key, 0.0) + value
        if len(counted) > 1 or (label in _ADAPTER_LABELS[:3] and counted.keys() != {None}):
            found = sorted(counted.items(), key=lambda each: -each[1])
            return {name: round(value) for name, value in found}, label
    return {}, ""


def _sample(buckets: Series, total: float, count: float) -> Tokens:
    """Return lengths by the buckets of all label sets together."""
    passed: dict[float, float] = {}
    for labels, value in buckets.items():
        end = float(dict(labels)["le"])
        passed[end] = passed.get(end, 0.0) + value
    if not passed or count <= 0:
        raise InputError("must report histograms of prompt and generation tokens", location="metrics")
    return sample_of_buckets(passed, total, count)


def _scraped(url: str, for_s: float) -> _Reading:
    """Return what a server counts between two scrapes."""
    if not (math.isfinite(for_s) and for_s >= 1.0):
        raise InputError("must be at least 1 second", for_s, "for")
    begun = time.monotonic()
    first, start = _families(_fetched(url)), datetime.now(UTC)
    seen = _seen(first)
    time.sleep(for_s)
    second = _families(_fetched(url))
    duration_s = time.monotonic() - begun

    def grown(names: Sequence[str], suffix: str = "") -> Series:
        name = next((each + suffix for each in names if each + suffix in second), None)
        if name is None:
            return {}
        before = first.get(name, {})
        # A server that restarted counts from zero.
        return {
            labels: v - before.get(labels, 0.0) if v >= before.get(labels, 0.0) else v
            for labels, v in second[name].items()
        }

    requests = grown(REQUESTS)
    if not requests:
        raise InputError(f"must report one of {', '.join(REQUESTS)}", location=url)
    total = round(sum(requests.values()))
    return _Reading(
        url,
        duration_s,
        start,
        requests,
        _histogram(grown, PROMPTS),
        _histogram(grown, OUTPUTS),
        _hits(grown),
        np.array([total], np.int64),
        duration_s,
        tuple(sorted(seen | _seen(second))),
    )


def _histogram(grown: Callable[..., Series], names: Sequence[str]) -> tuple[Series, float, float]:
    total, count = (sum(grown(names, suffix).values()) for suffix in ("_sum", "_count"))
    return grown(names, "_bucket"), total, count


def _hits(grown: Callable[..., Series]) -> float | None:
    for hits, queries in HITS:
        asked = sum(grown((queries,)).values())
        if asked > 0:
            return min(1.0, sum(grown((hits,)).values()) / asked)
    return None


def _seen(families: Mapping[str, Series]) -> set[str]:
    """Return the adapters that vLLM's LoRA information names."""
    found: set[str] = set()
    for labels in families.get(_LORA_INFO, {}):
        for label in _INFO_LABELS:
            found |= {name.strip() for name in dict(labels).get(label, "").split(",") if name.strip()}
    return found


def _families(text: str) -> dict[str, Series]:
    """Return the series of a text in Prometheus format, by the names of its samples."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    except ValueError as error:
        raise InputError(f"must be metrics in Prometheus format: {error}", location="metrics") from None
    return found  # type: ignore[return-value]


def _fetched(url: str) -> str:
    if urlsplit(url).scheme not in ("http", "https"):
        raise InputError("must begin with http:// or https://", url, "source")
    try:
        with urlopen(Request(url, headers={"Accept": "*/*"}), timeout=_TIMEOUT_S) as answer:  # noqa: S310 - checked
            content = answer.read(_MAX_BYTES + 1)
    except (URLError, OSError, ValueError) as error:
        raise InputError(f"cannot be reached: {getattr(error, 'reason', error)}", location=url) from None
    if len(content) > _MAX_BYTES:
        raise InputError(f"must answer with at most {_MAX_BYTES >> 20} MiB", location=url)
    return str(content.decode("utf-8", errors="replace"))


def _queried(url: str, window: str | None) -> _Reading:
    """Return what a Prometheus server has of a window up to now."""
    window_s = _window_s(window)
    end = time.time()
    api = url.rstrip("/") + "/api/v1/"

    def asked(path: str, **parameters: Any) -> list[Any]:
        text = _fetched(f"{api}{path}?{urlencode(parameters)}")
        try:
            document = json.loads(text)
            found = document["data"]["result"]
        except (ValueError, KeyError, TypeError):
            raise InputError(
                "must be the address of a Prometheus server, or end in /metrics", location=url
            ) from None
        return list(found)

    def grown(names: Sequence[str], suffix: str = "") -> Series:
        for name in names:
            rows = asked("query", query=f"increase({name}{suffix}[{round(window_s)}s])", time=end)
            values = {tuple(sorted(row["metric"].items())): float(row["value"][1]) for row in rows}
            known = {labels: value for labels, value in values.items() if math.isfinite(value)}
            if known:
                return known
        return {}

    requests = grown(REQUESTS)
    if not requests:
        raise InputError(f"must have one of {', '.join(REQUESTS)}", location=url)
    steps = max(1, round(window_s / _STEP_S))
    name = next(each for each in REQUESTS if asked("query", query=f"count({each})", time=end))
    rows = asked(
        "query_range",
        query=f"sum(increase({name}[{round(_STEP_S)}s]))",
        start=end - (steps - 1) * _STEP_S,
        end=end,
        step=_STEP_S,
    )
    counts = np.zeros(steps, np.int64)
    for at, value in rows[0]["values"] if rows else ():
        counts[min(steps - 1, round((float(at) - end) / _STEP_S) + steps - 1)] = round(float(value))
    info = asked("query", query=f"last_over_time({_LORA_INFO}[{round(window_s)}s])", time=end)
    seen = _seen({_LORA_INFO: {tuple(sorted(row["metric"].items())): 1.0 for row in info}})
    return _Reading(
        url,
        window_s,
        datetime.fromtimestamp(end - window_s, UTC),
        requests,
        _histogram(grown, PROMPTS),
        _histogram(grown, OUTPUTS),
        _hits(grown),
        counts,
        _STEP_S if steps > 1 else window_s,
        tuple(sorted(seen)),
    )


def _window_s(window: str | None) -> float:
    found = span_s(window or "24h")
    if found is None:
        raise InputError("must be the last hours, such as 24h", window, "window")
    return found
