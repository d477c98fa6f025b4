"""Requests: lengths of presets with other outputs, and popularity of functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.reproduce.toppings._setting import setting
from capplan.spec import Adapter, Lengths, Trace, Workload
from capplan.workload import load_workload, preset

_LENGTHS: Final = "toppings-maf-512"
"""The preset whose lengths all requests have."""


def preset_workload(name: str, outputs: float, traces: str | None = None) -> Workload:
    """Return a preset with outputs times a factor, or with its recorded prompts compressed."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "workload.yaml"
        path.write_text(preset(name).yaml(traces=traces), encoding="utf-8")
        load = load_workload(path)
    if load.length_pairs is not None:
        prompts = np.maximum(1, load.length_pairs.prompt_tokens // setting().compression)
        shorter = replace(load.length_pairs, prompt_tokens=prompts)
        return load.model_copy(update={"length_pairs": shorter})
    edges, binned = np.array(load.output_tokens.edges), np.array(load.output_tokens.counts)
    middles = np.maximum(1, np.rint(outputs * (edges[:-1] + edges[1:] - 1) / 2)).astype(int)
    values = np.unique(middles)
    counts = [int(binned[middles == value].sum()) for value in values]
    lengths = Lengths(values=tuple(values.tolist()), counts=tuple(counts))
    return load.model_copy(update={"output_tokens": lengths})


def functions_workload(
    functions: int, rps: float, ranks: Sequence[int], outputs: float, seed: int
) -> Workload:
    """Return functions as adapters, the ranks in turn; the seed draws the functions."""
    adapters = tuple(
        Adapter(name=f"f-{i}", rank=ranks[i % len(ranks)], rate_rps=rps * share)
        for i, share in enumerate(function_shares(functions, seed).tolist())
    )
    return preset_workload(_LENGTHS, outputs).model_copy(update={"adapters": adapters})


def function_shares(functions: int, seed: int) -> NDArray[np.float64]:
    """Return shares of calls like those of the functions of Azure's trace of 2019, by its published facts.

    45 % of the applications are called at most once an hour, 36 % up to once a minute, 16 % up to once a
    second, 3 % more often, over eight decades (Shahrad et al., ATC 2020). Log-uniform within each band; the
    outer ends are assumed.
    """
    given = setting().functions
    rng = np.random.default_rng(seed)
    ends = np.log10(given.ends_rps)
    band = rng.choice(len(given.shares), functions, p=given.shares)
    rates = 10.0 ** rng.uniform(ends[band], ends[band + 1])
    return np.asarray(rates / rates.sum())


def cumulative_workload() -> Workload:
    """Return the requests of Fig. 3."""
    given = setting().cumulative
    names = [f"f-{i}" for i in range(given.requests)]
    arrivals_s = np.arange(len(names)) * given.every_ms / 1e3
    prompts, outputs = ([tokens] * len(names) for tokens in (given.prompt_tokens, given.output_tokens))
    return Workload(
        base_model=setting().small.arch,
        adapters=tuple(Adapter(name=name, rank=given.rank, rate_rps=0.0) for name in names),
        prompt_tokens=Lengths(mean=given.prompt_tokens),
        output_tokens=Lengths(mean=given.output_tokens),
        trace=Trace.from_arrays(arrivals_s, names, prompts, outputs, 10.0),
    )
