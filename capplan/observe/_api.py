"""`observe`: from a log or a server to a workload."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from capplan.datasets import load_profile
from capplan.observe._logs import observe_log
from capplan.observe._metrics import observe_metrics
from capplan.observe._observation import (
    DEFAULT_MEMORY_BYTES,
    MOST_ADAPTERS,
    Observation,
    ObserveOptions,
    facts_of_folders,
    facts_of_table,
)
from capplan.spec import TimeUnit


def observe(  # noqa: PLR0913 - the front of many options
    source: str | os.PathLike[str],
    *,
    base_model: str,
    profile: str,
    columns: Mapping[str, str] | None = None,
    time_unit: TimeUnit | str | None = None,
    timezone: str = "UTC",
    window: str | None = None,
    scale: float = 1.0,
    adapters: str | os.PathLike[str] | None = None,
    ranks: str | os.PathLike[str] | None = None,
    rank: int | None = None,
    base_aliases: Iterable[str] = (),
    strip_prefix: str = "",
    most_adapters: int = MOST_ADAPTERS,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    for_s: float = 60.0,
) -> Observation:
    """Observe the traffic of a log of requests, or of a server by its metrics.

    Parameters
    ----------
    source : path or URL
        A file: CSV with any separator, JSON lines, a JSON document of a load test, or Parquet; packed by
        gzip, zstd, bzip2 or xz, or not. Or ``http://HOST:PORT/metrics`` of vLLM or SGLang, or the address of
        a Prometheus server.
    base_model : str
        Hugging Face id of the base model. Rows without an adapter, or with this name, are requests of it.
    profile : str
        Profile that the workload names: a shipped one, or the path of one.
    columns : mapping, optional
        Columns by what they hold: timestamp, prompt_tokens, output_tokens, adapter, status, error, hash_ids;
        others are guessed by their names. An empty name: none.
    time_unit : TimeUnit, optional
        Of times that are numbers; by default by their size and rate.
    timezone : str
        Of dates that state none.
    window : str, optional
        The last hours, such as ``24h``, or ``START..END``.
    scale : float
        What all rates are multiplied by.
    adapters : path, optional
        Folder with a PEFT folder per adapter, which have the ranks.
    ranks : path, optional
        CSV file with columns ``name``, ``rank`` and optionally ``path``.
    rank : int, optional
        Rank of adapters without a known one.
    base_aliases : iterable of str
        Further names of the base model in the log.
    strip_prefix : str
        Beginning of names in the log that is left out, such as that of a gateway's provider.
    most_adapters : int
        Adapters that are described one by one; the least popular ones beyond are one class.
    memory_bytes : int
        Memory of the reader of the log.
    for_s : float
        Seconds between two scrapes of a server's metrics.

    Returns
    -------
    Observation
        `Observation.write` makes a workload file of it.

    Raises
    ------
    InputError
        For a file that cannot be read, a missing column, times of no clear unit, no usable request, or a
        profile of another base model.
    """
    load_profile(profile).require_model(base_model)
    known = {} if adapters is None else facts_of_folders(Path(adapters))
    if ranks is not None:
        known |= facts_of_table(Path(ranks))
    options = ObserveOptions(
        base_model=base_model,
        columns=columns or {},
        time_unit=None if time_unit is None else TimeUnit(time_unit),
        timezone=timezone,
        window=window,
        scale=scale,
        profile=profile,
        known=known,
        rank=rank,
        most_adapters=most_adapters,
        memory_bytes=memory_bytes,
        base_aliases=tuple(base_aliases),
        strip_prefix=strip_prefix,
    )
    address = os.fspath(source)
    if "://" in address:
        return observe_metrics(address, options, for_s)
    return observe_log(Path(source), options)
