"""`capplan bench`: the requests of a workload against a running server, and what came back when."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from capplan.cli.console import counted, number, percent, print_json, print_table, table
from capplan.cli.options import AsJson, command, require_extra
from capplan.cli.output import require_writable_file
from capplan.cli.progress import live
from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.profiling.load.record import RequestFile
    from capplan.profiling.load.result import BenchResult, LoadMetrics
    from capplan.spec import Profile, Slo, Workload

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_FAILED = 1


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
    duration_s: float = typer.Option(60.0, metavar="SECONDS", help="Length of the measured window.")
    warm_up_s: float = typer.Option(0.0, metavar="SECONDS", help="Load before the window.")
    seed: int = typer.Option(0, metavar="N", min=0, help="Same seed, same requests as `simulate`.")
    rate_scale: float = typer.Option(1.0, metavar="FACTOR", help="Multiplies every rate.")
    api_key: str | None = typer.Option(
        None, metavar="KEY", envvar="OPENAI_API_KEY", help="Sent as bearer token."
    )
    adapters_map: list[str] | None = typer.Option(
        None, metavar="NAME=MODEL", help="Model name of an adapter at the server; repeatable."
    )
    max_in_flight: int | None = typer.Option(
        None, metavar="N", min=1, help="Reject requests beyond this many."
    )
    timeout_s: float = typer.Option(600.0, metavar="SECONDS", help="Longest time of one request.")
    drain_s: float = typer.Option(30.0, metavar="SECONDS", help="Wait for answers after the window.")
    metrics_interval_s: float = typer.Option(
        0.0, metavar="SECONDS", help="Pause between scrapes of /metrics."
    )
    profile: str | None = typer.Option(
        None, metavar="NAME", help="Profile that the twin has; how lengths go together is in it."
    )
    max_model_len: int | None = typer.Option(None, metavar="N", min=2, help="Where lengths end.")
    prompt_form: str | None = typer.Option(
        None, metavar="FORM", help="ids, toy-ids or text; default: what works."
    )
    extra_body: str | None = typer.Option(None, metavar="JSON", help="Further fields of every request.")
    output: str | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="Write the result as JSON."
    )
    requests: str | None = typer.Option(
        None, metavar="FILE", help="Write every request as Parquet, one row each."
    )
    report: str | None = typer.Option(
        None, metavar="FILE", help="Write an HTML report with charts, readable offline."
    )
    vllm_json: str | None = typer.Option(
        None, metavar="FILE", help="Write it as `vllm bench serve` does, too."
    )
    as_json: AsJson = False


@command
def bench(args: BenchArgs) -> None:
    """Load an OpenAI-compatible server with the requests of a workload, at their arrival times.

    Exit status 1: requests failed, none was answered, or this client could not keep up.
    """
    if args.read is not None:
        if args.workload is not None or args.url is not None:
            raise InputError("must stand alone: nothing is sent", args.read, "--read")
        _tell(_known_result(args.read, args.output), as_json=args.as_json)
        return
    if args.workload is None or args.url is None:
        place = "WORKLOAD" if args.workload is None else "--url"
        raise InputError("is required, unless a result is read (--read)", location=place)
    require_extra("bench", ("aiohttp",))
    from capplan.profiling.load.bench import BenchOptions
    from capplan.profiling.load.bench import bench as measure
    from capplan.profiling.load.client import raise_file_limit
    from capplan.profiling.load.requests import LoadSettings, Target
    from capplan.spec import load_workload

    for path in filter(None, (args.output, args.requests, args.report, args.vllm_json)):
        require_writable_file(path)
    wishes = load_workload(args.workload)
    target = Target(args.url, args.api_key, None, _names(args.adapters_map, wishes), _fields(args.extra_body))
    settings = LoadSettings(
        duration_s=args.duration_s,
        warm_up_s=args.warm_up_s,
        timeout_s=args.timeout_s,
        drain_s=args.drain_s,
        max_in_flight=args.max_in_flight,
        metrics_interval_s=args.metrics_interval_s,
    )
    options = BenchOptions(
        seed=args.seed,
        rate_scale=args.rate_scale,
        profile=_profile(wishes, args.profile),
        max_model_len=args.max_model_len,
        prompt_form=_form(args.prompt_form),
    )
    raise_file_limit()
    with _request_file(args.requests, needed=bool(args.vllm_json or args.report)) as file:
        with live(quiet=args.as_json) as on_tick:
            result = measure(wishes, target, settings, options, file=file, on_tick=on_tick)
        _write(args, result, file, wishes.slo)
    _tell(result, as_json=args.as_json)


def _tell(result: BenchResult, *, as_json: bool) -> None:
    """Print a result, and end with the status that it deserves."""
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        show(result)
    told = warnings(result)
    for line in told:
        typer.echo(line, err=True)
    if result.partial:
        raise typer.Exit(_INTERRUPTED)
    if told:
        raise typer.Exit(_FAILED)


def _known_result(path: str, output: str | None) -> BenchResult:
    """Return a result that was measured before, and write it as ours if asked to."""
    from capplan.profiling.load.vllm_bench import read_result

    if output is not None:
        require_writable_file(output)
    result = read_result(path)
    if output is not None:
        result.to_json(output)
    return result


@contextmanager
def _request_file(path: str | None, *, needed: bool) -> Iterator[RequestFile | None]:
    """Give the file of requests, one that vanishes where only the other outputs need it."""
    from capplan.profiling.load.record import RequestFile

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
        from capplan.profiling.load.vllm_bench import write_vllm_bench

        write_vllm_bench(args.vllm_json, result, rows)
    if args.report is not None:
        from capplan.cli.report.measurement import bench_page

        bounds = slo.latency_bounds()
        write_text_atomic(args.report, bench_page(str(args.workload), result, rows, bounds))
    if args.requests is not None:
        file.keep()


def _names(given: list[str] | None, workload: Workload) -> dict[str, str]:
    """Return the model name of each adapter that has another one at the server."""
    known = {adapter.name for adapter in workload.adapters}
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
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InputError("must be a JSON object", text, "--extra-body")
    return fields


def _form(name: str | None) -> Any:
    from capplan.profiling.load.requests import PromptForm

    if name is None:
        return None
    try:
        return PromptForm(name)
    except ValueError:
        raise InputError(f"must be one of {', '.join(PromptForm)}", name, "--prompt-form") from None


def _profile(workload: Workload, name: str | None) -> Profile | None:
    """Return the profile asked for, or else the workload's, if it is at hand."""
    from capplan.datasets import load_profile

    if name is not None:
        return load_profile(name)
    if workload.profile is None:
        return None
    try:
        return load_profile(workload.profile)
    except InputError:
        told = f"profile {workload.profile} is not at hand; prompts and outputs have lengths independent"
        typer.echo(f"note: {told} of each other", err=True)
        return None


STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")

LATENCIES: Final = (
    ("TTFT from due, s", "ttft_s", 3),
    ("TTFT from sent, s", "ttft_sent_s", 3),
    ("ITL, ms", "itl_ms", 2),
    ("TPOT, ms", "tpot_ms", 2),
    ("TPT, ms", "tpt_ms", 2),
    ("E2E, s", "e2e_s", 2),
)

_ADAPTERS: Final = 20


def show(result: BenchResult) -> None:
    """Print a result."""
    overall = result.overall
    rows = table("metric", "value", numbers_from=1)
    for name, value in facts(overall).items():
        rows.add_row(name, value)
    print_table(rows)
    latencies = table("latency", *STATISTICS, numbers_from=1)
    for name, field, decimals in LATENCIES:
        stats = getattr(overall, field)
        latencies.add_row(name, *(number(getattr(stats, s), decimals) for s in STATISTICS))
    lag = result.client.lag_ms
    latencies.add_row("client lag, ms", *(number(getattr(lag, s), 2) for s in STATISTICS))
    print_table(latencies)
    if 1 < len(result.adapters) <= _ADAPTERS:
        adapters = table(*ADAPTER_HEAD, numbers_from=1)
        for each in result.adapters:
            adapters.add_row(each.name or "(base model)", *adapter_cells(each))
        print_table(adapters)


ADAPTER_HEAD: Final = ("adapter", "submitted", "completed", "served", "tok/s", "TTFT p50, s", "ITL mean, ms")


def adapter_cells(each: LoadMetrics) -> tuple[str, ...]:
    """Return the row of an adapter, its name left out."""
    return (
        number(each.submitted),
        number(each.completed),
        percent(each.served_fraction),
        number(each.throughput_tok_s, 1),
        number(each.ttft_s.p50, 3),
        number(each.itl_ms.mean, 2),
    )


def facts(overall: LoadMetrics) -> dict[str, str]:
    """Return the numbers that are no latencies, in words."""
    return {
        "throughput, tok/s": number(overall.throughput_tok_s, 1),
        "offered, tok/s": number(overall.offered_tok_s, 1),
        "input, tok/s": number(overall.input_tok_s, 1),
        "output, tok/s": number(overall.output_tok_s, 1),
        "completed in the window": number(overall.completed),
        "submitted": number(overall.submitted),
        "failed": number(overall.failed),
        "rejected": number(overall.rejected),
        "executing at the end": number(overall.executing),
        "waiting at the end": number(overall.waiting),
        "served": percent(overall.served_fraction),
        "starved": "yes" if overall.starved else "no",
        "mean time between tokens, ms": number(overall.token_gap_ms_mean, 2),
    }


def warnings(result: BenchResult) -> list[str]:
    """Return what speaks against the result, a line each."""
    lines = []
    for each in result.failures:
        told = f": {' '.join(each.message.split())}" if each.message else ""
        lines.append(f"failed: {counted(each.requests, 'request')} with {each.kind}{told}")
    overall, client = result.overall, result.client
    if overall.completed == 0:
        lines.append("failed: no request was answered within the window")
    if client.kept_up is False:
        lag = f"median {number(client.lag_ms.p50, 1)} ms, 99 % within {number(client.lag_ms.p99, 1)} ms"
        lines.append(
            f"this client could not keep up: requests went out late ({lag}), its loop by "
            f"{number(client.loop_lag_ms_p99, 1)} ms; latencies are its own in part"
        )
    return lines
