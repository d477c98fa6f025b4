"""Observation of a log: rates over time, adapters, lengths, burstiness and prefixes of its requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.observe._distributions import (
    ValueCounts,
    dispersion,
    own_histogram,
    prefix_of_share,
    quantiles_of,
    rate_steps,
)
from capplan.observe._observation import (
    Observation,
    ObservedAdapter,
    ObserveOptions,
    Tokens,
    adapters_of,
    many,
)
from capplan.observe._requests import US_PER_S, Log, choose_columns, described, may_be_times, read_requests
from capplan.observe._source import open_source, quoted
from capplan.spec import Adapter

_BIN_S: Final = 60.0
_LEAST_BINS: Final = 60
_BURST_GAPS: Final = 10.0
_BURST_S: Final = 10.0
_LONGEST_BURST_S: Final = 600.0
"""Bins in which the burstiness of an adapter is counted: ten mean gaps, from ten seconds to ten minutes."""
_BURSTY_ADAPTERS: Final = 20
_POISSON_LIKE: Final = 0.1
"""Excess of the dispersion below which requests count as Poisson."""
_SAMPLE_ROWS: Final = 200_000
_OWN_SHARE: Final = 0.01
_OWN_DIFFERENCE: Final = 0.25
"""An adapter with this share of the requests, and means that differ by so much, has lengths of its own."""
_SHORT_S: Final = 6 * 3600.0
_DRIFTING: Final = 0.5
"""Change of an adapter's share from the first to the second half that is worth a warning."""


def observe_log(path: Path, options: ObserveOptions) -> Observation:
    """Return what a log says of the traffic."""
    with open_source(path, options.memory_bytes, options.timezone) as source:
        chosen = choose_columns(source, options.columns, lambda field: may_be_times(source, field))
        log = read_requests(source, chosen, options)
        return _fitted(log, str(path), described(chosen), options)


def _fitted(log: Log, source: str, columns: Sequence[str], options: ObserveOptions) -> Observation:
    duration_s = log.duration_s
    bins = _binned(log, _BIN_S if duration_s >= _LEAST_BINS * _BIN_S else duration_s / _LEAST_BINS)
    bin_s = duration_s / len(bins) if duration_s < _LEAST_BINS * _BIN_S else _BIN_S
    starts, means = rate_steps(bins, bin_s)
    per_bin = np.repeat(means, np.diff(np.append(starts, len(bins))))
    mean = log.requests * bin_s / duration_s
    counted, dropped_names = _counted(log)
    base = counted.pop(None, 0)
    lengths = _own_lengths(log, counted)
    adapters, tail, notes = adapters_of(counted, options, duration_s, lengths)
    prompts, outputs = _sampled(log, set(lengths))
    hit_share, shared = _prefixes(log, prompts)
    warnings = _warnings(log, counted, adapters, dropped_names)
    return Observation(
        source=source,
        columns=tuple(columns),
        rows=log.rows,
        requests=log.requests,
        dropped=log.dropped,
        start=log.start,
        duration_s=duration_s,
        rate_rps=options.scale * log.requests / duration_s,
        steps=tuple(
            (float(at * bin_s), float(value / mean)) for at, value in zip(starts, means, strict=True)
        ),
        minutes=bins if bin_s == _BIN_S else _binned(log, _BIN_S),
        adapters=adapters,
        tail=tail,
        base_rate_rps=options.scale * base / duration_s,
        prompts=prompts,
        outputs=outputs,
        base_model=options.base_model,
        profile=options.profile,
        gap_cv=_gap_cv(log, counted, per_bin, bin_s),
        prefix_hit_share=hit_share,
        shared_prefix_tokens=shared,
        scale=options.scale,
        quantiles={
            "prompt_tokens": quantiles_of(_value_counts(log, "prompt")),
            "output_tokens": quantiles_of(_value_counts(log, "output")),
        },
        warnings=tuple(warnings),
        notes=(*log.notes, *notes),
    )


