import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from capplan import Workload, load_profile, load_workload, simulate, simulate_detailed
from tests.cli.conftest import Run, error_line
from tests.cli.examples import WORKLOAD, write_inputs
from tests.cli.test_report import figures_of, own, parsed

SHORT = ("--duration", "60")


def results(run: Run, *arguments: object) -> list[dict[str, Any]]:
    result = run("simulate", *arguments, *SHORT, "--json")
    assert result.exit_code == 0, result.output
    document: dict[str, list[dict[str, Any]]] = json.loads(result.stdout)
    return document["results"]


def expected(path: Path, **settings: Any) -> dict[str, Any]:
    workload: Workload = load_workload(path)
    profile = load_profile(path.parent / "profile.json")
    given = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 4096} | settings
    return simulate(workload, profile, duration_s=60.0, **given).document()  # type: ignore[arg-type]


def same(told: dict[str, Any], wanted: dict[str, float]) -> bool:
    return all(told[name] == wanted[name] for name in wanted if name != "wall_s")


def test_engine_settings_come_from_the_file_and_the_slot_rank_from_the_adapters(
    run: Run, workload_yaml: Path
) -> None:
    (told,) = results(run, workload_yaml, "--max-loras", "4")
    assert told["a_max"] == 4
    assert same(told, expected(workload_yaml, a_max=4, s_max=16))


def test_flags_win_over_the_file(run: Run, workload_yaml: Path) -> None:
    flags = {
        "--max-lora-rank": 32,
        "--seed": 7,
        "--max-num-seqs": 2,
        "--max-num-batched-tokens": 512,
        "--max-cpu-loras": 6,
        "--max-model-len": 2000,
        "--gpu-memory-utilization": 0.7,
        "--max-in-flight": 3,
    }
    words = [word for pair in flags.items() for word in pair]
    (told,) = results(run, workload_yaml, "--max-loras", "4", *words)
    names = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()}
    assert same(told, expected(workload_yaml, a_max=4, s_max=names.pop("max_lora_rank"), **names))
    assert not same(told, expected(workload_yaml, a_max=4, s_max=16))


def test_slots_the_workload_fixes_need_no_flag(run: Run, workload_yaml: Path) -> None:
    workload_yaml.write_text(WORKLOAD.replace("engine: {", "engine: {max_loras: 3, max_lora_rank: 64, "))
    (told,) = results(run, workload_yaml)
    assert told["a_max"] == 3
    assert same(told, expected(workload_yaml, a_max=3, s_max=64))


def test_several_slot_numbers_stand_side_by_side_once_each(run: Run, workload_yaml: Path) -> None:
    assert [each["a_max"] for each in results(run, workload_yaml, "--max-loras", "8,2,8")] == [8, 2]
    table = run("simulate", workload_yaml, "--max-loras", "8,2", *SHORT).stdout
    head = next(line for line in table.splitlines() if "metric" in line)
    assert head.split() == ["metric", "max_loras", "8", "max_loras", "2"]
    assert "TTFT p99, s" in table


def test_a_profile_flag_replaces_that_of_the_workload(run: Run, workload_yaml: Path) -> None:
    other = workload_yaml.with_name("other.json")
    document = json.loads(workload_yaml.with_name("profile.json").read_text())
    document["gpu"]["memory_bytes"] //= 2
    other.write_text(json.dumps(document))
    (own,) = results(run, workload_yaml, "--max-loras", "4")
    (told,) = results(run, workload_yaml, "--max-loras", "4", "--profile", other)
    assert told["kv_tokens"] < own["kv_tokens"]


def test_slots_that_do_not_fit_are_infeasible(run: Run, workload_yaml: Path) -> None:
    result = run("simulate", workload_yaml, "--max-loras", "4000", *SHORT)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: memory: weights, 4000 adapter slots")


def test_slots_that_do_not_fit_leave_the_others_their_column(run: Run, workload_yaml: Path) -> None:
    fits, too_many = results(run, workload_yaml, "--max-loras", "4,4000")
    assert fits["completed"] > 0
    assert "memory" in str(too_many["infeasible"])
    assert "max_loras 4000: memory" in run("simulate", workload_yaml, "--max-loras", "4,4000", *SHORT).stdout


def test_metrics_without_a_completed_request_are_null(run: Run, workload_yaml: Path) -> None:
    workload_yaml.write_text(WORKLOAD.replace("0.05", "0").replace("0.3", "0"))
    (told,) = results(run, workload_yaml, "--max-loras", "4")
    assert told["completed"] == 0
    assert told["ttft_s_mean"] is None
    assert "–" in run("simulate", workload_yaml, "--max-loras", "4", *SHORT).stdout


