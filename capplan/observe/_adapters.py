"""Adapters of an observation: rates by counts, ranks by folders and tables, the least popular as a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from capplan.errors import InputError
from capplan.observe._observation import DEFAULT_RANK, AdapterFacts, ObservedAdapter, ObserveOptions, Tail
from capplan.spec import Adapter, PeftFiles, read_columns

Histogram = Mapping[str, list[int]]


def adapters_of(
    counted: Mapping[str | None, int],
    options: ObserveOptions,
    duration_s: float,
    lengths: Mapping[str, tuple[Histogram, Histogram]] | None = None,
) -> tuple[tuple[ObservedAdapter, ...], Tail | None, list[str]]:
    """Return the adapters, the class of the least popular ones, and notes.

    `counted` has the requests by name in `duration_s` seconds, the most first; None: the base model.
    `lengths` has histograms of prompts and outputs of adapters with lengths of their own.
    """
    known, per_request, own = options.known, options.scale / duration_s, lengths or {}
    names = [name for name in counted if name is not None]
    idle = [name for name in known if name not in counted]  # deployed
    names += idle
    unknown = [name for name in names if name not in known]
    notes = []
    if idle:
        notes.append(f"{many(len(idle), 'adapter')} with a known rank had no request, such as {idle[0]}")
    if unknown and options.rank is None:
        notes.append(f"rank {DEFAULT_RANK} is assumed of {many(len(unknown), 'adapter')} without a known one")
    single = names[: options.most_adapters]
    adapters = tuple(
        ObservedAdapter(
            name=name,
            requests=counted.get(name, 0),
            rate_rps=per_request * counted.get(name, 0),
            rank=options.rank_of(name),
            rank_known=name in known or options.rank is not None,
            path=known[name].path if name in known else None,
            prompt_tokens=own[name][0] if name in own else None,
            output_tokens=own[name][1] if name in own else None,
        )
        for name in single
    )
    rest = names[len(single) :]
    if not rest:
        return adapters, None, notes
    requests = [counted.get(name, 0) for name in rest]
    rank = max(map(options.rank_of, rest))
    notes.append(
        f"the {len(rest):,} least popular adapters, with {sum(requests):,} requests, are one class, tail-0 "
        f"to tail-{len(rest) - 1}, of rank {rank}, the largest of theirs, and without paths: it is for "
        "planning, and --max-adapters describes more of them one by one, to be deployed"
    )
    tail = Tail(len(rest), sum(requests), per_request * sum(requests), rank, _zipf(requests))
    return adapters, tail, notes


def _zipf(requests: Sequence[int]) -> float:
    """Return the exponent of a Zipf law whose first share is that of these requests."""
    from scipy.optimize import brentq

    first = requests[0] / max(1, sum(requests))
    places = np.arange(1.0, len(requests) + 1)

    def excess(s: float) -> float:
        return float(1.0 / (places**-s).sum() - first)

    if len(requests) < 2 or excess(0.0) >= 0:
        return 0.0
    return float(brentq(excess, 0.0, 20.0))


def many(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def facts_of_folders(folder: Path) -> dict[str, AdapterFacts]:
    """Return the facts of the PEFT folders in a folder, by their names; there must be one at least."""
    if not folder.is_dir():
        raise InputError("must be a folder of adapters", str(folder), "adapters")
    found = {}
    for each in sorted(folder.iterdir()):
        if (each / "adapter_config.json").is_file():
            found[each.name] = AdapterFacts(PeftFiles.of(each).describe().rank, str(each.absolute()))
    if not found:
        raise InputError("must hold folders with adapter_config.json", str(folder), "adapters")
    return found


def facts_of_table(path: Path) -> dict[str, AdapterFacts]:
    """Return the facts of a CSV file with columns ``name``, ``rank`` and optionally ``path``."""
    table = read_columns(path, ("name", "rank"), ("path",))
    found: dict[str, AdapterFacts] = {}
    for row, name in enumerate(table["name"].astype(str)):
        rank, where = table["rank"].iloc[row], table["path"].iloc[row] if "path" in table else None
        try:
            whole = int(rank)
            Adapter(name=name, rank=whole, rate_rps=0.0)
        except (TypeError, ValueError, InputError) as error:
            rule = error.rule if isinstance(error, InputError) else "must be a whole number"
            raise InputError(rule, f"{name},{rank}", f"{path}: row {row + 1}") from None
        facts = AdapterFacts(whole, where if isinstance(where, str) and where else None)
        if found.setdefault(name, facts) != facts:
            rule = "must state each adapter once, or always the same"
            raise InputError(rule, f"{name},{rank}", f"{path}: row {row + 1}")
    return found
