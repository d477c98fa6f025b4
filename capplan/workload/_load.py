"""Load a workload file and the files it names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from capplan.errors import InputError
from capplan.spec import (
    ADAPTER_CONFIG,
    ALL_LINEAR,
    AdapterEntry,
    AdapterFields,
    BaseEntry,
    FolderAdapter,
    Header,
    Key,
    Lengths,
    LengthsFile,
    PeftFiles,
    PlanningRequirements,
    RegistryEntry,
    RequestsEntry,
    Scheduler,
    SpecModel,
    Trace,
    TraceEntry,
    Workload,
    WorkloadFile,
    beyond,
    input_limits,
    is_profile_path,
    local_folder,
    open_unpacked,
    parse_scalar,
    placed_path,
    read_columns,
    read_yaml,
    require_described,
    table_parts,
    unknown_key,
    validate_document,
    with_decimal_points,
)
from capplan.workload._trace_files import read_length_pairs, read_trace

if TYPE_CHECKING:
    import pandas as pd

    from capplan.registry import RegisteredAdapter

_REGISTRY_TIMEOUT_S: Final = 3.0
_LENGTHS = ("prompt_tokens", "output_tokens")
_OPTIONAL_COLUMNS: Final = ("path", "target_modules")


def load_workload(path: str | os.PathLike[str]) -> Workload:
    """Read a workload file.

    Files named in it (adapters, traces, lengths, profiles, the previous plan) are relative to its folder.

    Raises
    ------
    InputError
        For the first broken rule, as ``FILE:LINE: key: rule (got VALUE)``.
    """
    source = read_yaml(os.fspath(path))
    file = validate_document(WorkloadFile, source.data, source.locate)
    reader = _Reader(Path(path).parent, source.locate, file.base_model)
    requirements = reader.requirements(file)
    if file.trace is not None:
        adapters, requests = reader.traced(file)
    else:
        adapters = reader.adapters(file.adapters)
        requests = reader.base(file.base) | reader.requests(file.requests, file.base)
    document = {
        **requirements,
        **requests,
        "arrivals": file.requests.arrivals,
        "stickiness": file.requests.stickiness,
        "length_correlation": file.requests.length_correlation,
        "shared_prefix_tokens": file.requests.shared_prefix_tokens,
        "adapters": [entry.fields for entry in adapters],
    }

    def locate(key: Key) -> str:
        match key:
            case ("adapters", int(index), *rest):
                return source.locate((*adapters[index].key, *rest))
            case _:
                return source.locate(key)

    return validate_document(Workload, document, locate)


@dataclass(frozen=True)
class _AdapterRecord:
    """Fields of an adapter, and the key of the entry of the file they come from."""

    fields: dict[str, Any]
    key: Key


@dataclass(frozen=True)
class _Reader:
    folder: Path
    locate: Callable[[Key], str]
    base_model: str
    described: dict[Path, FolderAdapter] = field(default_factory=dict)

    def requirements(self, file: WorkloadFile) -> dict[str, Any]:
        """Return the planning requirements, paths resolved."""
        requirements = _fields(file, PlanningRequirements)
        requirements["profile"] = self._profile(file.profile)
        requirements["pools"] = [pool.replace(profile=self._profile(pool.profile)) for pool in file.pools]
        requirements["scheduler"] = self._scheduler(file.scheduler)
        requirements["previous_plan"] = file.previous_plan and str(self.folder / file.previous_plan)
        return requirements

    def _scheduler(self, scheduler: Scheduler | None) -> Scheduler | None:
        """Return the scheduler with the path of its learned predictor resolved."""
        if scheduler is None or scheduler.predictor.file is None:
            return scheduler
        path = str(self.folder / scheduler.predictor.file)
        return scheduler.replace(predictor=scheduler.predictor.replace(file=path))

    def adapters(self, source: Sequence[AdapterEntry] | RegistryEntry | str | None) -> list[_AdapterRecord]:
        """Return the adapters of the list, of the CSV file, or of the registry."""
        if isinstance(source, RegistryEntry):
            return self.registered(source)
        if isinstance(source, str):
            return self._rows(source, ("name", "rank", "rate_rps"), ("adapters",))
        return self.listed(source or ())

    def registered(self, entry: RegistryEntry) -> list[_AdapterRecord]:
        """Return the adapters of a base model in a registry, with the rates of the entry."""
        from capplan.registry import AdapterRegistry

        where = entry.registry if "://" in entry.registry else str(self.folder / entry.registry)
        with AdapterRegistry(where, timeout_s=_REGISTRY_TIMEOUT_S, read_only=True) as registry:
            adapters = registry.adapters(self.base_model, holders=False)
            location = registry.location
        found = {adapter.name: adapter for adapter in adapters}
        if not found:
            rule = f"must hold adapters of base_model {self.base_model}"
            raise InputError(rule, location=self.locate(("adapters", "registry")))
        for name in entry.rates_rps or ():
            if name not in found:
                rule = "must be the name of an adapter of base_model in the registry"
                raise InputError(rule, name, self.locate(("adapters", "rates_rps")))
        rates_rps = zip(found.values(), entry.rates_of(list(found)), strict=True)
        return [
            _AdapterRecord(
                self.described_fields(
                    _registered(each, rate_rps), _keys_at(f"{location}: adapter {each.name}")
                ),
                ("adapters",),
            )
            for each, rate_rps in rates_rps
        ]

    def listed(self, entries: Sequence[AdapterEntry]) -> list[_AdapterRecord]:
        """Return the adapters that the entries of the list stand for."""
        adapters, most = 0, input_limits().max_adapters
        for index, entry in enumerate(entries):
            adapters += entry.count or 1
            if adapters > most:
                rule = beyond(most, "adapters", "--max-adapters")
                raise InputError(rule, adapters, self.locate(("adapters", index)))
        placed = []
        for index, entry in enumerate(entries):
            key = ("adapters", index)
            fields = _fields(entry, AdapterFields)
            fields |= {name: self.lengths(getattr(entry, name)) for name in _LENGTHS}

            def locate(name: str, at: Key = key) -> str:
                return self.locate((*at, name))

            for i, rate_rps in enumerate(entry.rates_rps()):
                numbered = fields if entry.count is None else _numbered(fields, i)
                described = self.described_fields(numbered, locate)
                placed.append(_AdapterRecord(described | {"rate_rps": rate_rps}, key))
        return placed

    def described_fields(self, fields: dict[str, Any], locate: Callable[[str], str]) -> dict[str, Any]:
        """Return the fields of an adapter, checked and completed by its folder if that is on this machine."""
        path, rank, modules = fields["path"], fields["rank"], fields["target_modules"]
        path = path and placed_path(path, self.folder, locate("path"))
        folder = local_folder(path)
        if folder is None:
            if modules == ADAPTER_CONFIG:
                raise InputError(
                    f"must be a folder on this machine, with {ADAPTER_CONFIG}", path, locate("path")
                )
            if rank is None:
                raise InputError(
                    "is required, unless path is a folder on this machine", location=locate("rank")
                )
            return fields | {"path": path}
        if folder not in self.described:
            self.described[folder] = PeftFiles.of(folder).describe()
        found = self.described[folder]
        stated = None if modules == ADAPTER_CONFIG else modules
        require_described(found, rank or found.rank, stated, self.base_model, locate)
        return fields | {"path": path, "rank": found.rank, "target_modules": found.target_modules}

    def _rows(self, name: str, columns: Sequence[str], key: Key) -> list[_AdapterRecord]:
        """Return the adapters of a CSV file."""
        if "://" in name:
            rule = "must be a CSV file; a registry is {registry: URL}"
            raise InputError(rule, location=self.locate(key))
        path = self.folder / name
        rows = read_adapters(path, columns, _OPTIONAL_COLUMNS, self.described_fields)
        return [_AdapterRecord(_fields(adapter, AdapterFields), key) for adapter in rows]

    def base(self, entry: BaseEntry | None) -> dict[str, Any]:
        """Return the field of the base model's traffic."""
        if entry is None:
            return {"base": None}
        lengths = {name: self.lengths(getattr(entry, name)) for name in _LENGTHS}
        return {"base": {"rate_rps": entry.rate_rps, "arrivals": entry.arrivals, **lengths}}

    def traced(self, file: WorkloadFile) -> tuple[list[_AdapterRecord], dict[str, Any]]:
        """Return the adapters of a trace, with the rates and lengths seen in it, and the common fields."""
        entry = cast(TraceEntry, file.trace)
        path, base_model = self.folder / entry.file, file.base_model
        read = partial(
            read_trace,
            path,
            entry.duration_s,
            entry.format,
            entry.rate_rps,
            time_unit=entry.time_unit,
            columns=entry.columns.given(),
        )
        if entry.ranks is not None:
            trace = read(base_model=base_model)
            ranked = self._rows(entry.ranks, ("name", "rank"), ("trace", "ranks"))
            rule = "must give a rank for every adapter of the trace"
            where = f"{self.folder / entry.ranks}: name"
        else:
            ranked = self.adapters(file.adapters)
            rates = {each.fields["name"]: each.fields["rate_rps"] for each in ranked}
            if file.base is not None:
                rates[base_model] = file.base.rate_rps
            deal = partial(_assigned_adapters, rates, entry.seed)
            trace = read(deal=deal, base_model=base_model)
            rule, where = "must be the name of one of adapters", f"{path}: adapter"
        names = {each.fields["name"] for each in ranked}
        unknown = set(trace.names) - names - {base_model}
        if unknown:
            raise InputError(rule, min(unknown), where)
        seen = _observed_traffic(trace)
        idle = {"rate_rps": 0.0}
        placed = [replace(each, fields=each.fields | seen.get(each.fields["name"], idle)) for each in ranked]
        common = {name: Lengths.of(getattr(trace, name)) for name in _LENGTHS}
        base = None if base_model in names else seen.get(base_model, file.base and idle)
        return placed, {**common, "trace": trace, "base": base}

    def requests(self, entry: RequestsEntry, base: BaseEntry | None = None) -> dict[str, Any]:
        """Return the common lengths, each on its own or in pairs; absent ones are those of the base model."""
        if entry.lengths_from is None:
            return {
                name: self.lengths(getattr(entry, name) or getattr(base, name, None)) for name in _LENGTHS
            }
        source = entry.lengths_from
        pairs = read_length_pairs(self.folder / source.file, source.format, source.columns.given())
        try:
            pairs = pairs.scaled(source.scale)
        except InputError as error:
            raise InputError(error.rule, source.scale, "requests.lengths_from.scale") from None
        return pairs.as_fields()

    def lengths(self, source: Lengths | LengthsFile | None) -> Lengths | None:
        """Return lengths as they are, or as a file holds them."""
        if isinstance(source, LengthsFile):
            return read_lengths(self.folder / source.file, source.column)
        return source

    def _profile(self, profile: str | None) -> str | None:
        if profile is None or not is_profile_path(profile):
            return profile
        path = str(self.folder / profile)
        return path if is_profile_path(path) else f"./{path}"  # pathlib drops a leading ./


