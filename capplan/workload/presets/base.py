"""A preset: the workload of a paper or of a public trace, and its text as a workload file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from capplan.errors import InputError

LLAMA_7B: Final = "huggyllama/llama-7b"
LLAMA_2_7B: Final = "meta-llama/Llama-2-7b-hf"
LLAMA_3_8B: Final = "meta-llama/Llama-3.1-8B-Instruct"

AZURE_CONVERSATIONS: Final = "azure_llm_2023_conv.parquet"
SHAREGPT: Final = ("prompt_tokens: {mean: 250.94}", "output_tokens: {mean: 231.46}")
"""Means of the cleaned ShareGPT pairs that the digital-twin paper's repository prints."""
SHAREGPT_SPREAD: Final = (
    "prompt_tokens: {mean: 223, std: 245}",
    "output_tokens: {mean: 194, std: 206}",
)
"""Means and spreads of the requests of that paper's published runs on Llama-3.1-8B (docs/fidelity.md)."""


@dataclass(frozen=True)
class Preset:
    """A workload by name; every text is YAML of the workload file.

    Attributes
    ----------
    name, source, summary : str
        What it is called, where it is from, and one line about it.
    requests : tuple of str
        Lines below ``requests``.
    adapters : tuple of str
        Entries of ``adapters``.
    assumed : tuple of str
        Values that the source does not give, in words.
    gpus : int
        GPUs of the source's testbed.
    trace, slo, engine : str
        The value of that key; empty: none.
    file : str
        Public trace it needs; ``$FILE`` in a text stands for its path.
    """

    name: str
    source: str
    summary: str
    base_model: str
    adapters: tuple[str, ...]
    requests: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    gpus: int = 1
    trace: str = ""
    slo: str = ""
    engine: str = ""
    file: str = ""

    def yaml(
        self,
        profile: str | None = None,
        base_model: str | None = None,
        gpus: int | None = None,
        traces: str | None = None,
    ) -> str:
        """Return the text of a workload file.

        Parameters
        ----------
        profile : str, optional
            Shipped name or path; by default a path for the user to fill.
        base_model : str, optional
            Model to serve instead of the source's.
        gpus : int, optional
            GPUs a plan may use, instead of the source's.
        traces : str, optional
            Folder of the public traces.

        Raises
        ------
        InputError
            When the preset needs a public trace and ``traces`` does not hold it.
        """
        path = json.dumps(self._path(traces), ensure_ascii=False) if self.file else ""
        sections = [
            *(f"# {line}" for line in self._comment()),
            "version: 1",
            f"base_model: {base_model or self.base_model}" + self._note(base_model),
            f"profile: {json.dumps(profile, ensure_ascii=False)}" if profile else _PROFILE,
            f"gpus: {{count: {gpus or self.gpus}}}",
            *(f"{key}: {text}" for key, text in self._flat() if text),
            *(["requests:", *(f"  {line}" for line in self.requests)] if self.requests else []),
            "adapters:",
            *(f"  - {entry}" for entry in self.adapters),
        ]
        return "\n".join(sections).replace("$FILE", path) + "\n"

    def _flat(self) -> tuple[tuple[str, str], ...]:
        return (("engine", self.engine), ("slo", self.slo), ("trace", self.trace))

    def _note(self, base_model: str | None) -> str:
        return "" if base_model in (None, self.base_model) else f"  # the source has {self.base_model}"

    def _comment(self) -> list[str]:
        lines = [f"Preset {self.name}: {self.summary}", f"Source: {self.source}"]
        if self.assumed:
            lines += ["Assumed, because the source does not say it:", *(f"- {each}" for each in self.assumed)]
        return lines

    def _path(self, traces: str | None) -> str:
        if traces is None:
            rule = f"is required: preset {self.name} needs {self.file}"
            raise InputError(rule, location="--traces")
        path = Path(traces).resolve() / self.file
        if not path.is_file():
            raise InputError(f"must hold {self.file}, which preset {self.name} needs", traces, "--traces")
        return str(path)


_PROFILE: Final = "profile: ./profile.json  # yours, or a shipped name: see `capplan profiles`"


def group(name: str, count: int, rank: int, total_rps: float, popularity: str = "{zipf: 0}") -> str:
    """Return the entry of ``count`` adapters of one rank that share ``total_rps``."""
    shares = f"popularity: {popularity}, total_rate_rps: {total_rps:.6g}"
    return f'{{name: "{name}-{{i}}", count: {count}, rank: {rank}, {shares}}}'


def by_rank(
    ranks: Sequence[int], shares: Sequence[float], total_rps: float, per_rank: int, popularity: str
) -> tuple[str, ...]:
    """Return one group per rank, with its share of the total rate."""
    return tuple(
        group(f"r{rank}", per_rank, rank, total_rps * share, popularity)
        for rank, share in zip(ranks, shares, strict=True)
    )


def in_turn(ranks: Sequence[int], shares: Sequence[float], total_rps: float) -> tuple[str, ...]:
    """Return one entry per adapter, the ranks dealt out in turn."""
    return tuple(
        f"{{name: a{i}, rank: {ranks[i % len(ranks)]}, rate_rps: {share * total_rps:.6g}}}"
        for i, share in enumerate(shares)
    )


def at_random(ranks: Sequence[int], rates_rps: Sequence[float], adapters: int) -> tuple[str, ...]:
    """Return groups of adapters, each of which picks rank and rate at random; the same ones every time."""
    rng = np.random.default_rng(0)
    picked: Counter[tuple[int, int]] = Counter(
        zip(
            rng.integers(len(ranks), size=adapters).tolist(),
            rng.integers(len(rates_rps), size=adapters).tolist(),
            strict=True,
        )
    )
    return tuple(
        f'{{name: "r{ranks[r]}-{rates_rps[q]:g}rps-{{i}}", count: {count}, '
        f"rank: {ranks[r]}, rate_rps: {rates_rps[q]:g}}}"
        for (r, q), count in sorted(picked.items())
    )


def lognormal_bins(mu: float, sigma: float, limit: int) -> str:
    """Return the lengths of a log-normal, cut at ``limit`` tokens, as a histogram in YAML."""
    edges = [1]
    while edges[-1] < limit:
        edges.append(min(max(edges[-1] + 1, round(edges[-1] * 1.2)), limit))

    def below(tokens: float) -> float:
        return 0.5 * (1 + math.erf((math.log(tokens) - mu) / (sigma * math.sqrt(2))))

    # A length is the variable rounded to a whole number; what would be 0 is 1.
    at = [0.0, *(below(edge - 0.5) for edge in edges[1:-1]), 1.0]
    counts = [round(1e6 * (high - low)) for low, high in pairwise(at)]
    return f"{{edges: [{_listed(edges)}], counts: [{_listed(counts)}]}}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
