"""`capplan bench`: load test of a running server with the requests of a workload."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from capplan.cli import options
from capplan.cli.output import require_writable_files
from capplan.cli.progress import load_progress
from capplan.errors import InputError
from capplan.interrupt import INTERRUPTED
from capplan.reports import print_json, print_table
from capplan.reports.tables import adapter_table, doubts, facts_table, latency_table, warnings
from capplan.spec import parse_json

if TYPE_CHECKING:
    from capplan.profiling.load import BenchResult, RequestFile
    from capplan.spec import Profile, Slo, Workload


@dataclass(frozen=True, kw_only=True)
class BenchArgs:
    """Options of `capplan bench`."""

    workload: str | None = typer.Argument(
        None, metavar="WORKLOAD", help="Workload file (YAML).", show_default=False
    )
    url: str | None = typer.Option(None, metavar="URL", help="Where the server listens, with or without /v1.")
    read: str | None = typer.Option(
        None, metavar="FILE", help="Show a result, or a file of vllm bench serve, instead."
    )
    duration_s: float = typer.Option(
        60.0, "--duration", metavar="SECONDS", help="Length of the measured window."
    )
    warm_up_s: float = typer.Option(0.0, metavar="SECONDS", help="Load before the window.")
    seed: int = typer.Option(0, metavar="N", min=0, help="Same seed, same requests as `simulate`.")
    rate_scale: float = typer.Option(1.0, metavar="FACTOR", help="Multiplies every rate.")
    api_key: options.ApiKey = None
    adapters_map: list[str] | None = typer.Option(
        None, metavar="NAME=MODEL", help="Model name of an adapter on the server; repeatable."
    )
    max_in_flight: int | None = typer.Option(
        None, metavar="N", min=1, help="Reject requests beyond this many."
    )
    timeout_s: float = typer.Option(
        600.0, "--request-timeout", metavar="SECONDS", help="Longest time of one request."
    )
    drain_s: float = typer.Option(30.0, metavar="SECONDS", help="Wait for answers after the window.")
    metrics_interval_s: float = typer.Option(
        0.0, metavar="SECONDS", help="Pause between scrapes of /metrics."
    )
    profile: str | None = typer.Option(
        None, metavar="NAME", help="Profile with the correlation of lengths; default: the workload's."
    )
    max_model_len: int | None = typer.Option(None, metavar="N", min=2, help="Limit of lengths, in tokens.")
    prompt_form: str | None = typer.Option(
        None, metavar="FORM", help="ids, toy-ids or text; default: the first that the server accepts."
    )
    extra_body: str | None = typer.Option(None, metavar="JSON", help="Additional fields of every request.")
    output: options.ResultFile = None
    requests_out: options.RequestsFile = None
    html: options.HtmlFile = None
    vllm_json: str | None = typer.Option(
        None, metavar="FILE", help="Also write the result in the format of `vllm bench serve`."
    )
    as_json: options.AsJson = False


@options.command
def bench(args: BenchArgs) -> None:
    """Load an OpenAI-compatible server with the requests of a workload, at their arrival times.

    Exit status 1: requests failed, none was answered, or this client could not keep up.
    """
    if args.read is not None:
        if args.workload is not None or args.url is not None:
            raise InputError("must be the only input: nothing is sent", args.read, "--read")
        from capplan.profiling.load import read_result

        require_writable_files(args.output)
        result = read_result(args.read)
        if args.output is not None:
            result.to_json(args.output)
    else:
        result = _measured(args)
    print_json(result.model_dump(mode="json")) if args.as_json else show(result)
    problems = warnings(result)
    for line in (*problems, *doubts(result)):
        typer.echo(line, err=True)
    if result.partial:
        raise typer.Exit(INTERRUPTED)
    if problems:
        raise typer.Exit(options.FAILED)


def _measured(args: BenchArgs) -> BenchResult:
    if args.workload is None or args.url is None:
        missing = "WORKLOAD" if args.workload is None else "--url"
        raise InputError("is required, unless a result is read (--read)", location=missing)
    options.require_extra("bench", ("httptools",))
    from capplan.processes import raise_file_limit
    from capplan.profiling.load import BenchOptions, LoadSettings, PromptForm, Target
    from capplan.profiling.load import bench as measure
    from capplan.workload import load_workload

    require_writable_files(args.output, args.requests_out, args.html, args.vllm_json)
    workload = load_workload(args.workload)
    names, fields = _names(args.adapters_map, workload), _fields(args.extra_body)
    form = None if args.prompt_form is None else options.member(PromptForm, args.prompt_form, "--prompt-form")
    wanted = options.fill(BenchOptions, args, profile=_profile(workload, args.profile), prompt_form=form)
    base_model = names.pop(workload.base_model, None)
    target = Target(args.url, args.api_key, base_model, names, fields)
    raise_file_limit()
    with _request_file(args.requests_out, needed=bool(args.vllm_json or args.html)) as file:
        with load_progress(quiet=args.as_json) as on_tick:
            load = options.fill(LoadSettings, args)
            result = measure(workload, target, load, wanted, file=file, on_tick=on_tick)
        _write(args, result, file, workload.slo)
    return result


@contextmanager
def _request_file(path: str | None, *, needed: bool) -> Iterator[RequestFile | None]:
    """Open the file of requests; a temporary one if only the other outputs need it."""
    from capplan.profiling.load import RequestFile

    if path is None and not needed:
        yield None
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        RequestFile(path or Path(folder) / "requests.parquet") as file,
    ):
        yield file


def _write(args: BenchArgs, result: BenchResult, file: RequestFile | None, slo: Slo) -> None:
    from capplan.spec import write_text_atomic

    if args.output is not None:
        result.to_json(args.output)
    if file is None:
        return
    rows = file.finished()
    if args.vllm_json is not None:
        from capplan.profiling.load import write_vllm_bench

        write_vllm_bench(args.vllm_json, result, rows)
    if args.html is not None:
        from capplan.reports.pages import bench_page

        bounds = slo.latency_bounds()
        write_text_atomic(args.html, bench_page(str(args.workload), result, rows, bounds))
    if args.requests_out is not None:
        file.keep()


def _names(given: list[str] | None, workload: Workload) -> dict[str, str]:
    """Return the names on the server of adapters, or of the base model, that have another one there."""
    known = {workload.base_model, *(adapter.name for adapter in workload.adapters)}
    names = {}
    for each in given or ():
        name, equals, model = each.partition("=")
        if not equals or not name or not model:
            raise InputError("must be NAME=MODEL", each, "--adapters-map")
        if name not in known:
            raise InputError("must name an adapter of the workload", name, "--adapters-map")
        names[name] = model
    return names


def _fields(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    fields = parse_json(text, "--extra-body")
    if not isinstance(fields, dict):
        raise InputError("must be a JSON object", text, "--extra-body")
    return fields


def _profile(workload: Workload, name: str | None) -> Profile | None:
    """Return the named profile, or else the workload's if it can be loaded."""
    from capplan.datasets import load_profile

    if name is not None:
        return load_profile(name)
    if workload.profile is None:
        return None
    try:
        return load_profile(workload.profile)
    except InputError:
        note = f"profile {workload.profile} is not available; prompt and output lengths are independent"
        typer.echo(f"note: {note}", err=True)
        return None


_ADAPTERS: Final = 20


def show(result: BenchResult) -> None:
    """Print a result."""
    print_table(facts_table(result))
    print_table(latency_table(result))
    if 1 < len(result.adapters) <= _ADAPTERS:
        print_table(adapter_table(result.adapters))