def _fields(model: SpecModel, like: type[SpecModel]) -> dict[str, Any]:
    """Return the values of the fields that ``model`` shares with the class ``like``."""
    return {name: getattr(model, name) for name in like.model_fields}


def _keys_at(where: str) -> Callable[[str], str]:
    return lambda key: f"{where}: {key}"


def _registered(adapter: RegisteredAdapter, rate_rps: float) -> dict[str, Any]:
    """Return the fields of an adapter of a registry."""
    fields = AdapterFields(
        name=adapter.name,
        rank=adapter.rank,
        rate_rps=rate_rps,
        path=adapter.location,
        target_modules=adapter.target_modules,
    )
    return _fields(fields, AdapterFields)


def _numbered(fields: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the fields with ``{i}`` replaced in every text."""

    def fill(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(fill(item) for item in value)
        return value.replace("{i}", str(number)) if isinstance(value, str) else value

    return {name: fill(value) for name, value in fields.items()}


def _assigned_adapters(rates_rps: Mapping[str, float], seed: int, requests: int) -> list[str]:
    """Return an adapter's name for each request, drawn in proportion to the rates."""
    import numpy as np

    names, rates = list(rates_rps), np.array([*rates_rps.values()])
    if not rates.any():
        raise InputError("must have a rate above 0, to assign requests to adapters", location="adapters")
    rng = np.random.Generator(np.random.PCG64(seed))
    chosen = rng.choice(len(names), size=requests, p=rates / rates.sum())
    return [names[position] for position in chosen.tolist()]


def _observed_traffic(trace: Trace) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "rate_rps": len(prompts) / trace.duration_s,
            "prompt_tokens": Lengths.of(prompts),
            "output_tokens": Lengths.of(outputs),
        }
        for name, (prompts, outputs) in trace.lengths_by_adapter().items()
    }


