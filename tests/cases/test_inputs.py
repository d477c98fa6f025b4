"""Traces, tables and YAML made after public bug reports; the right answers are in each NOTE.md."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from capplan import InputError, Plan, load_workload
from capplan.profiling.load import read_result
from tests.cli.conftest import Run, error_line, run

__all__ = ["run"]
CASES = Path(__file__).parents[3] / "shared" / "cases"

pytestmark = pytest.mark.skipif(
    not CASES.is_dir(), reason="no ../shared/cases beside the checkout: the reported inputs are not at hand"
)


def case(name: str) -> Path:
    return CASES / name


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_workload(path)
    return str(caught.value)


def notes(path: Path) -> str:
    trace = load_workload(path).trace
    assert trace is not None
    return "\n".join(trace.notes)


@pytest.mark.parametrize(("name", "unit"), [("workload", "seconds"), ("workload-ms", "milliseconds")])
def test_a_trace_of_2400_requests_in_20_minutes_is_read_in_its_unit(name: str, unit: str) -> None:
    path = case("01-bailian-seconds") / f"{name}.yaml"
    workload = load_workload(path)
    assert workload.total_rate_rps == pytest.approx(1.989, abs=0.001)
    assert f"times are read as {unit}" in notes(path)
    assert "1.99 per second; trace.time_unit states the unit" in notes(path)


def test_a_trace_in_seconds_needs_one_gpu_and_the_plan_says_the_unit(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = run("plan", case("01-bailian-seconds") / "workload.yaml", "-o", out)
    assert done.exit_code == 0, done.output
    assert "trace: times are read as seconds, the unit of format bailian" in done.stdout
    plan = Plan.from_json(out)
    assert plan.totals.gpus == 1
    assert any("hash_ids are not used" in note for note in plan.provenance["trace_notes"])


def test_a_stated_unit_wins(tmp_path: Path) -> None:
    text = (case("01-bailian-seconds") / "workload.yaml").read_text()
    shutil.copy(case("01-bailian-seconds") / "qwen_trace_like.jsonl", tmp_path)
    stated = tmp_path / "w.yaml"
    stated.write_text(text.replace("like.jsonl", "like.jsonl, time_unit: ms"))
    assert load_workload(stated).total_rate_rps == pytest.approx(1989, abs=1)
    assert "times" not in notes(stated)


def test_fractions_in_mooncakes_fields_are_seconds() -> None:
    workload = load_workload(case("01-bailian-seconds") / "w-guidellm.yaml")
    assert workload.trace is not None
    assert workload.trace.arrival_ns.tolist() == [0, 200_000_000, 400_000_000]


@pytest.mark.parametrize("name", ["workload", "workload2"])
def test_failed_requests_of_burstgpt_are_left_out_and_counted(name: str) -> None:
    path = case("02-burstgpt") / f"{name}.yaml"
    trace = load_workload(path).trace
    assert trace is not None
    assert trace.output_tokens.tolist() == [18, 230, 276, 215]
    assert (trace.arrival_ns / 1e9).tolist() == [5, 45, 118, 244]
    assert "1 of 5 requests without output tokens failed and are left out" in notes(path)


def test_unused_columns_of_burstgpt_are_named() -> None:
    assert "columns not used: Model, Total tokens, Log Type" in notes(case("02-burstgpt") / "workload.yaml")


@pytest.mark.parametrize(("name", "requests"), [("azure24", 4), ("azure23bom", 3)])
def test_azure_layouts_of_both_years_are_read_from_0(name: str, requests: int) -> None:
    trace = load_workload(case("03-azure-2024") / f"{name}.yaml").trace
    assert trace is not None
    assert len(trace) == requests
    assert trace.arrival_ns[0] == 0


VLLM = "04-vllm-bench-json"


def test_results_of_vllm_bench_are_read_without_failed_requests() -> None:
    path = case(VLLM) / "openai-inf.yaml"
    trace = load_workload(path).trace
    assert trace is not None
    assert len(trace) == 198
    assert "2 of 200 requests without output tokens failed" in notes(path)


@pytest.mark.parametrize("name", ["openai-inf", "inf-nan", "old-no-start-times"])
def test_bench_reads_what_it_needs_of_every_result(run: Run, name: str) -> None:
    done = run("bench", "--read", case(VLLM) / f"{name}.json", "--json")
    assert done.exit_code in (0, 1), done.output  # 1: requests failed
    result = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(word))
    assert result["settings"]["request_rate"] == "inf"


def test_infinite_numbers_are_read_by_trace_and_bench_alike() -> None:
    trace = load_workload(case(VLLM) / "inf-nan.yaml").trace
    assert trace is not None
    assert len(trace) == read_result(case(VLLM) / "inf-nan.json").overall.completed == 100


def test_appended_runs_are_refused_by_trace_and_bench_alike(run: Run) -> None:
    for line in (
        refusal(case(VLLM) / "appended.yaml"),
        error_line(run("bench", "--read", case(VLLM) / "appended.json")),
    ):
        assert (
            "appended.json: must be one run, but holds several, as vllm bench serve --append-result" in line
        )
        assert "copy the line of one run to a file" in line


def test_an_old_result_names_the_version_that_writes_start_times() -> None:
    line = refusal(case(VLLM) / "old-no-start-times.yaml")
    assert "start_times: is missing: vllm bench serve writes it since vLLM 0.15" in line
    assert "--save-detailed" not in line


def test_merge_keys_add_fields_that_a_mapping_lacks() -> None:
    workload = load_workload(case("12-yaml-habits") / "anchors-merge.yaml")
    found = [(each.name, each.rank, each.rate_rps) for each in workload.adapters]
    assert found == [("a", 16, 0.2), ("b", 16, 0.2), ("c", 8, 0.2)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("anchors-xkey", "anchors-xkey.yaml:7: x-defaults: unknown key"),
        ("comma-decimal", ":7: gpus: must be a mapping"),
        ("duplicate-key", ":9: duplicate key 'adapters'"),
        ("kilo", "prompt_tokens.mean: must be a number of tokens from 1 to 16777216 (got '1.2k')"),
        ("latin1", ":7: must be UTF-8 text"),
        ("multidoc", ":9: must be a single YAML document"),
        ("norway", "adapters[0].rate_rps: must be a finite number >= 0 (got '1_000e-3')"),
        ("percent", "headroom: must be a number from 0 to below 1"),
        ("quoted-numbers", "adapters[0].rank: must be a whole number from 1 to 512 (got '16')"),
        ("rate-string", "adapters[0].rate_rps: must be a finite number >= 0 (got '10/s')"),
        ("tabs", ":8: must be YAML: "),
        ("unquoted-brace", ":9: must be YAML: did not find expected ',' or '}'; quote text with {i}"),
    ],
)
def test_habits_that_are_not_read_are_refused_in_one_line(name: str, words: str) -> None:
    assert words in refusal(case("12-yaml-habits") / f"{name}.yaml")


def test_a_byte_order_mark_and_other_line_ends_are_read() -> None:
    assert load_workload(case("12-yaml-habits") / "bom-crlf-nonascii.yaml").adapters[0].rank == 16


@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        ("bom-trailing", [("legal", 16, 0.5), ("hr", 8, 0.2)]),
        ("caps", [("legal", 16, 0.5)]),
        ("semicolon", [("legal", 16, 0.5), ("hr", 8, 0.2)]),
        ("tabs", [("legal", 16, 0.5)]),
        ("names", [("001", 16, 0.5), ("1e3", 8, 0.2)]),
    ],
)
def test_tables_of_a_spreadsheet_are_read(name: str, adapters: list[tuple[str, int, float]]) -> None:
    workload = load_workload(case("19-csv-from-excel") / f"{name}.yaml")
    assert [(each.name, each.rank, each.rate_rps) for each in workload.adapters] == adapters


def test_a_trace_of_a_spreadsheet_has_decimal_commas() -> None:
    trace = load_workload(case("19-csv-from-excel") / "tr.yaml").trace
    assert trace is not None
    assert trace.arrival_ns.tolist() == [500_000_000]


def test_a_rank_may_be_written_with_a_point_but_names_not_twice() -> None:
    assert "dup.csv:3: name: must be unique (got 'legal')" in refusal(case("19-csv-from-excel") / "dup.yaml")


@pytest.mark.parametrize("name", ["w-shared", "w-distinct"])
def test_unused_prefix_identity_of_mooncake_is_said(name: str) -> None:
    said = notes(case("20-mooncake-hash-ids") / f"{name}.yaml")
    assert "hash_ids are not used yet: prompts are simulated without the prefix hits" in said
    assert "times are read as milliseconds, the unit of format mooncake" in said


def test_nested_columns_are_refused(run: Run, tmp_path: Path) -> None:
    flat = {"arrival_s": pa.array([0.0, 1.0]), "adapter": pa.array(["a0", "a1"])}
    flat |= {"prompt_tokens": pa.array([1, 2]), "output_tokens": pa.array([1, 2])}
    shutil.copy(case("30-parquet-nested") / "nested_types.parquet.yaml", tmp_path)
    line = error_line(
        run("simulate", case("30-parquet-nested") / "nested_types.parquet.yaml", "--duration", 20)
    )
    assert "column must hold numbers or text, not struct<a: int64>" in line
    for nested in (
        pa.array([["a0"], ["a1"]]),
        pa.array([{"x": 1}, {"x": 2}]),
        pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        pa.array([b"a0", b"a1"]),
        pa.array([1, 2], pa.duration("s")),
        pa.array(np.arange(2), pa.time64("us")),
    ):
        for column in flat:
            pq.write_table(pa.table(flat | {column: nested}), tmp_path / "nested_types.parquet")
            line = refusal(tmp_path / "nested_types.parquet.yaml")
            assert f"nested_types.parquet: {column}: column must hold " in line
