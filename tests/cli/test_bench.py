import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from capplan.cli.progress import numbers
from capplan.profiling.load import BenchResult, LoadProgress, read_result
from tests.cli.conftest import Run, error_line, interrupted
from tests.cli.test_report import own
from tests.profiling.load import servers
from tests.profiling.load.test_run import quick

pytestmark = pytest.mark.process

SHORT = ("--duration", "0.5", "--rate-scale", "40", "--drain-s", "5")


def test_a_load_test_leaves_table_result_requests_and_reports(
    run: Run, workload_yaml: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("r.json", "r.parquet", "r.html", "v.json")]
    flags = [
        word
        for pair in zip(("-o", "--requests-out", "--html", "--vllm-json"), paths, strict=True)
        for word in pair
    ]
    with servers.null_server() as url:
        done = run(
            "bench", workload_yaml, "--url", f"{url}/v1", *SHORT, "--metrics-interval-s", "0.2", *flags
        )
    assert done.exit_code in (0, 1), done.output  # 1: on a busy machine the client may be late, and says so
    for shown in ("throughput, tok/s", "TTFT from due, s", "TTFT from sent, s", "client lag, ms", "starved"):
        assert shown in done.stdout
    result = BenchResult.from_json(paths[0])
    assert result.overall.completed > 0
    assert result.failures == ()
    assert pq.read_table(paths[1]).num_rows == result.overall.submitted
    page = paths[2].read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "http-equiv" in page
    assert "src=" not in own(page)
    assert "The server" in page
    assert read_result(paths[3]).overall.completed == result.overall.completed


def test_json_is_the_whole_result(run: Run, workload_yaml: Path) -> None:
    with servers.null_server() as url:
        done = run("bench", workload_yaml, "--url", url, *SHORT, "--seed", "7", "--json")
    document = json.loads(done.stdout)
    assert document["settings"]["seed"] == 7
    assert BenchResult.model_validate(document).overall.completed == document["overall"]["completed"]


def test_a_result_that_is_there_is_read_and_so_is_one_of_vllm(
    run: Run, workload_yaml: Path, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "r.json", tmp_path / "v.json"
    with servers.null_server() as url:
        first = run("bench", workload_yaml, "--url", url, *SHORT, "-o", ours, "--vllm-json", theirs)
    again = run("bench", "--read", ours)
    assert (again.stdout, again.exit_code) == (first.stdout, first.exit_code)
    read = run("bench", "--read", theirs, "-o", tmp_path / "v-as-ours.json")
    assert read.exit_code == 0, read.output
    assert "throughput, tok/s" in read.stdout
    result = BenchResult.from_json(tmp_path / "v-as-ours.json")
    assert result.overall.completed == BenchResult.from_json(ours).overall.completed
    assert result.client.kept_up is None  # such a file does not tell
    assert json.loads(run("bench", "--read", theirs, "--json").stdout)["client"]["kept_up"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "WORKLOAD: is required, unless a result is read"),
        (("w.yaml",), "--url: is required, unless a result is read"),
        (("w.yaml", "--read", "r.json"), "--read: must be the only input"),
        (("--read", "/nowhere/r.json"), "/nowhere/r.json"),
    ],
)
def test_what_is_sent_or_read_must_be_said(run: Run, words: tuple[str, ...], told: str) -> None:
    assert told in error_line(run("bench", *words))


def test_requests_that_fail_are_told_and_exit_1(run: Run, workload_yaml: Path, tmp_path: Path) -> None:
    died = b'{"error": {"message": "engine died"}}'
    with servers.server(lambda _, writer: servers.plain(writer, 500, died)) as url:
        done = run("bench", workload_yaml, "--url", url, *SHORT, "-o", tmp_path / "r.json")
    assert done.exit_code == 1
    assert "with http_500" in done.stderr
    assert "engine died" in done.stderr
    (failure,) = BenchResult.from_json(tmp_path / "r.json").failures
    assert (failure.kind, failure.requests > 0) == ("http_500", True)


def test_a_server_that_is_not_there_is_one_line(run: Run, workload_yaml: Path) -> None:
    assert "does not answer" in error_line(run("bench", workload_yaml, "--url", "http://127.0.0.1:9", *SHORT))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--duration", "0"), "--duration: must be a finite number above 0"),
        (("--rate-scale", "-1"), "--rate-scale: must be"),
        (("--adapters-map", "legal"), "--adapters-map: must be NAME=MODEL"),
        (("--adapters-map", "nobody=x"), "must name an adapter of the workload"),
        (("--extra-body", "[1]"), "--extra-body: must be a JSON object"),
        (("--prompt-form", "braille"), "--prompt-form: must be one of ids, toy-ids, text"),
        (("--url", "nowhere"), "--url: must be the http:// or https:// address"),
        (("--url", "http://[::1"), "--url: must be the http:// or https:// address"),
        (("--url", "http://me:hush@h"), "--url: must hold no user and no password"),
        (("--profile", "none/such"), "none/such"),
        (("-o", "/nowhere/r.json"), "/nowhere/r.json: cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(run: Run, workload_yaml: Path, flags: tuple[str, ...], told: str) -> None:
    assert told in error_line(run("bench", workload_yaml, "--url", "http://127.0.0.1:9", *flags))


def test_adapters_go_by_the_names_of_the_map(run: Run, workload_yaml: Path) -> None:
    seen: list[dict[str, object]] = []
    with servers.server(servers.paced, seen) as url:
        run("bench", workload_yaml, "--url", url, *SHORT, "--adapters-map", "legal=base:legal")
    models = {each["model"] for each in seen}
    assert "base:legal" in models
    assert "legal" not in models


def test_the_line_beside_the_bar_tells_the_rate_since_the_look_before() -> None:
    before = LoadProgress(1.0, 60.0, 10, 4, 6, 0, 0, 600)
    line = numbers(before, LoadProgress(3.0, 60.0, 30, 5, 25, 1, 2, 2600))
    parts = ("3/60 s", "30 sent", "5 in flight", "25 done", "1,000 tok/s", "1 failed", "2 rejected")
    assert line == " · ".join(parts)
    assert "failed" not in numbers(before, before)


def test_ctrl_c_leaves_a_valid_partial_result(workload_yaml: Path, tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []
    outputs = ("-o", tmp_path / "r.json", "--requests-out", tmp_path / "r.parquet")
    with servers.server(quick, seen) as url:
        words = ("bench", workload_yaml, "--url", url, "--duration", "600", "--rate-scale", "40", *outputs)
        ended = interrupted(words, lambda: len(seen) >= 30)
    assert "throughput" in ended.stdout
    result = BenchResult.from_json(tmp_path / "r.json")
    assert result.partial
    assert result.duration_s < 300.0
    assert result.overall.completed > 0
    assert pq.read_table(tmp_path / "r.parquet").num_rows >= result.overall.submitted
