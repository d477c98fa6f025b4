"""Check inputs of deployments against the rules: kinds of inputs by their contents, formats of findings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from capplan.deploy._deployed import served_by
from capplan.deploy.lint._parts import (
    AdapterFolder,
    BrokenFile,
    Part,
    PlanFile,
    RunningServer,
    TextFile,
    WorkloadFile,
)
from capplan.deploy.lint._rule import Context, Finding, Rule
from capplan.deploy.lint._rules import RULES
from capplan.deploy.lint._schemas import Schemas, read_schemas
from capplan.deploy.lint._servers import ENGINE, deployment_parts, script_servers
from capplan.errors import InputError, printable, redacted
from capplan.spec import ADAPTER_CONFIG, PeftFiles, Plan, local_folder, read_text
from capplan.version import installed_version

_URL: Final = re.compile(r"https?://", re.IGNORECASE)
_MOST_FILES: Final = 10_000
_UNDERSTOOD: Final = (
    "is not understood: must be a workload (YAML), a plan (JSON), an exported directory or a file of it, a "
    "file with a command line of vLLM or SGLang, a PEFT folder, or the URL of an OpenAI-compatible server"
)


def read_input(name: str | os.PathLike[str]) -> tuple[Part, ...]:
    """Return the parts of an input; one of an unknown kind, or that cannot be read, is an error."""
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


def lint(
    *inputs: str | os.PathLike[str],
    plan: Plan | str | os.PathLike[str] | None = None,
    select: Iterable[str] | None = None,
    ignore: Iterable[str] = (),
    schemas: Iterable[str | os.PathLike[str]] = (),
) -> tuple[Finding, ...]:
    """Check workloads, plans, exported files, adapter folders and running servers.

    Parameters
    ----------
    *inputs : str or path
        Workload files, plans, exported directories or files of them, files with a command line of vLLM or
        SGLang, PEFT folders, and URLs of OpenAI-compatible servers. The contents decide the kind.
    plan : Plan or path, optional
        Plan that the other inputs are checked against; by default that of an exported directory.
    select, ignore : iterable of str
        Ids of the rules to check, all by default, and of those to leave out.
    schemas : iterable of path
        Files or folders with definitions of custom resources, as ``kubectl get crd -o yaml`` prints them, and
        with the ``values.schema.json`` of a chart: objects and values are checked against them.

    Returns
    -------
    tuple of Finding
        What is broken, by input, in the order of its parts and of the rules.

    Raises
    ------
    InputError
        If the kind of an input is not known, an input, the plan or a schema cannot be read, or an id is
        unknown.

    Examples
    --------
    >>> from capplan.deploy.lint import lint
    >>> lint("examples/chat-96/workload.yaml")
    ()
    """
    rules = _chosen(select, ignore)
    planned = plan if plan is None or isinstance(plan, Plan) else Plan.from_json(plan)
    paths = tuple(schemas)
    known = read_schemas(paths) if paths else None
    return tuple(found for each in inputs for found in _findings(read_input(each), planned, known, rules))


def _chosen(select: Iterable[str] | None, ignore: Iterable[str]) -> tuple[Rule[Any], ...]:
    """Return the rules with the ids to check."""
    known = [rule.id for rule in RULES]
    chosen, left_out = set(known if select is None else select), set(ignore)
    for each in sorted(chosen | left_out):
        if each not in known:
            raise InputError("must be the id of a rule, which `capplan lint --rules` lists", each, "rules")
    return tuple(rule for rule in RULES if rule.id in chosen - left_out)


def _findings(
    parts: tuple[Part, ...], plan: Plan | None, schemas: Schemas | None, rules: Iterable[Rule[Any]]
) -> Iterator[Finding]:
    exported = (part.plan for part in parts if isinstance(part, PlanFile))
    context = Context(parts, plan or next(exported, None), schemas)
    applied = list(rules)
    for part in parts:
        for rule in applied:
            if isinstance(part, rule.on):
                for hit in rule.check(part, context):
                    line = part.line if hit.line is None else hit.line
                    reason = printable(" ".join(hit.reason.split()))
                    yield Finding(part.file, line, rule.level, rule.id, reason, rule.fix, rule.anchor)


Format: TypeAlias = Callable[[Sequence[Finding]], str]

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def _text(findings: Sequence[Finding]) -> str:
    """Return a line per finding."""
    return "\n".join(f"{_place(each)}: {each.level} {each.id} {each.reason}; {each.fix}" for each in findings)


def _place(finding: Finding) -> str:
    return finding.file if finding.line is None else f"{finding.file}:{finding.line}"


def _json(findings: Sequence[Finding]) -> str:
    """Return a list of objects."""
    return json.dumps([asdict(each) for each in findings], indent=2, ensure_ascii=False)


def _github(findings: Sequence[Finding]) -> str:
    """Return workflow commands of GitHub, which annotate lines of files."""
    return "\n".join(map(_annotation, findings))


def _annotation(finding: Finding) -> str:
    at = {"file": finding.file, "line": finding.line, "title": finding.id}
    properties = ",".join(f"{key}={_property(str(value))}" for key, value in at.items() if value is not None)
    return f"::{finding.level} {properties}::{_data(f'{finding.reason}; {finding.fix}')}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _sarif(findings: Sequence[Finding]) -> str:
    """Return a log in SARIF 2.1.0."""
    driver = {"name": "capplan", "version": installed_version(), "rules": _sarif_rules()}
    run = {"tool": {"driver": driver}, "results": [_sarif_result(each) for each in findings]}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False)


def _sarif_rules() -> list[dict[str, Any]]:
    return [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.title},
            "help": {"text": f"{rule.fix}; {rule.anchor}"},
            "defaultConfiguration": {"level": rule.level},
        }
        for rule in RULES
    ]


def _sarif_result(finding: Finding) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": quote(finding.file, safe="/:")}}
    if finding.line is not None:
        place["region"] = {"startLine": finding.line}
    return {
        "ruleId": finding.id,
        "ruleIndex": [rule.id for rule in RULES].index(finding.id),
        "level": finding.level,
        "message": {"text": f"{finding.reason}; {finding.fix}"},
        "locations": [{"physicalLocation": place}],
    }


FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {"text": _text, "json": _json, "sarif": _sarif, "github": _github}
)
"""Functions of findings that return a text, by name."""
