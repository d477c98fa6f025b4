"""`capplan observe`: from logs and metrics to a workload file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli.options import AsJson, Quiet, command
from capplan.cli.output import require_writable_files
from capplan.errors import InputError
from capplan.observe import DEFAULT_MEMORY_BYTES, MOST_ADAPTERS
from capplan.reports import Table, counted, number, percent, print_json, print_table
from capplan.reports.tables import FIT_HEAD, fit_cells
from capplan.spec import write_text_atomic

if TYPE_CHECKING:
    from capplan.observe import FitReport, Observation

_MIB = 2**20
_OPTIONS = {
    each: each.replace("_", "-")
    for each in ("map", "time_unit", "timezone", "window", "scale", "ranks", "adapters", "max_adapters")
}
"""Options by the names of parameters in errors."""


@dataclass(frozen=True, kw_only=True)
class ObserveArgs:
    """Options of `capplan observe`."""

    source: str = typer.Argument(
        ..., metavar="SOURCE", help="Log, trace or result of a load test; or a URL of metrics."
    )
    output: str = typer.Option(..., "--output", "-o", metavar="FILE", help="Workload file to write (YAML).")
    base_model: str = typer.Option(..., metavar="ID", help="Hugging Face id of the base model.")
    profile: str = typer.Option(
        ..., metavar="NAME", help="Profile of the workload; `capplan profiles` lists them."
    )
    columns: list[str] | None = typer.Option(
        None,
        "--map",
        metavar="WHAT=COLUMN",
        help="Column of timestamp, prompt_tokens, output_tokens, adapter, status, error or hash_ids, instead "
        "of the guessed one; WHAT= for none. Repeatable.",
    )
    time_unit: str | None = typer.Option(
        None, metavar="UNIT", help="Of times that are numbers: s, ms, us, ns."
    )
    timezone: str = typer.Option(
        "UTC", metavar="ZONE", help="Of dates that state none, such as Europe/Berlin."
    )
    window: str | None = typer.Option(
        None, metavar="SPAN", help="The last hours, such as 24h, or START..END; default: everything."
    )
    scale: float = typer.Option(1.0, metavar="FACTOR", help="Multiply all rates.")
    adapters: str | None = typer.Option(
        None, metavar="FOLDER", help="Folder with a PEFT folder per adapter, which have the ranks."
    )
    ranks: str | None = typer.Option(None, metavar="FILE", help="CSV with name, rank and optionally path.")
    rank: int | None = typer.Option(None, metavar="N", min=1, max=512, help="Rank of all other adapters.")
    base_aliases: list[str] | None = typer.Option(
        None, "--base-alias", metavar="NAME", help="Another name of the base model in the log. Repeatable."
    )
    strip_prefix: str = typer.Option(
        "", metavar="TEXT", help="Beginning of names to leave out, such as hosted_vllm/ of a gateway."
    )
    most_adapters: int = typer.Option(
        MOST_ADAPTERS,
        "--max-adapters",
        metavar="N",
        min=1,
        help="Adapters one by one; the others become a class.",
    )
    memory_mib: int = typer.Option(
        DEFAULT_MEMORY_BYTES // _MIB, "--memory", metavar="MIB", min=128, help="Memory to read the log with."
    )
    for_s: float = typer.Option(
        60.0, "--for", metavar="SECONDS", help="Between two scrapes of a server's metrics."
    )
    html: str | None = typer.Option(None, metavar="FILE", help="Write the comparison as an HTML page.")
    as_json: AsJson = False
    quiet: Quiet = False


@command
def observe(args: ObserveArgs) -> None:
    """Observe traffic, write it as a workload, and compare the workload with what was observed.

    SOURCE is an access log (CSV, JSON lines or Parquet, packed or not), a published trace, the result of a
    load test, the /metrics of a server, or the URL of a Prometheus server. For the comparison, requests are
    drawn from the workload.
    """
    from capplan.observe import fit_report

    require_writable_files(args.output, args.html)
    try:
        found = _observed(args)
    except InputError as error:
        head, colon, rest = error.location.partition(":")
        if head not in _OPTIONS:
            raise
        raise InputError(error.rule, error.value, f"--{_OPTIONS[head]}{colon}{rest}") from None
    written = found.write(Path(args.output))
    report = fit_report(found, written[0])
    if args.html is not None:
        from capplan.reports.pages import observation_page

        write_text_atomic(args.html, observation_page(found, report))
    if args.as_json:
        print_json(_document(found, report, written))
    elif not args.quiet:
        _show(found, report, written)


def _observed(args: ObserveArgs) -> Observation:
    from capplan.observe import observe as observed

    return observed(
        args.source,
        base_model=args.base_model,
        columns=_mapping(args.columns or ()),
        time_unit=_unit(args.time_unit),
        timezone=args.timezone,
        window=args.window,
        scale=args.scale,
        profile=args.profile,
        adapters=args.adapters,
        ranks=args.ranks,
        rank=args.rank,
        base_aliases=args.base_aliases or (),
        strip_prefix=args.strip_prefix,
        most_adapters=args.most_adapters,
        memory_bytes=args.memory_mib * _MIB,
        for_s=args.for_s,
    )


def _mapping(given: Iterable[str]) -> dict[str, str]:
    """Return the columns of ``--map``."""
    found = {}
    for pair in given:
        what, equals, column = pair.partition("=")
        if not equals:
            raise InputError("must be WHAT=COLUMN, such as timestamp=created_at", pair, "--map")
        found[what.strip()] = column
    return found


def _unit(given: str | None) -> str | None:
    if given not in (None, "s", "ms", "us", "ns"):
        raise InputError("must be s, ms, us or ns", given, "--time-unit")
    return given


def _show(found: Observation, report: FitReport, written: Sequence[Path]) -> None:
    start = "" if found.start is None else f" from {found.start:%Y-%m-%d %H:%M:%S} UTC"
    typer.echo(
        f"{found.requests:,} requests of {counted(_requested(found), 'adapter')} in "
        f"{found.duration_s / 3600:,.4g} h{start}: {number(found.rate_rps, 3)} req/s"
    )
    for line in (*found.columns, *found.notes):
        typer.echo(f"- {line}")
    for each in found.dropped:
        typer.echo(f"- not used, {counted(each.rows, 'row')}: {each.reason}{each.like}")
    for line in found.warnings:
        typer.echo(f"warning: {line}")
    print_table(Table(FIT_HEAD, [fit_cells(row) for row in report.rows]))
    typer.echo(
        f"hours: at most {percent(report.worst('hours'))} off; shares of the {len(report.shares)} most "
        f"popular adapters: at most {percent(report.worst('shares'))}"
    )
    typer.echo(f"{' and '.join(map(str, written))} written")


def _requested(found: Observation) -> int:
    """Return the number of adapters with a request."""
    tail = 0 if found.tail is None else found.tail.adapters
    return sum(each.requests > 0 for each in found.adapters) + tail


def _document(found: Observation, report: FitReport, written: Sequence[Path]) -> dict[str, Any]:
    tail = None if found.tail is None else asdict(found.tail)
    return {
        "source": found.source,
        "columns": list(found.columns),
        "rows": found.rows,
        "requests": found.requests,
        "dropped": [asdict(each) for each in found.dropped],
        "start": None if found.start is None else found.start.isoformat(),
        "duration_s": found.duration_s,
        "rate_rps": found.rate_rps,
        "base_rate_rps": found.base_rate_rps,
        "gap_cv": found.gap_cv,
        "prefix_hit_share": found.prefix_hit_share,
        "shared_prefix_tokens": found.shared_prefix_tokens,
        "adapters": [
            {"name": a.name, "requests": a.requests, "rate_rps": a.rate_rps, "rank": a.rank}
            for a in found.adapters
        ],
        "tail": tail,
        "warnings": list(found.warnings),
        "notes": list(found.notes),
        "fit": report.as_dict(),
        "files": [str(path) for path in written],
    }