def test_the_wait_for_compilation_is_announced(
    run: Run, workload_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capplan import _jit as compilation

    monkeypatch.setattr(compilation, "is_compiled", lambda: False)
    text = run("simulate", workload_yaml, "--max-loras", "4", *SHORT).stderr
    assert text.startswith("compiling the digital twin (once per version")
    monkeypatch.setattr(compilation, "is_compiled", lambda: True)
    assert run("simulate", workload_yaml, "--max-loras", "4", *SHORT).stderr == ""


def test_an_impossible_flag_is_told_before_anything_is_compiled(
    run: Run, workload_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capplan import _jit as compilation

    monkeypatch.setattr(compilation, "is_compiled", lambda: False)
    result = run("simulate", workload_yaml, "--max-loras", "four")
    assert "compiling" not in result.stderr
    error_line(result)


def with_slo(path: Path) -> None:
    path.write_text(WORKLOAD + "slo: {ttft_p99_s: 0.2, tpot_mean_ms: 500}\n")


def test_details_are_those_of_the_library(run: Run, workload_yaml: Path) -> None:
    with_slo(workload_yaml)
    (told,) = results(run, workload_yaml, "--max-loras", "4", "--detail")
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 4096}
    wanted = simulate_detailed(
        load_workload(workload_yaml),
        load_profile(workload_yaml.parent / "profile.json"),
        a_max=4,
        s_max=16,
        duration_s=60.0,
        **settings,
    )
    assert same(told, expected(workload_yaml, a_max=4, s_max=16))
    assert told["overall"]["ttft_s"]["p90"] == wanted.overall.ttft_s.p90 == pytest.approx(told["ttft_s_p90"])
    assert list(told["by_rank"]) == ["8", "16"]
    assert told["by_rank"]["16"]["hit_rate"] == wanted.by_rank[16].hit_rate
    assert told["by_adapter"]["legal"]["slowdown"]["p50"] == wanted.by_adapter["legal"].slowdown.p50
    assert [each["share"] for each in told["slo"]] == [each.share for each in wanted.slo]
    assert told["series"]["running"] == wanted.series.running.tolist()


def test_details_are_shown_when_asked_for(run: Run, workload_yaml: Path) -> None:
    with_slo(workload_yaml)
    plain = run("simulate", workload_yaml, "--max-loras", "2,4", *SHORT).stdout
    detailed = run("simulate", workload_yaml, "--max-loras", "2,4", *SHORT, "--detail").stdout
    for words in ("slowdown p99", "adapter was resident", "ttft_p99_s: TTFT <= 0.2 s", "all of these"):
        assert words in detailed
        assert words not in plain


def test_every_request_is_written_with_its_number_of_slots(
    run: Run, workload_yaml: Path, tmp_path: Path
) -> None:
    path = tmp_path / "requests.parquet"
    told = results(run, workload_yaml, "--max-loras", "4,2,4000", "--requests-out", path)
    table = pd.read_parquet(path)
    assert table.groupby("a_max").size().to_dict() == {each["a_max"]: each["submitted"] for each in told[:2]}
    ended = table[table["status"] == "finished"].groupby("a_max").size().to_dict()
    assert ended == {each["a_max"]: each["completed"] for each in told[:2]}
    assert set(table["adapter"]) <= {"legal", *(f"support-{i}" for i in range(12))}


def test_a_report_shows_every_number_of_slots_and_explains_its_terms(
    run: Run, workload_yaml: Path, tmp_path: Path
) -> None:
    with_slo(workload_yaml)
    path = tmp_path / "sim.html"
    told = results(run, workload_yaml, "--max-loras", "2,4,4000", "--html", path)
    page = path.read_text()
    for heading in (
        "Summary",
        "Against A_max",
        "Over time",
        "Service-level objectives",
        "By rank",
        "By adapter",
        "Definitions",
        "Settings",
    ):
        assert f"<h2>{heading}</h2>" in page
    for each in told[:2]:
        assert f"{each['throughput_tok_s']:,.0f}" in page
        assert f"A_max {each['a_max']}" in page
    assert "A_max 4000: memory" in page
    assert len(figures_of(page)) == 20
    ttft = next(figure for figure in figures_of(page) if figure["title"] == "TTFT")
    bounds = [shape["name"] for shape in ttft["layout"]["shapes"]]
    assert bounds == ["bound: ttft_p99_s 0.2"]
    assert len(own(page)) < 500_000
    parsed(page)


def test_a_report_of_one_number_of_slots_compares_nothing(
    run: Run, workload_yaml: Path, tmp_path: Path
) -> None:
    path = tmp_path / "sim.html"
    run("simulate", workload_yaml, "--max-loras", "4", *SHORT, "--html", path)
    page = path.read_text()
    assert "Against A_max" not in page
    assert "Service-level objectives" not in page
    assert "<h2>Over time</h2>" in page


def test_the_same_command_writes_the_same_report_whatever_the_workers(
    run: Run, workload_yaml: Path, tmp_path: Path
) -> None:
    for workers in ("1", "2"):
        flags = ("--workers", workers, "--html", tmp_path / f"{workers}.html")
        assert run("simulate", workload_yaml, "--max-loras", "2,4,8", *SHORT, *flags).exit_code == 0
    assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()


def test_names_of_adapters_cannot_become_markup(run: Run, workload_yaml: Path, tmp_path: Path) -> None:
    workload_yaml.write_text(WORKLOAD.replace("name: legal", 'name: "a<b>&legal</b>"'))
    path = tmp_path / "sim.html"
    assert run("simulate", workload_yaml, "--max-loras", "4", *SHORT, "--html", path).exit_code == 0
    assert "a&lt;b&gt;&amp;legal&lt;/b&gt;" in path.read_text()
    assert "<b>" not in own(path.read_text())


def test_other_rules_can_be_simulated(run: Run, workload_yaml: Path) -> None:
    flags = ("--rules", "vllm-0.32-sync", "--no-prefix-caching")
    (told,) = results(run, workload_yaml, "--max-loras", "4", *flags)
    other = {"rules": "vllm-0.32-sync", "prefix_caching": False}
    assert same(told, expected(workload_yaml, a_max=4, s_max=16, **other))


@pytest.mark.parametrize("in_file", [False, True])
def test_a_scheduler_and_a_cache_need_no_slots(run: Run, tmp_path: Path, in_file: bool) -> None:
    section = "scheduler: chameleon\ncache: lru\n" if in_file else ""
    flags = [] if in_file else ["--scheduler", "chameleon", "--cache", "lru"]
    path = write_inputs(tmp_path, WORKLOAD + section)
    (told,) = results(run, path, *flags)
    wanted = expected(path, a_max=13, s_max=16, scheduler="chameleon", cache="lru")
    assert told["a_max"] == 13
    assert same(told, {name: value for name, value in wanted.items() if name != "pool"})
    assert told["pool"]["hits"] == wanted["pool"]["hits"] > 0
    shown = run("simulate", path, *flags, *SHORT).stdout
    for name in ("adapter was loaded at admission", "queueing, share of E2E", "squashed requests"):
        assert name in shown
    assert "max_loras" not in shown
    line = error_line(run("simulate", path, *flags, "--max-loras", "6"))
    assert "--max-loras: does not go with a scheduler or a cache" in line
    assert "squashed" not in run("simulate", write_inputs(tmp_path), "--max-loras", "4", *SHORT).stdout


def test_slots_make_no_difference_under_a_cache(workload_yaml: Path) -> None:
    two, nine = (expected(workload_yaml, a_max=slots, s_max=16, cache="lru") for slots in (2, 9))
    assert same(*({k: v for k, v in each.items() if k != "pool"} for each in (two, nine)))


def test_flags_of_scheduler_and_cache_apply_together(run: Run, tmp_path: Path) -> None:
    path = write_inputs(tmp_path, WORKLOAD + "scheduler: chameleon\ncache: chameleon\n")
    line = error_line(run("simulate", path, "--scheduler", "slora"))
    assert "cache: must be none beside scheduler slora" in line
    told = run("simulate", path, "--scheduler", "slora-every-step", "--cache", "none", *SHORT)
    assert told.exit_code == 0
    assert "slora-every-step" in told.stdout
    line = error_line(run("simulate", path, "--scheduler", "fifo", "--rules", "vllm-0.8"))
    assert "--rules: does not go with --scheduler" in line


def test_a_cluster_without_ray_is_one_line(
    run: Run, workload_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = error_line(run("simulate", workload_yaml, "--max-loras", "4", *SHORT, "--ray-address", "auto"))
    assert line == "error: --ray-address: needs Ray: pip install '.[ray]', in the checkout"


@pytest.mark.parametrize("flag", ["--html", "--requests-out"])
@pytest.mark.parametrize("where", ["", ".", "absent/out"])
def test_an_output_that_cannot_be_written_stops_the_simulation_before_it_starts(
    run: Run, workload_yaml: Path, flag: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workload_yaml.parent)
    workload_yaml.write_text("broken: [")  # would be the next error
    assert "cannot be written" in error_line(run("simulate", workload_yaml, "--max-loras", "4", flag, where))


def test_numbers_of_slots_are_ordered_over_paired_seeds(run: Run, workload_yaml: Path) -> None:
    flags = ("--max-loras", "2,4", "--seed", "3", "--workers", "1", *SHORT)
    told = run("simulate", workload_yaml, *flags, "--seeds", "3", "--json")
    document = json.loads(told.stdout)
    assert [each["a_max"] for each in document["results"]] == [2, 4]
    by_metric = {each["metric"]: each for each in document["paired"]}
    throughput = by_metric["throughput_tok_s"]
    for slots in (2, 4):
        alone = [
            expected(workload_yaml, a_max=slots, s_max=16, seed=seed)["throughput_tok_s"]
            for seed in (3, 4, 5)
        ]
        assert throughput["values"][str(slots)] == alone
    assert sorted(throughput["order"]["names"]) == [2, 4]
    shown = run("simulate", workload_yaml, *flags, "--seeds", "3").stdout
    assert "mean of 3 paired seeds" in shown
    assert "undecided, the difference is within two standard errors" in shown


def test_one_seed_orders_nothing_and_says_so(run: Run, workload_yaml: Path) -> None:
    shown = run("simulate", workload_yaml, "--max-loras", "2,4", *SHORT).stdout
    assert "one seed does not order numbers of slots" in shown
    assert "one seed" not in run("simulate", workload_yaml, "--max-loras", "2", *SHORT).stdout
    assert "--seeds: must be >= 1" in error_line(
        run("simulate", workload_yaml, "--max-loras", "2", "--seeds", "0")
    )
