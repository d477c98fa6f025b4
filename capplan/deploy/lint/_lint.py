"""Check inputs of deployments against the rules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from capplan.deploy.lint._inputs import read_input
from capplan.deploy.lint._parts import Part, PlanFile
from capplan.deploy.lint._rule import Context, Finding, Rule
from capplan.deploy.lint._rules import RULES
from capplan.deploy.lint._schemas import Schemas, read_schemas
from capplan.errors import InputError, printable
from capplan.spec import Plan


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
