"""Kinds of inputs, by their contents, and the parts that rules look at."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from capplan.deploy._running import served_by
from capplan.deploy.lint._commands import ENGINE, script_servers
from capplan.deploy.lint._objects import deployment_parts
from capplan.deploy.lint._parts import (
    AdapterFolder,
    BrokenFile,
    Part,
    PlanFile,
    RunningServer,
    TextFile,
    WorkloadFile,
)
from capplan.errors import InputError, redacted
from capplan.spec import ADAPTER_CONFIG, PeftFiles, Plan, local_folder, read_text

_URL: Final = re.compile(r"https?://", re.IGNORECASE)
_MOST_FILES: Final = 10_000
_UNDERSTOOD: Final = (
    "is not understood: must be a workload (YAML), a plan (JSON), an exported directory or a file of it, a "
    "file with a command line of vLLM or SGLang, a PEFT folder, or the URL of an OpenAI-compatible server"
)


def read_input(name: str | os.PathLike[str]) -> tuple[Part, ...]:
    """Return the parts of an input.

    Raises
    ------
    InputError
        If its kind is not known, or it cannot be read.
    """
    name = os.fspath(name)
    if _URL.match(name):
        return (RunningServer(file=redacted(name), served=served_by(name)),)
    path = Path(name)
    if path.is_dir():
        if (path / ADAPTER_CONFIG).is_file():
            return _loaded(name, "", _peft_folder)
        return tuple(_parts_of_folder(path))
    text = read_text(name)
    kind = _kind_of(text)
    parts = () if kind is None else _loaded(name, text, kind)
    if not parts:
        raise InputError(_UNDERSTOOD, location=name)
    return (*parts, TextFile(file=name, text=text))


def _parts_of_folder(folder: Path) -> Iterator[Part]:
    """Yield the parts of the files of an exported directory; texts of other kinds may hold secrets."""
    is_understood = False
    files = (path for pattern in ("*", "*/*") for path in sorted(folder.glob(pattern)) if path.is_file())
    for number, path in enumerate(files):
        if number == _MOST_FILES:
            raise InputError(f"must hold at most {_MOST_FILES} files", location=str(folder))
        try:
            text = read_text(path)
        except InputError:  # no text
            continue
        kind = _kind_of(text)
        parts = () if kind is None else _loaded(str(path), text, kind)
        is_understood |= bool(parts)
        yield from (*parts, TextFile(file=str(path), text=text))
    if not is_understood:
        raise InputError(_UNDERSTOOD, location=str(folder))


_Reader = Callable[[str, str], Iterator[Part]]


def _loaded(name: str, text: str, read: _Reader) -> tuple[Part, ...]:
    """Return the parts of a file; one that cannot be loaded is a part of its own."""
    try:
        return tuple(read(name, text))
    except InputError as error:
        line = re.match(rf"{re.escape(name)}:(\d+)", error.location)
        return (BrokenFile(file=name, line=int(line[1]) if line else None, error=error),)


def _plan(name: str, _: str) -> Iterator[Part]:
    yield PlanFile(file=name, plan=Plan.from_json(name))


def _workload(name: str, _: str) -> Iterator[Part]:
    from capplan.workload import load_workload  # reads tables of traces

    yield WorkloadFile(file=name, workload=load_workload(name))


def _peft_config(name: str, text: str) -> Iterator[Part]:
    yield from _peft_folder(str(Path(name).parent), text)


def _peft_folder(name: str, _: str) -> Iterator[Part]:
    folder = local_folder(name) or Path(name)  # as the paths of a plan
    yield AdapterFolder(file=name, folder=folder, found=PeftFiles.of(Path(name)).describe())


def _routing(name: str, _: str) -> Iterator[Part]:
    """Yield a part without rules: the routing table of an export, which follows from its plan."""
    yield Part(file=name)


_SIGNS: Final[tuple[tuple[re.Pattern[str], _Reader], ...]] = tuple(
    (re.compile(pattern, re.MULTILINE), reader)
    for pattern, reader in (
        (r'\A\s*\{(?s:.*)"plan_sha256"\s*:', _routing),
        (r'\A\s*\{(?s:.*)"(?:workload_digest|verification)"\s*:', _plan),
        (r'\A\s*\{(?s:.*)"peft_type"\s*:', _peft_config),
        (r'^[ \t{]*"?apiVersion"?[ \t]*:', deployment_parts),
        (r"^services\s*:", deployment_parts),
        (r"^servingEngineSpec\s*:", deployment_parts),
        (r"^(?:applications|llm_configs)\s*:(?s:.*)\bllm_configs\b|^llm_configs\s*:", deployment_parts),
        (r"^base_model\s*:", _workload),
        (ENGINE.pattern, script_servers),
    )
)
"""What the text of a kind contains, with its reader; the first one counts."""


def _kind_of(text: str) -> _Reader | None:
    """Return the reader of a text by its contents; None for an unknown kind."""
    return next((reader for pattern, reader in _SIGNS if pattern.search(text)), None)
