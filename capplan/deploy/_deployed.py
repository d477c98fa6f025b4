"""What is deployed: running servers, files of an earlier export, and how they differ from a plan."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from capplan.errors import InputError
from capplan.spec import Group, Plan, parse_json, read_text

_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 2**26
_SLOTS: Final = (
    re.compile(r'^vllm:lora_requests_info\{[^}]*\bmax_lora="(\d+)"', re.MULTILINE),
    re.compile(r"^sglang:lora_pool_slots_total(?:\{[^}]*\})? (\d+)", re.MULTILINE),
)


@dataclass(frozen=True)
class Served:
    """What a running server serves: names of all models, and names and paths of those that are no adapters.

    `max_loras` are the adapter slots by its metrics; None: not stated.
    """

    models: frozenset[str]
    base_models: frozenset[str]
    max_loras: int | None

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the models that are adapters."""
        return self.models - self.base_models

    def serves_base(self, base_model: str) -> bool:
        """Tell whether a base model is served; folders of models have its name."""
        return _last_part(base_model) in map(_last_part, self.base_models)


def served_by(url: str) -> Served:
    """Return what a server says of itself in ``/v1/models`` and, if it has them, its metrics."""
    base = url.rstrip("/").removesuffix("/v1")
    models = _models(f"{base}/v1/models")
    try:
        metrics = _fetched(f"{base}/metrics")
    except InputError:  # not every server has metrics
        metrics = ""
    slots = (int(found[1]) for pattern in _SLOTS if (found := pattern.search(metrics)))
    without_parent = [each for each in models if each.get("parent") is None]
    return Served(
        models=frozenset(str(each.get("id")) for each in models),
        base_models=frozenset(
            str(each[key]) for each in without_parent for key in ("id", "root") if each.get(key)
        ),
        max_loras=next(slots, None),
    )


def _models(url: str) -> list[Mapping[str, Any]]:
    rule = "is not understood: a URL must be that of an OpenAI-compatible server, with /v1/models"
    try:
        document = parse_json(_fetched(url), url)
    except InputError as error:
        if "cannot be reached" in error.rule:
            raise
        raise InputError(rule, location=url) from None
    data = document.get("data") if isinstance(document, Mapping) else None
    if not isinstance(data, list):
        raise InputError(rule, location=url)
    return [each for each in data if isinstance(each, Mapping)]


def _fetched(url: str) -> str:
    try:
        with urlopen(Request(url, headers={"Accept": "*/*"}), timeout=_TIMEOUT_S) as answer:  # noqa: S310 - http
            content: bytes = answer.read(_MAX_BYTES + 1)
    except HTTPError as error:
        raise InputError(f"must answer, and its status is {error.code}", location=url) from None
    except (URLError, OSError, ValueError) as error:
        raise InputError(f"cannot be reached: {getattr(error, 'reason', error)}", location=url) from None
    if len(content) > _MAX_BYTES:
        raise InputError(f"must answer with at most {_MAX_BYTES >> 20} MiB", location=url)
    return content.decode("utf-8", errors="replace")


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def diff_files(files: Mapping[str, str], folder: str | os.PathLike[str]) -> str:
    """Return the changes from the files of a folder to those of an export, as a unified diff.

    Parameters
    ----------
    files : mapping of str to str
        Files of `capplan.deploy.export`, text by path.
    folder : str or path
        Folder of an earlier export. Its other files are left out, but for those below folders of the export.

    Returns
    -------
    str
        Empty if nothing changes.

    Raises
    ------
    InputError
        If the folder, or a file of it, cannot be read.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError("must be a folder of an earlier export", location=str(folder))
    shared = {Path(name).parts[0] for name in files if len(Path(name).parts) > 1}
    old = {
        str(path.relative_to(root)): path
        for top in sorted(shared)
        for path in sorted((root / top).rglob("*"))
        if path.is_file()
    }
    old |= {name: root / name for name in files if (root / name).is_file()}
    return "".join(_changes(old, files))


def _changes(old: Mapping[str, Path], new: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        before = read_text(old[name]).splitlines(keepends=True) if name in old else []
        after = new.get(name, "").splitlines(keepends=True)
        names = (f"deployed/{name}" if name in old else "/dev/null", name if name in new else "/dev/null")
        for line in unified_diff(before, after, *names):
            yield line if line.endswith("\n") else f"{line}\n"


def diff_server(plan: Plan, url: str) -> tuple[str, ...]:
    """Return what changes from a running server to a plan, a line each.

    The server is compared with the group whose adapters are most like its own, or with the whole plan, as
    the gateway of all groups serves it.

    Parameters
    ----------
    plan : Plan
        The plan.
    url : str
        Address of an OpenAI-compatible server.

    Returns
    -------
    tuple of str
        Lines that begin with ``-`` for what is served and not planned, and with ``+`` for the opposite;
        empty if nothing changes.

    Raises
    ------
    InputError
        If the server cannot be reached or understood.
    """
    served = served_by(url)
    planned: list[tuple[Group | None, set[str]]] = [
        (group, {adapter.name for adapter in group.adapters}) for group in plan.groups
    ]
    if len(plan.groups) > 1:
        planned.append((None, set(plan.adapters)))
    group, adapters = min(planned, key=lambda each: len(each[1] ^ served.adapters))
    changes = [*_lines(served, plan, group, adapters)]
    where = "the whole plan" if group is None else f"group {group.id}"
    return (f"--- {url}", f"+++ {where}", *changes) if changes else ()


def _lines(served: Served, plan: Plan, group: Group | None, adapters: set[str]) -> Iterator[str]:
    if not served.serves_base(plan.base_model):
        yield f"-base model {', '.join(sorted(served.base_models)) or 'not stated'}"
        yield f"+base model {plan.base_model}"
    if group is not None and served.max_loras not in (None, group.engine_args.max_loras):
        yield f"-max_loras {served.max_loras}"
        yield f"+max_loras {group.engine_args.max_loras}"
    yield from (f"-adapter {name}" for name in sorted(served.adapters - adapters))
    yield from (f"+adapter {name}" for name in sorted(adapters - served.adapters))