def _rows(log: Log, sql: str) -> list[tuple[Any, ...]]:
    return log.connection.execute(sql).fetchall()


def _binned(log: Log, bin_s: float, where: str = "true") -> NDArray[np.int64]:
    """Return the requests of each bin, of those that meet a condition."""
    last = max(1, math.ceil(log.duration_s / bin_s - 1e-9))
    bins = f"least(us // {max(1, round(bin_s * US_PER_S))}, {last - 1})::BIGINT"
    counts = np.zeros(last, np.int64)
    for at, count in _rows(log, f"SELECT {bins}, count(*) FROM requests WHERE {where} GROUP BY 1"):
        counts[at] = count
    return counts


def _counted(log: Log) -> tuple[dict[str | None, int], int]:
    """Return the requests of each adapter, None for the base model, and those of impossible names."""
    counted: dict[str | None, int] = {}
    impossible = 0
    for name, count in _rows(log, "SELECT adapter, count(*) FROM requests GROUP BY 1 ORDER BY 2 DESC, 1"):
        try:
            if name is not None:
                Adapter(name=name, rank=1, rate_rps=0.0)
            counted[name] = count
        except InputError:
            impossible += count
    return counted, impossible


def _own_lengths(
    log: Log, counted: Mapping[str | None, int]
) -> dict[str, tuple[dict[str, list[int]], dict[str, list[int]]]]:
    """Return histograms of the lengths of popular adapters that differ from those of all."""
    large = [n for n, count in counted.items() if n is not None and count >= _OWN_SHARE * log.requests]
    if not large:
        return {}
    whole = _rows(log, "SELECT avg(prompt), avg(output) FROM requests")[0]
    means = log.connection.execute(
        "SELECT adapter, avg(prompt), avg(output) FROM requests WHERE list_contains(?, adapter) GROUP BY 1",
        [large],
    ).fetchall()
    found = {}
    for name, *own in means:
        if any(abs(mean / all_ - 1.0) > _OWN_DIFFERENCE for mean, all_ in zip(own, whole, strict=True)):
            where = f"adapter = {quoted(name)}"
            found[name] = (
                own_histogram(_value_counts(log, "prompt", where)),
                own_histogram(_value_counts(log, "output", where)),
            )
    return found


def _value_counts(log: Log, column: str, where: str = "true") -> ValueCounts:
    sql = f"SELECT {column}, count(*) FROM requests WHERE {where} GROUP BY 1 ORDER BY 1"
    rows = np.array(_rows(log, sql), np.int64).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


def _sampled(log: Log, own: set[str]) -> tuple[Tokens, Tokens]:
    """Return the lengths of a sample of requests, without those of adapters with lengths of their own."""
    where = "" if not own else "WHERE adapter IS NULL OR NOT list_contains(?, adapter)"
    found = log.connection.execute(
        f"SELECT prompt, output FROM (SELECT prompt, output FROM requests {where}) "
        f"USING SAMPLE reservoir({_SAMPLE_ROWS} ROWS) REPEATABLE (1)",
        [sorted(own)] if own else [],
    ).fetchnumpy()
    if not len(found["prompt"]):
        return _sampled(log, set())
    prompts, outputs = (np.asarray(found[name], np.int32) for name in ("prompt", "output"))
    return prompts, outputs


def _gap_cv(log: Log, counted: Mapping[str | None, int], per_bin: NDArray[np.float64], bin_s: float) -> float:
    """Return the spread of single adapters' gaps that the steps of the rate leave.

    For a renewal process the dispersion of long counts is the square of this coefficient (Cox 1962). It is
    the mean over the most popular adapters, weighted by requests.
    """
    named: list[str | None] = [name for name in counted if name is not None]
    found, weights = [], []
    for name in named[:_BURSTY_ADAPTERS] or [None]:
        gap_s = log.duration_s / (log.requests if name is None else counted[name])
        width_s = min(max(_BURST_GAPS * gap_s, _BURST_S), _LONGEST_BURST_S)
        counts = _binned(log, width_s, "adapter IS NULL" if name is None else f"adapter = {quoted(name)}")
        middle_s = (np.arange(len(counts)) + 0.5) * width_s
        factor = per_bin[np.minimum((middle_s / bin_s).astype(np.int64), len(per_bin) - 1)]
        if counts.sum() < len(counts) or factor.sum() == 0:  # too few to tell
            continue
        found.append(dispersion(counts, factor * counts.sum() / factor.sum()))
        weights.append(counts.sum())
    if not found:
        return 1.0
    spread = float(np.average(found, weights=weights))
    return 1.0 if abs(spread - 1.0) <= _POISSON_LIKE else float(np.clip(math.sqrt(spread), 0.05, 20.0))


