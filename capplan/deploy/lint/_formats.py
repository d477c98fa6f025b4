"""Findings as text, JSON, SARIF and annotations of GitHub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from capplan.deploy.lint._rule import Finding
from capplan.deploy.lint._rules import RULES
from capplan.version import installed_version

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
