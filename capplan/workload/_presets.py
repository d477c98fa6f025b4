"""Preset workloads of papers, systems and public traces, read from ``datasets/presets/*.yaml``.

A file holds one source: ``source`` and ``licence`` in words, ``defaults`` for the fields of its presets, and
``presets``. An entry of ``presets`` with ``for`` stands for a family: each item of ``for`` maps parameters to
equally long lists that are read in step, and the items are combined as in nested loops. ``$name`` in a text
stands for a parameter. A text that is a parameter and nothing else takes its value as it is, or its items in
a list. ``$FILE`` stands for the path of the public trace named by ``file``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from importlib import resources
from itertools import product
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from capplan.errors import InputError
from capplan.spec import (
    Count,
    Key,
    NonNegative,
    Popularity,
    Rank,
    SpecModel,
    Text,
    format_key,
    parse_yaml,
    unknown_key,
    validate_document,
)

_PROFILE: Final = "profile: ./profile.json  # yours, or a shipped name: see `capplan profiles`"
_Entry: TypeAlias = dict[str, Any]


class EachRank(SpecModel):
    """One group of adapters per rank, which share the total rate out by rank and then by popularity."""

    generate: Literal["each_rank"]
    ranks: tuple[Rank, ...]
    shares: Popularity | tuple[NonNegative, ...]
    count: Count = Field(description="Adapters of each rank.")
    popularity: Mapping[str, float]
    total_rate_rps: NonNegative

    def entries(self) -> Iterator[_Entry]:
        """Yield one entry of ``adapters`` per rank."""
        weights = self.shares
        if isinstance(weights, Popularity):
            weights = weights.shares(len(self.ranks))
        for rank, weight in zip(self.ranks, weights, strict=True):
            rate_rps = self.total_rate_rps * (weight / sum(weights))
            rates = {"popularity": self.popularity, "total_rate_rps": rate_rps}
            yield {"name": f"r{rank}-{{i}}", "count": self.count, "rank": rank, **rates}


class RankCycle(SpecModel):
    """Single adapters by falling popularity, with the ranks assigned in turn."""

    generate: Literal["rank_cycle"]
    ranks: tuple[Rank, ...]
    count: Count
    popularity: Popularity
    total_rate_rps: NonNegative

    def entries(self) -> Iterator[_Entry]:
        """Yield one entry of ``adapters`` per adapter."""
        for i, share in enumerate(self.popularity.shares(self.count)):
            rank = self.ranks[i % len(self.ranks)]
            yield {"name": f"a{i}", "rank": rank, "rate_rps": share * self.total_rate_rps}


class RandomPairs(SpecModel):
    """Adapters with rank and rate picked at random; the same ones every time."""

    generate: Literal["random_pairs"]
    ranks: tuple[Rank, ...]
    rates_rps: tuple[NonNegative, ...]
    count: Count

    def entries(self) -> Iterator[_Entry]:
        """Yield one entry of ``adapters`` per pair of rank and rate that occurs."""
        import numpy as np

        rng = np.random.default_rng(0)
        rank_picks = rng.integers(len(self.ranks), size=self.count).tolist()
        rate_picks = rng.integers(len(self.rates_rps), size=self.count).tolist()
        for (r, q), count in sorted(Counter(zip(rank_picks, rate_picks, strict=True)).items()):
            rank, rate_rps = self.ranks[r], self.rates_rps[q]
            name = f"r{rank}-{rate_rps:g}rps-{{i}}"
            yield {"name": name, "count": count, "rank": rank, "rate_rps": rate_rps}


def _generator_tag(value: Any) -> str:
    return f"<{value.get('generate', 'entry')}>" if isinstance(value, Mapping) else "<entry>"


Adapters: TypeAlias = Annotated[
    Annotated[EachRank, Tag("<each_rank>")]
    | Annotated[RankCycle, Tag("<rank_cycle>")]
    | Annotated[RandomPairs, Tag("<random_pairs>")]
    | Annotated[_Entry, Tag("<entry>")],
    Discriminator(_generator_tag),
]


class Preset(SpecModel):
    """A named workload; sections are written as in a workload file."""

    name: Text
    source: Text
    summary: Text
    base_model: Text
    adapters: tuple[Adapters, ...] = Field(min_length=1)
    requests: _Entry = Field(default={})
    assumed: tuple[Text, ...] = Field(default=(), description="Values that the source does not give.")
    gpus: Count = Field(default=1, description="GPUs of the source's testbed.")
    engine: _Entry = Field(default={})
    slo: _Entry = Field(default={})
    trace: _Entry = Field(default={})
    file: str = Field(default="", description="Public trace the preset needs.")

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
        note = "" if base_model in (None, self.base_model) else f"  # the source has {self.base_model}"
        flat = {"engine": self.engine, "slo": self.slo, "trace": self.trace}
        lines = [
            *(f"# {line}" for line in self._comment()),
            "version: 1",
            f"base_model: {base_model or self.base_model}{note}",
            f"profile: {json.dumps(profile, ensure_ascii=False)}" if profile else _PROFILE,
            f"gpus: {{count: {gpus or self.gpus}}}",
            *(f"{key}: {_flow(value)}" for key, value in flat.items() if value),
            *(["requests:"] if self.requests else []),
            *(f"  {key}: {_flow(value)}" for key, value in self.requests.items()),
            "adapters:",
            *(f"  - {_flow(entry, digits=6)}" for entry in self._entries()),
        ]
        return "\n".join(lines).replace("$FILE", path) + "\n"

    def _entries(self) -> Iterator[_Entry]:
        for each in self.adapters:
            yield from [each] if isinstance(each, dict) else each.entries()

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


class _PresetFile(SpecModel):
    """One file of presets; fields of ``defaults`` and ``presets`` are those of :class:`Preset`."""

    order: int = Field(description="Position of the file in the list of presets.")
    source: Text = Field(description="The paper, system or data set, for people.")
    licence: Text = Field(description="Licence of what is taken from it.")
    common: Any = Field(default=None, description="Place for YAML anchors.")
    defaults: _Entry = Field(default={})
    presets: tuple[_Entry, ...]


@lru_cache(maxsize=1)
def presets() -> Mapping[str, Preset]:
    """Return every preset by its name, source by source."""
    folder = resources.files("capplan") / "datasets" / "presets"
    texts = {each.name: each.read_text(encoding="utf-8") for each in folder.iterdir()}
    files = [read_presets(text, name) for name, text in texts.items() if name.endswith(".yaml")]
    ordered = sorted(files, key=lambda file: file[0])
    return MappingProxyType({each.name: each for _, found in ordered for each in found})


def preset(name: str) -> Preset:
    """Return a preset.

    Raises
    ------
    InputError
        For a name that none has, with the nearest one.
    """
    from difflib import get_close_matches

    known = presets()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"must be a preset of `capplan workload preset --list`{hint}", name, "preset")
    return known[name]


def read_presets(text: str, name: str) -> tuple[int, list[Preset]]:
    """Return the position of a file among all, and its presets with families expanded.

    Errors are located in the file ``name``.
    """
    source = parse_yaml(text, name)
    document = validate_document(_PresetFile, source.data, source.locate)
    found = []
    for number, entry in enumerate(document.presets):
        at = source.locate(("presets", number))
        fields = document.defaults | {key: value for key, value in entry.items() if key != "for"}
        for rows in product(*(_rows(axis, at) for axis in entry.get("for", []))):
            parameters: dict[str, Any] = {"FILE": "$FILE"}
            for row in rows:
                parameters |= row
            filled = _fill(fields, parameters, at)
            found.append(validate_document(Preset, filled, partial(_located, at)))
    return document.order, found


def _located(at: str, key: Key) -> str:
    return f"{at}.{format_key(key)}"


def _rows(axis: Mapping[str, list[Any]], at: str) -> list[dict[str, Any]]:
    try:
        return [dict(zip(axis, values, strict=True)) for values in zip(*axis.values(), strict=True)]
    except ValueError:
        raise InputError("must map parameters to equally long lists", location=f"{at}.for") from None


def _fill(value: Any, parameters: Mapping[str, Any], at: str) -> Any:
    """Return the value with every ``$name`` replaced."""
    if isinstance(value, Mapping):
        return {key: _fill(item, parameters, at) for key, item in value.items()}
    if isinstance(value, list):
        filled: list[Any] = []
        for item in value:
            new = _fill(item, parameters, at)
            filled += new if isinstance(new, list) and isinstance(item, str) else [new]
        return filled
    if not isinstance(value, str) or "$" not in value:
        return value
    if value[1:] in parameters:
        return parameters[value[1:]]
    shown = {name: f"{each:g}" if isinstance(each, float) else each for name, each in parameters.items()}
    try:
        return Template(value).substitute(shown)
    except (KeyError, ValueError) as error:
        name = error.args[0]
        raise InputError(unknown_key(name, parameters).replace("key", "parameter"), value, at) from None


def _flow(value: Any, digits: int | None = None) -> str:
    """Return a value in YAML's flow style; ``digits`` is the precision of numbers, exact by default."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item, digits)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(item, digits) for item in value) + "]"
    if isinstance(value, float) and digits is not None:
        return f"{value:.{digits}g}"
    return f'"{value}"' if isinstance(value, str) and "{" in value else str(value)
