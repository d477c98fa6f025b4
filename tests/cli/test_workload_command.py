import json
from pathlib import Path

import pytest

from capplan import load_workload
from capplan.workload import presets
from tests.cli.conftest import ROOT, Run, error_line
from tests.cli.examples import MODEL, profile_document


def test_the_list_names_every_preset_with_its_source(run: Run) -> None:
    text = run("workload", "preset", "--list").stdout
    for each in presets().values():
        assert f"{each.name} " in text
        assert each.source in text
    listed = json.loads(run("workload", "preset", "--list", "--json").stdout)
    assert [each["name"] for each in listed] == list(presets())
    assert {each["needs"] is None for each in listed} == {True, False}


def test_a_preset_is_written_or_printed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    result = run("workload", "preset", "dt-figure1", "-o", path)
    assert result.exit_code == 0
    assert result.stdout == f"dt-figure1 written to {path}\n"
    assert len(load_workload(path).adapters) == 128
    assert run("workload", "preset", "dt-figure1").stdout == path.read_text()
    document = json.loads(run("workload", "preset", "dt-figure1", "--json").stdout)
    assert document["workload"] == path.read_text()
    assert document["assumed"]


def test_a_profile_and_gpus_are_filled_in(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(profile_document()))
    path = tmp_path / "workload.yaml"
    more = ("--profile", tmp_path / "p.json", "--gpus", 3, "-o", path)
    assert run("workload", "preset", "dlora-4", *more).exit_code == 0
    w = load_workload(path)
    assert (w.profile, w.gpus.count, w.base_model) == (str(tmp_path / "p.json"), 3, MODEL)
    assert "# the source has huggyllama/llama-7b" in path.read_text()


def test_a_preset_that_needs_a_trace_asks_for_it_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    told = error_line(run("workload", "preset", "real-azure-code", "-o", path))
    assert "--traces: is required: preset real-azure-code needs azure_llm_2023_code.parquet" in told
    assert not path.exists()


def test_a_preset_with_its_trace_is_a_whole_workload(run: Run, tmp_path: Path) -> None:
    traces = ROOT.parent / "shared" / "traces"
    if not (traces / "azure_llm_2023_code.parquet").is_file():
        pytest.skip("no ../shared/traces beside the checkout: public traces are not at hand")
    path = tmp_path / "workload.yaml"
    assert run("workload", "preset", "real-azure-code", "--traces", traces, "-o", path).exit_code == 0
    assert len(load_workload(path).trace) == 8819


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "NAME: is required, or --list"),
        (("dt-figure1", "--list"), "--list: does not go with the name of a preset (got 'dt-figure1')"),
        (("dt-figure",), "did you mean 'dt-figure1'?"),
        (("dt-figure1", "-o", "/nowhere/w.yaml"), "/nowhere/w.yaml: cannot be written"),
        (("dt-figure1", "--profile", "none"), "must be the path of a profile JSON or the name of a shipped"),
    ],
)
def test_a_mistake_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    assert message in error_line(run("workload", "preset", *arguments))


def test_a_predictor_of_output_lengths_is_trained_and_reported(run: Run, tmp_path: Path) -> None:
    rows = [f"{i},{'ab'[i % 2]},{10 + i % 7},{20 + 200 * (i % 2) + i % 11}" for i in range(400)]
    (tmp_path / "trace.csv").write_text("\n".join(["arrival_s,adapter,prompt_tokens,output_tokens", *rows]))
    (tmp_path / "ranks.csv").write_text("name,rank\na,8\nb,8\n")
    (tmp_path / "workload.yaml").write_text(
        f"version: 1\nbase_model: {MODEL}\nprofile: h100-64g/llama-3.1-8b/vllm-0.8.5\ngpus: {{count: 1}}\n"
        "trace: {file: trace.csv, ranks: ranks.csv}\n"
    )
    given = ("workload", "predictor", tmp_path / "workload.yaml", "-o", tmp_path / "predictor.json")
    document = json.loads(run(*given, "--json").stdout)
    assert (document["trained"], document["held_out"]) == (320, 80)
    assert document["accuracy"] > document["baseline"]
    assert "right class, held out" in run(*given).stdout
    told = error_line(run(*given, "--duration", 100))
    assert "requests: must leave at least 200 requests to train on (got 80)" in told
