"""`capplan lint`: findings in what is deployed, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import typer

from capplan.cli.options import FAILED, command, names
from capplan.deploy.lint import FORMATS, RULES, Finding
from capplan.deploy.lint import lint as findings_of
from capplan.errors import InputError
from capplan.reports import Table, counted, print_table


@dataclass(frozen=True, kw_only=True)
class LintArgs:
    """Options of `capplan lint`."""

    files: list[str] | None = typer.Argument(
        None,
        metavar="[FILE ...]",
        help="Workload, plan, exported directory or file of it, file with a command line of vLLM or SGLang, "
        "PEFT folder, or URL of a running server.",
    )
    plan: str | None = typer.Option(None, metavar="PLAN", help="Plan to check the files against.")
    schemas: list[str] | None = typer.Option(
        None,
        metavar="PATH",
        help="CustomResourceDefinitions (kubectl get crd -o yaml), values.schema.json of a chart, or folder "
        "of such files, by which objects must be valid; repeatable.",
    )
    format: str = typer.Option("text", metavar="NAME", help=f"Output: {', '.join(FORMATS)}.")
    strict: bool = typer.Option(False, "--strict", help="Exit with 1 for warnings too.")
    select: str | None = typer.Option(None, metavar="ID,...", help="Check these rules alone.")
    ignore: str | None = typer.Option(None, metavar="ID,...", help="Leave these rules out.")
    rules: bool = typer.Option(False, "--rules", help="List the rules and stop.")


@command
def lint(args: LintArgs) -> None:
    """Check workloads, plans, exports, adapter folders and running servers for known mistakes.

    Exit status: 0 no errors, 1 errors, 2 a file that is not understood.
    """
    if args.rules:
        rows = [(rule.id, rule.level, rule.title) for rule in RULES]
        print_table(Table(("rule", "level", "finding"), rows, numbers_from=None))
        return
    if not args.files:
        raise InputError("is required, or --rules", location="FILE")
    if args.format not in FORMATS:
        raise InputError(f"must be one of {', '.join(FORMATS)}", args.format, "--format")
    select = None if args.select is None else names(args.select, "--select")
    ignore = () if args.ignore is None else names(args.ignore, "--ignore")
    found = findings_of(*args.files, plan=args.plan, select=select, ignore=ignore, schemas=args.schemas or ())
    if text := FORMATS[args.format](found):
        typer.echo(text)
    if args.format == "text":
        typer.echo(_summary(found, len(args.files)), err=True)
    if any(each.level == "error" or args.strict for each in found):
        raise typer.Exit(FAILED)


def _summary(found: Sequence[Finding], files: int) -> str:
    errors = sum(each.level == "error" for each in found)
    numbers = f"{counted(errors, 'error')} and {counted(len(found) - errors, 'warning')}"
    return f"{numbers} in {counted(files, 'input')}"
