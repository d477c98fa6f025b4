"""From workload.yaml, and the files it names, to a self-contained Workload."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capplan.errors import InputError
from capplan.spec.base import Key, SpecModel, checked
from capplan.spec.lengths import Lengths
from capplan.spec.tables import read_adapters, read_lengths
from capplan.spec.trace import Trace
from capplan.spec.trace_files import read_trace
from capplan.spec.workload import AdapterFields, PlanningWishes, Workload, is_profile_path
from capplan.spec.workload_file import AdapterEntry, LengthsFile, TraceEntry, WorkloadFile
from capplan.spec.yaml_source import read_yaml

_LENGTHS = ("prompt_tokens", "output_tokens")


def load_workload(path: str | os.PathLike[str]) -> Workload:
    """Read a workload file.

    Files named in it (adapters, traces, lengths, profiles, the previous plan) are relative to its folder.

    Raises
    ------
    InputError
        For the first broken rule, as ``FILE:LINE: key: rule (got VALUE)``.
    """
    source = read_yaml(os.fspath(path))
    file = checked(WorkloadFile, source.data, source.locate)
    reader = _Reader(Path(path).parent)
    wishes = reader.wishes(file)
    if file.trace is not None:
        adapters, requests = reader.traced(file.trace)
    else:
        adapters = (
            reader.table(file.adapters) if isinstance(file.adapters, str) else reader.listed(file.adapters)
        )
        requests = {name: reader.lengths(getattr(file.requests, name)) for name in _LENGTHS}
    document = {
        **wishes,
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

    return checked(Workload, document, locate)


@dataclass(frozen=True)
class _Placed:
    """Fields of an adapter, and the key of the entry of the file they come from."""

    fields: dict[str, Any]
    key: Key


@dataclass(frozen=True)
class _Reader:
    folder: Path

    def wishes(self, file: WorkloadFile) -> dict[str, Any]:
        """Return the planning wishes, paths resolved."""
        wishes = _fields(file, PlanningWishes)
        wishes["profile"] = self._profile(file.profile)
        wishes["pools"] = [pool.replace(profile=self._profile(pool.profile)) for pool in file.pools]
        wishes["previous_plan"] = file.previous_plan and str(self.folder / file.previous_plan)
        return wishes

    def listed(self, entries: Sequence[AdapterEntry] | None) -> list[_Placed]:
        """Return the adapters that the entries of the list stand for."""
        placed = []
        for index, entry in enumerate(entries or ()):
            key = ("adapters", index)
            fields = _fields(entry, AdapterFields)
            fields |= {name: self.lengths(getattr(entry, name)) for name in _LENGTHS}
            for i, rate_rps in enumerate(entry.rates_rps()):
                numbered = fields if entry.count is None else _numbered(fields, i)
                placed.append(_Placed(numbered | {"rate_rps": rate_rps}, key))
        return placed

    def table(self, name: str) -> list[_Placed]:
        """Return the adapters of a CSV file."""
        path = self.folder / name
        adapters = read_adapters(path, ("name", "rank", "rate_rps"), ("path",))
        return [_Placed(_fields(adapter, AdapterFields), ("adapters",)) for adapter in adapters]

    def traced(self, entry: TraceEntry) -> tuple[list[_Placed], dict[str, Any]]:
        """Return the adapters of a trace, with the rates and lengths seen in it, and the common fields."""
        trace = read_trace(self.folder / entry.file, entry.duration_s)
        path = self.folder / entry.ranks
        ranked = read_adapters(path, ("name", "rank"), ("path",))
        unranked = set(trace.names) - {adapter.name for adapter in ranked}
        if unranked:
            raise InputError(
                "must give a rank for every adapter of the trace", min(unranked), f"{path}: name"
            )
        seen = _seen(trace)
        fields = [_fields(adapter, AdapterFields) | seen.get(adapter.name, {}) for adapter in ranked]
        common = {name: Lengths.of(getattr(trace, name)) for name in _LENGTHS}
        return [_Placed(each, ("trace", "ranks")) for each in fields], {**common, "trace": trace}

    def lengths(self, source: Lengths | LengthsFile | None) -> Lengths | None:
        """Return lengths as they are, or as a file holds them."""
        if isinstance(source, LengthsFile):
            return read_lengths(self.folder / source.file, source.column)
        return source

    def _profile(self, profile: str | None) -> str | None:
        if profile is None or not is_profile_path(profile):
            return profile
        path = str(self.folder / profile)
        return (
            path if is_profile_path(path) else f"./{path}"
        )  # pathlib drops a leading ./, which tells it from a name


def _fields(model: SpecModel, like: type[SpecModel]) -> dict[str, Any]:
    """Return the values of the fields that ``model`` shares with the class ``like``."""
    return {name: getattr(model, name) for name in like.model_fields}


def _numbered(fields: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the fields with ``{i}`` replaced in every text."""

    def fill(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(fill(item) for item in value)
        return value.replace("{i}", str(number)) if isinstance(value, str) else value

    return {name: fill(value) for name, value in fields.items()}


def _seen(trace: Trace) -> dict[str, dict[str, Any]]:
    """Return, for each adapter of the trace, its rate and its lengths."""
    return {
        name: {
            "rate_rps": len(prompts) / trace.duration_s,
            "prompt_tokens": Lengths.of(prompts),
            "output_tokens": Lengths.of(outputs),
        }
        for name, (prompts, outputs) in trace.lengths_by_adapter().items()
    }
