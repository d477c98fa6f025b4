"""`capplan surrogate`: the small trees of a profile as rules, drawings or source code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

from capplan.cli.options import AsJson, KnownProfile, command
from capplan.cli.output import require_writable_files
from capplan.errors import InputError
from capplan.reports import Table, counted, percent, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from capplan.models.surrogates import DecisionRule, Tree

_TARGETS: Final = ("throughput", "starvation", "both")


@dataclass(frozen=True, kw_only=True)
class RulesArgs:
    """Options of `capplan surrogate rules`."""

    profile: KnownProfile
    target: str = typer.Option("both", metavar="NAME", help="Rules of throughput, starvation, or both.")
    svg: str | None = typer.Option(None, metavar="FILE", help="Also draw the trees, as one SVG file.")
    as_python: bool = typer.Option(
        False, "--python", help="Print the source of the functions that are compiled."
    )
    as_json: AsJson = False


@command
def rules(args: RulesArgs) -> None:
    """Print the decision rules of a profile's small trees, those that cover most first."""
    from capplan.models.surrogates import export_svg
    from capplan.spec import write_text_atomic

    if args.target not in _TARGETS:
        raise InputError(f"must be one of {', '.join(_TARGETS)}", args.target, "--target")
    if args.as_python and args.as_json:
        raise InputError("does not go with --json", location="--python")
    require_writable_files(args.svg)
    trees = _trees(args.profile)
    if args.target != "both":
        trees = {args.target: trees[args.target]}
    if args.svg is not None:
        titled = [(f"{name} of {args.profile}: {counted(t.rules, 'rule')}", t) for name, t in trees.items()]
        write_text_atomic(args.svg, export_svg(titled))
    if args.as_python:
        _print_python(trees)
    elif args.as_json:
        print_json({name: _document(tree) for name, tree in trees.items()})
    else:
        for name, tree in trees.items():
            _print_rules(name, tree)
    if args.svg is not None and not (args.as_python or args.as_json):
        typer.echo(f"drawn to {args.svg}")


def _trees(profile: str) -> dict[str, Tree]:
    from capplan.models.surrogates import load_surrogate

    small = load_surrogate(profile, kind="tree")
    trees = {"throughput": small.throughput_tree, "starvation": small.starvation_tree}
    return {name: tree for name, tree in trees.items() if tree is not None}


def _print_python(trees: Mapping[str, Tree]) -> None:
    from capplan.models.surrogates import export_python

    sources = [export_python(tree, name) for name, tree in trees.items()]
    typer.echo("\n\n".join(sources), nl=False)


def _print_rules(name: str, tree: Tree) -> None:
    from capplan.models.surrogates import EXPECTED, LOG_OVER_EXPECTED, decision_rules

    typer.echo(f"{name}: {counted(tree.rules, 'rule')}, at most {counted(tree.depth, 'question')} deep")
    if tree.answer == LOG_OVER_EXPECTED:
        typer.echo(EXPECTED)
    rows = [(percent(rule.share), rule.text) for rule in decision_rules(tree)]
    print_table(Table(("covers", "rule"), rows, numbers_from=None))


def _document(tree: Tree) -> dict[str, Any]:
    from capplan.models.surrogates import decision_rules

    return {"rules": [_rule(rule) for rule in decision_rules(tree)], "tree": tree.to_document()}


def _rule(rule: DecisionRule) -> dict[str, Any]:
    """Return a rule as JSON data; an open end of a condition is null."""
    return {
        "conditions": [
            {"feature": each.feature, "above": each.low, "at_most": each.high} for each in rule.conditions
        ],
        "answer": rule.answer,
        "value": rule.value,
        "share_of_scenarios": rule.share,
        "text": rule.text,
    }