_Complete = Callable[[dict[str, Any], Callable[[str], str]], dict[str, Any]]


def read_adapters(
    path: Path, columns: Sequence[str], optional: Sequence[str], complete: _Complete
) -> list[AdapterFields]:
    """Read a CSV file of adapters, one per line; a rate that is not among ``columns`` is 0.

    `complete` returns the fields of an adapter as its folder completes them, which may give the rank. Its
    second argument returns the location of a key.
    """
    adapters: dict[str, AdapterFields] = {}
    for part in _adapter_cells(path, columns, optional):
        for line, cells in zip(part.index, part.to_dict("records"), strict=True):
            adapter = _adapter_of({str(name): cell for name, cell in cells.items()}, path, line, complete)
            if adapter.name in adapters:
                raise InputError("must be unique", adapter.name, f"{path}:{line}: name")
            adapters[adapter.name] = adapter
    if not adapters:
        raise InputError("must hold at least one adapter", location=str(path))
    return list(adapters.values())


def _adapter_cells(path: Path, columns: Sequence[str], optional: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Yield the cells of a table of adapters as text, numbers with decimal points."""
    names = (*columns, *optional)
    found: list[Header] = []

    def choose(header: Header) -> dict[str, int]:
        for name in header.names:
            if name and name.casefold() not in names:
                rule = unknown_key(name, names).replace("key", "column")
                raise InputError(rule, location=f"{path}:1: {name}")
        found.append(header)
        return header.choose(columns, optional)

    with open_unpacked(path) as file:
        most = input_limits().max_adapters
        limit = (most, beyond(most, "adapters", "--max-adapters"))
        for part in table_parts(path, file, choose, limit, names, text=names):
            for name in {"rank", "rate_rps"} & set(part.columns):
                part[name] = with_decimal_points(part[name], found[0], name)
            part.index += found[0].line + 1  # lines of the file
            yield part


def _adapter_of(cells: Mapping[str, str | None], path: Path, line: int, complete: _Complete) -> AdapterFields:
    data: dict[str, Any] = {"rate_rps": 0.0} | {
        name: text for name, text in cells.items() if isinstance(text, str)
    }
    for name in ("rank", "rate_rps"):
        if name in cells:
            cell = cells[name]
            value = parse_scalar(cell) if isinstance(cell, str) else None
            is_whole = name == "rank" and isinstance(value, float) and value.is_integer()
            data[name] = int(value) if is_whole and isinstance(value, float) else value
    data.setdefault("name", "")
    modules = data.get("target_modules", ALL_LINEAR)
    if modules not in (ALL_LINEAR, ADAPTER_CONFIG):
        data["target_modules"] = re.split(r"[\s,]+", modules)

    def locate(key: Key) -> str:
        return f"{path}:{line}: {key[0]}" if key else f"{path}:{line}"

    from_folder = {"rank": None} if data["rank"] is None else {}
    if modules == ADAPTER_CONFIG:
        from_folder["target_modules"] = data.pop("target_modules")
    placeholder = {"rank": 1} if "rank" in from_folder else {}
    given = validate_document(AdapterFields, data | placeholder, locate)
    if given.path is None and not from_folder:
        return given
    fields = complete(_fields(given, AdapterFields) | from_folder, lambda name: locate((name,)))
    return given.replace(**{name: fields[name] for name in ("rank", "path", "target_modules")})


def read_lengths(path: Path, column: str) -> Lengths:
    """Read one column of lengths as a histogram of exact values."""
    tokens = read_columns(path, (column,))[column].to_numpy()
    try:
        return Lengths.of(tokens)
    except InputError as error:
        raise InputError(error.rule, error.value, f"{path}: {column}") from None
