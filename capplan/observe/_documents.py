"""Records of requests inside one JSON document, as load tests write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from capplan.errors import InputError

_COLUMNS: Final = ("start_times", "input_lens", "output_lens")
"""Lists of ``vllm bench serve --save-result --save-detailed``, one item per request."""


def records_of(document: Any, path: Path) -> tuple[list[Mapping[str, Any]], str]:
    """Return the requests of a document, and a note on where they are.

    They are the items of the document itself, its columns (``vllm bench serve``), or its longest list of
    objects, joined over lists of the same path, such as GuideLLM's ``benchmarks.requests.successful``.

    Raises
    ------
    InputError
        If it holds none.
    """
    if isinstance(document, dict) and any(isinstance(document.get(name), list) for name in _COLUMNS):
        return _of_columns(document, path), ""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for where, records in _lists(document, ""):
        found.setdefault(where, []).extend(records)
    if not found:
        if isinstance(document, dict):
            return [document], ""
        raise InputError("must hold records of requests", location=str(path))
    where = max(found, key=lambda name: len(found[name]))
    return found[where], f"requests are those of {where}" if where else ""


def _of_columns(document: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    for name in _COLUMNS:
        if not isinstance(document.get(name), list):
            rule = (
                "is required: run vllm bench serve of vLLM 0.15 or later with --save-result --save-detailed"
            )
            raise InputError(rule, location=f"{path}: {name}")
    count = len(document["start_times"])
    columns = {
        name: values for name, values in document.items() if isinstance(values, list) and len(values) == count
    }
    keys = [name for name in columns if name in (*_COLUMNS, "lora_modules", "errors")]
    return [{name: columns[name][row] for name in keys} for row in range(count)]


def _lists(value: Any, where: str) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield every list of objects with its path, positions left out."""
    if isinstance(value, list):
        records: list[Mapping[str, Any]] = [each for each in value if isinstance(each, dict)]
        if records and len(records) == len(value):
            yield where, records
        for each in value:
            yield from _lists(each, where)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _lists(each, f"{where}.{key}".lstrip("."))
