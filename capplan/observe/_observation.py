"""What was observed of a fleet's traffic, its adapters, and the workload that repeats it.

Rates of adapters are by counts, ranks by folders and tables; the least popular adapters are a class.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import yaml
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.spec import Adapter, PeftFiles, TimeUnit, YamlDumper, read_columns, write_bytes_atomic, yaml_text
from capplan.workload import load_workload

Tokens = NDArray[np.int32]

DEFAULT_MEMORY_BYTES: Final = 512 * 2**20
"""Memory of the reader of a log."""
MOST_ADAPTERS: Final = 1000
"""Adapters that are described one by one unless stated otherwise."""

DEFAULT_RANK: Final = 16
"""Rank of an adapter that nothing states."""
_FEW_ADAPTERS: Final = 40
"""Adapters that a workload file lists itself; more of them are a CSV file beside it."""


@dataclass(frozen=True)
class AdapterFacts:
    """Rank and weights of an adapter, from a folder or a table."""

    rank: int
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """Options of `capplan.observe.observe`; `known` are the facts of adapters by name."""

    base_model: str
    columns: Mapping[str, str]
    time_unit: TimeUnit | None
    timezone: str
    window: str | None
    scale: float
    profile: str
    known: Mapping[str, AdapterFacts]
    rank: int | None
    most_adapters: int
    memory_bytes: int
    base_aliases: tuple[str, ...] = ()
    strip_prefix: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise InputError("must be a number above 0", self.scale, "scale")
        if self.most_adapters < 1:
            raise InputError("must be a whole number >= 1", self.most_adapters, "max_adapters")

    def rank_of(self, name: str) -> int:
        """Return the rank of an adapter, that of all others if it is not known."""
        return self.known[name].rank if name in self.known else self.rank or DEFAULT_RANK


@dataclass(frozen=True)
class ObservedAdapter:
    """An adapter of the log."""

    name: str
    requests: int
    rate_rps: float
    rank: int
    rank_known: bool
    path: str | None = None
    prompt_tokens: Mapping[str, list[int]] | None = None
    """Histogram of its own prompts, ``edges`` and ``counts``; None: those of all."""
    output_tokens: Mapping[str, list[int]] | None = None


@dataclass(frozen=True)
class Dropped:
    """Rows that were left out for one reason."""

    reason: str
    rows: int
    example: str

    @property
    def like(self) -> str:
        """The example in words, after a comma; nothing if the row is empty."""
        return f", such as {self.example}" if self.example else ""


@dataclass(frozen=True)
class Tail:
    """The least popular adapters, as one class."""

    adapters: int
    requests: int
    rate_rps: float
    rank: int
    zipf: float
    """Exponent of their popularity, the ratio of their mean rate to that of the first of them."""


@dataclass(frozen=True)
class Observation:
    """Traffic of a log or of a server, as a workload describes it.

    Attributes
    ----------
    source
        What was observed.
    columns
        Fields of the source by what they hold, in words.
    rows, requests
        Rows of the source, and those that were used.
    dropped
        The others, by reason.
    start
        Time of the start; None: not known.
    duration_s
        Length of the observation, in seconds.
    rate_rps
        Mean rate of all requests, of the base model included; `scale` is in it.
    steps
        Pairs (seconds from the start, rate over mean), where the rate varies.
    minutes
        Requests in each minute, as observed.
    adapters, tail
        The adapters, by requests, and those that are described as a class.
    base_rate_rps
        Rate of the requests of the base model.
    prompts, outputs
        Lengths of a sample of requests, in pairs.
    gap_cv
        Coefficient of variation of an adapter's gaps between requests, for what the steps leave; 1: Poisson.
    prefix_hit_share
        Share of prompt tokens in blocks that an earlier request had; None: not recorded.
    shared_prefix_tokens
        Length of a common prefix with that share.
    warnings, notes
        What the user should know, and what was assumed.
    """

    source: str
    columns: tuple[str, ...]
    rows: int
    requests: int
    dropped: tuple[Dropped, ...]
    start: datetime | None
    duration_s: float
    rate_rps: float
    steps: tuple[tuple[float, float], ...]
    minutes: NDArray[np.int64]
    adapters: tuple[ObservedAdapter, ...]
    tail: Tail | None
    base_rate_rps: float
    prompts: Tokens
    outputs: Tokens
    base_model: str
    profile: str
    gap_cv: float = 1.0
    prefix_hit_share: float | None = None
    shared_prefix_tokens: int = 0
    scale: float = 1.0
    quantiles: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Quantiles of the lengths of all requests, by ``prompt_tokens`` and ``output_tokens``."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def write(self, path: Path) -> tuple[Path, ...]:
        """Write the workload file, and beside it the lengths and, if there are many, the adapters.

        Returns
        -------
        tuple of Path
            The files, the workload first.

        Raises
        ------
        InputError
            If the workload cannot be loaded; the files of an earlier one are left as they are.
        """
        files = {
            path.name if suffix == ".yaml" else path.stem + suffix: content
            for suffix, content in self.files(path.stem).items()
        }
        with TemporaryDirectory(prefix="capplan-observe-") as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            load_workload(Path(folder, path.name))
        for name, content in files.items():  # the workload last, because it names the others
            write_bytes_atomic(path.with_name(name), content)
        return tuple(path.with_name(name) for name in reversed(files))

    def files(self, stem: str) -> dict[str, bytes]:
        """Return the files of the workload by their suffix; `stem` is what comes before it."""
        found = {".lengths.parquet": self._lengths_file()}
        document = self._document(f"{stem}.lengths.parquet")
        if len(self.adapters) > _FEW_ADAPTERS and self.tail is None and not self._have_own_lengths:
            found[".adapters.csv"] = self._adapters_file()
            document["adapters"] = f"{stem}.adapters.csv"
        comments = "".join(f"# {line}\n" for line in self._comments())
        found[".yaml"] = (comments + yaml_text(document, _Dumper)).encode()
        return found

    @property
    def _have_own_lengths(self) -> bool:
        return any(each.prompt_tokens is not None for each in self.adapters)

    def _comments(self) -> Sequence[str]:
        start = f" from {self.start.isoformat(sep=' ', timespec='seconds')}" if self.start else ""
        lines = [
            f"Observed in {self.source}: {self.requests:,} requests in {self.duration_s:,.0f} s{start}.",
            *self.warnings,
        ]
        return ["".join(char if char.isprintable() else " " for char in line) for line in lines]

    def _document(self, lengths_file: str) -> dict[str, Any]:
        document: dict[str, Any] = {"version": 1, "base_model": self.base_model, "profile": self.profile}
        requests: dict[str, Any] = {"lengths_from": lengths_file}
        arrivals = self._arrivals()
        if arrivals is not None:
            requests["arrivals"] = arrivals
        if self.shared_prefix_tokens:
            requests["shared_prefix_tokens"] = self.shared_prefix_tokens
        document["requests"] = requests
        if self.base_rate_rps > 0:
            document["base"] = {"rate_rps": _rounded(self.base_rate_rps)}
        if self.adapters or self.tail:
            document["adapters"] = [*map(_adapter, self.adapters), *self._tail()]
        return document

    def _arrivals(self) -> dict[str, Any] | None:
        if len(self.steps) == 1 and self.gap_cv == 1.0:
            return None
        found: dict[str, Any] = {"process": "poisson"}
        if self.gap_cv != 1.0:
            found = {"process": "gamma", "cv": _rounded(self.gap_cv)}
        if len(self.steps) > 1:
            found["modulation"] = {
                "kind": "steps",
                "steps": [[_rounded(at), _rounded(factor)] for at, factor in self.steps],
                "period_s": _rounded(self.duration_s),
            }
        return found

    def _tail(self) -> list[dict[str, Any]]:
        if self.tail is None:
            return []
        return [
            {
                "name": "tail-{i}",
                "count": self.tail.adapters,
                "rank": self.tail.rank,
                "total_rate_rps": _rounded(self.tail.rate_rps),
                "popularity": {"zipf": _rounded(self.tail.zipf)},
            }
        ]

    def _lengths_file(self) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({"prompt_tokens": self.prompts, "output_tokens": self.outputs})
        file = io.BytesIO()
        pq.write_table(table, file, compression="zstd")
        return file.getvalue()

    def _adapters_file(self) -> bytes:
        import csv

        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        paths = any(each.path for each in self.adapters)
        writer.writerow(["name", "rank", "rate_rps", *(["path"] if paths else [])])
        for each in self.adapters:
            writer.writerow(
                [each.name, each.rank, _rounded(each.rate_rps), *([each.path or ""] if paths else [])]
            )
        return text.getvalue().encode()


class _Dumper(YamlDumper):
    """Writes what is within a list on one line: a step, an adapter, the edges of a histogram."""

    def represent_sequence(
        self, tag: str, sequence: Any, flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        """Return the node of a list; of numbers on one line, others with a line per item."""
        plain = all(isinstance(each, int | float | str) for each in sequence)
        node = super().represent_sequence(tag, sequence, flow_style=plain)
        for item in node.value:
            if not isinstance(item, yaml.ScalarNode):
                item.flow_style = True
        return node


def _adapter(adapter: ObservedAdapter) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": adapter.name,
        "rank": adapter.rank,
        "rate_rps": _rounded(adapter.rate_rps),
    }
    if adapter.path:
        fields["path"] = adapter.path
    for name in ("prompt_tokens", "output_tokens"):
        if getattr(adapter, name) is not None:
            fields[name] = dict(getattr(adapter, name))
    return fields


def _rounded(value: float) -> float:
    """Return a number with six digits."""
    if not math.isfinite(value):
        raise InputError("must be finite", value)
    return float(f"{value:.6g}")


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