def _prefixes(log: Log, prompts: Tokens) -> tuple[float | None, int]:
    """Return the share of prompt tokens in blocks that earlier requests had, and a prefix with that share."""
    if not log.has_hashes:
        return None, 0
    found = _rows(
        log,
        """
        WITH numbered AS (SELECT row_number() OVER (ORDER BY us) AS n, prompt, hashes FROM requests),
        blocks AS (
            SELECT n, prompt / len(hashes) AS tokens, unnest(hashes) AS block FROM numbered
            WHERE len(hashes) > 0
        ),
        firsts AS (SELECT block, min(n) AS first FROM blocks GROUP BY 1)
        SELECT sum(tokens) FILTER (n > first), (SELECT sum(prompt) FROM requests)
        FROM blocks JOIN firsts USING (block)
        """,
    )[0]
    share = float(found[0] or 0.0) / float(found[1])
    return share, prefix_of_share(share, prompts)


def _warnings(
    log: Log,
    counted: Mapping[str | None, int],
    adapters: Sequence[ObservedAdapter],
    impossible: int,
) -> list[str]:
    found = []
    lost = log.rows - log.requests
    if lost > 0.05 * log.rows:
        found.append(f"{lost:,} of {log.rows:,} rows were not used: rates are those of the others")
    if impossible:
        found.append(
            f"{impossible:,} requests have names that no adapter can have, and are left out of its rates"
        )
    if not log.has_adapters:
        found.append("no column of adapters: all requests are those of the base model")
    if log.duration_s < _SHORT_S:
        found.append(f"the log is short, {log.duration_s / 3600:.2g} h: it may not hold the busiest time")
    guessed = [each.name for each in adapters if not each.rank_known and each.requests]
    if guessed:
        found.append(
            f"ranks are missing for {many(len(guessed), 'adapter')}: give --adapters FOLDER or --ranks FILE"
        )
    known = {each.name for each in adapters if each.rank_known and not each.requests}
    ends = ((name, name.rpartition("/")[2]) for name in guessed)
    prefixes = {name.removesuffix(end) for name, end in ends if name != end and end in known}
    found += [
        f"names begin with {prefix}, unlike those with known ranks: --strip-prefix {prefix} drops it"
        for prefix in sorted(prefixes)
    ]
    drifted = _drifted(log, counted)
    if drifted:
        found.append(
            f"shares drift: {', '.join(drifted)} have other shares in the second half than in the first"
        )
    return found


def _drifted(log: Log, counted: Mapping[str | None, int]) -> list[str]:
    """Return popular adapters whose share changes by over half from the first to the second half."""
    middle = round(log.duration_s * US_PER_S / 2)
    rows = _rows(
        log,
        f"SELECT adapter, count(*) FILTER (us < {middle}), count(*) FILTER (us >= {middle}) FROM requests "
        "WHERE adapter IS NOT NULL GROUP BY 1",
    )
    early, late = (sum(row[at] for row in rows) for at in (1, 2))
    if not early or not late:
        return []
    popular = {name for name in list(counted)[:10] if name is not None and counted[name] >= 200}
    moved = [
        name
        for name, a, b in rows
        if name in popular and abs(a / early - b / late) > _DRIFTING * max(a / early, b / late)
    ]
    return sorted(moved)[:5]
