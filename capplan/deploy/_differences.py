"""What is deployed otherwise than a plan: files of an earlier export, and running servers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from pathlib import Path

from capplan.deploy._running import Served, served_by
from capplan.errors import InputError
from capplan.spec import Group, Plan, read_text


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
