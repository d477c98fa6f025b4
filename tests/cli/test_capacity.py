"""`capplan simulate --plan` and `capplan capacity`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from capplan import Plan, load_profile, load_workload, plan
from capplan.planner.verification import by_rank, fleet_of_plan
from capplan.spec import RebalanceSettings
from tests.cli.conftest import Run, error_line

pytestmark = pytest.mark.long

SHORT = ("--duration", "60")
BOUND = ("--slo", "ttft_p95_s=2")


@pytest.fixture
def plan_json(workload_yaml: Path) -> Path:
    workload = load_workload(workload_yaml)
    path = workload_yaml.parent / "plan.json"
    made = plan(workload, profile=str(workload_yaml.parent / "profile.json"), gpus=2, seeds=1)
    made.to_json(path)
    return path


def told(run: Run, *arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_plan_is_simulated_as_a_cluster(run: Run, workload_yaml: Path, plan_json: Path) -> None:
    words = (
        "simulate",
        workload_yaml,
        "--plan",
        plan_json,
        "--router",
        "least-work-left",
        "--seed",
        3,
        *SHORT,
    )
    found = told(run, *words)
    profile = load_profile(workload_yaml.parent / "profile.json")
    fleet = fleet_of_plan(
        Plan.from_json(plan_json), load_workload(workload_yaml), profile, "w", "least-work-left"
    )
    result = fleet.simulate(3, 60.0)
    assert found["router"] == "least-work-left"
    assert found["cluster"]["throughput_tok_s"] == result.throughput_tok_s
    assert [each["requests"] for each in found["instances"]] == list(result.requests_per_instance)
    assert [each["queue_s"]["p95"] for each in found["ranks"]] == [
        each.queue_s.p95 for each in by_rank(fleet, result)
    ]
    assert [each["load_s"] for each in found["instances"]] == [each.load_s for each in result.instances]
    (beyond,) = found["extrapolations"]
    strict = run(*words, "--strict")
    assert (strict.exit_code, beyond["note"] in strict.stdout) == (3, True)
    text = strict.stdout
    assert "adapters stored per instance" in text
    assert fleet.names[0] in text


def test_states_of_any_age_are_simulated(run: Run, workload_yaml: Path, plan_json: Path) -> None:
    words = ("simulate", workload_yaml, "--plan", plan_json, "--router", "least-loaded", *SHORT)
    seldom = told(run, *words, "--state-period-s", 30)
    assert seldom["state_period_s"] == 30.0
    plan = Plan.from_json(plan_json)
    profile = load_profile(workload_yaml.parent / "profile.json")
    fleet = fleet_of_plan(plan, load_workload(workload_yaml), profile, "w", "least-loaded")
    result = replace(fleet, state_period_s=30.0).simulate(0, 60.0)
    assert seldom["cluster"]["ttft_s_mean"] == result.ttft_s_mean
    assert told(run, *words)["state_period_s"] == 0.25
    message = error_line(run(*words, "--state-period-s", 0))
    assert message.startswith("error: --state-period-s: must be from 0.01 to 60")


def test_every_request_of_a_plan_is_written(
    run: Run, workload_yaml: Path, plan_json: Path, tmp_path: Path
) -> None:
    file = tmp_path / "requests.parquet"
    words = ("simulate", workload_yaml, "--plan", plan_json, *SHORT)
    found = told(run, *words, "--requests-out", file)
    table = pd.read_parquet(file)
    assert len(table) == found["cluster"]["submitted"]
    assert (table["status"] == "finished").sum() == found["cluster"]["completed"]
    routed = {each["name"]: each["requests"] for each in found["instances"] if each["requests"]}
    assert table["instance"].value_counts().pipe(lambda counts: counts[counts > 0]).to_dict() == routed
    assert set(table["adapter"]) <= {"", *(each.name for each in load_workload(workload_yaml).adapters)}
    assert table["ttft_s"].mean() == pytest.approx(found["cluster"]["ttft_s_mean"])
    assert "cannot be written" in error_line(run(*words, "--requests-out", "absent/out.parquet"))


def test_rebalancing_of_a_plan_is_simulated(run: Run, workload_yaml: Path, tmp_path: Path) -> None:
    workload = load_workload(workload_yaml).model_copy(update={"rebalance": RebalanceSettings()})
    workload_yaml.write_text(workload_yaml.read_text() + "rebalance: {}\n")
    plan(workload, gpus=2, solver="loraserve", seeds=1).to_json(tmp_path / "moving.json")
    words = ("simulate", workload_yaml, "--plan", tmp_path / "moving.json", "--duration", 70)
    options = ("--rebalance", 20, "--forecast", "ewma", "--rebalance-solver", "capplan")
    found = told(run, *words, *options)["rebalance"]
    assert found["settings"]["every_s"] == 20.0
    assert (found["settings"]["forecast"], found["settings"]["solver"]) == ("ewma", "capplan")
    assert [each["at_s"] for each in found["rounds"]] == [20.0, 40.0, 60.0]
    assert found["operating_points_tok_s"].keys() == {"8", "16"}
    text = run(*words, *options).stdout
    assert "re-balancing every 20 s: 3 rounds" in text
    message = error_line(run(*words, "--rebalance", 0))
    assert message.startswith("error: --rebalance: must be")


def test_capacity_is_reported_with_its_interval(run: Run, workload_yaml: Path) -> None:
    words = ("capacity", workload_yaml, "--max-loras", 4, *BOUND, *SHORT, "--seeds", 2, "--precision", 0.1)
    found = told(run, *words)
    assert found["low"] <= found["mean"] <= found["high"]
    assert len(found["loads"]) == 2
    assert "just above: " in run(*words).stdout
    fewest = told(run, "capacity", workload_yaml, "--max-loras", 4, *BOUND, *SHORT, "--seeds", 1, "--fewest")
    assert fewest["instances"] >= 1


def replayed(workload_yaml: Path, rate_scale: float = 1.0) -> None:
    """Replace the requests of a workload by a trace of 60 s at 5 req/s."""
    folder = workload_yaml.parent
    rows = [f"{0.2 * number:.1f},120,40,a{number % 4}" for number in range(300)]
    (folder / "trace.csv").write_text(
        "\n".join(["arrival_s,prompt_tokens,output_tokens,adapter", *rows]) + "\n"
    )
    (folder / "ranks.csv").write_text("name,rank\na0,8\na1,8\na2,8\na3,8\n")
    kept = workload_yaml.read_text().partition("requests:")[0]
    trace = f"{{file: trace.csv, ranks: ranks.csv, duration_s: 60, rate_rps: {5.0 * rate_scale}}}"
    workload_yaml.write_text(f"{kept}trace: {trace}\n")


def test_a_simulation_of_a_trace_ends_with_it(run: Run, workload_yaml: Path, tmp_path: Path) -> None:
    """In the idle time after a trace its backlog would drain, and count as served."""
    replayed(workload_yaml, rate_scale=40.0)
    alone = json.loads(run("simulate", workload_yaml, "--max-loras", 4, "--json").stdout)
    (result,) = alone["results"]
    assert alone["settings"]["duration_s"] == pytest.approx(1.5)
    assert result["starved"]
    plan = tmp_path / "traced.json"
    assert run("plan", workload_yaml, "-o", plan, "--gpus", 8, "--seeds", 1).exit_code == 0
    words = ("simulate", workload_yaml, "--plan", plan)
    found = json.loads(run(*words, "--json").stdout)
    offered_tok_s = 200.0 * 160.0
    assert 0.5 * offered_tok_s < found["cluster"]["throughput_tok_s"] <= offered_tok_s
    assert "trace at 40 times its recorded rate" in run(*words).stdout


def test_capacity_for_a_trace_has_one_seed_and_no_interval(run: Run, workload_yaml: Path) -> None:
    replayed(workload_yaml)
    words = ("capacity", workload_yaml, "--max-loras", 4, "--precision", 0.2)
    found = told(run, *words)
    assert len(found["loads"]) == 1
    assert (found["low"], found["high"], found["above_limit"]) == (None, None, False)
    assert found["mean"] < 100.0
    text = run(*words).stdout
    assert "the trace of 60 s as a whole" in text
    assert "times its recorded rate" in text
    assert "90 %" not in text


def test_a_capacity_above_the_largest_load_is_called_so(run: Run, workload_yaml: Path) -> None:
    idle = workload_yaml.read_text().replace("rate_rps: 0.05", "rate_rps: 1e-5").replace("0.3", "1e-5")
    workload_yaml.write_text(idle)
    words = ("capacity", workload_yaml, "--max-loras", 4, *SHORT, "--seeds", 1, "--precision", 0.5)
    assert told(run, *words)["above_limit"] is True
    assert "above 1,024" in run(*words).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("capacity", "--slo", "ttft=2"), "--slo: must be one of ttft_mean_s"),
        (("capacity", "--slo", "fast"), "--slo: must be METRIC=VALUE or METRIC=FACTOR*RUN"),
        (("capacity", "--slo", "ttft_p95_s=0"), "--slo ttft_p95_s: must be a finite number > 0"),
        (("capacity", "--slo", "ttft_p95_s=2*idle"), "--slo ttft_p95_s: must be one of unloaded, no-lora"),
        (("capacity", "--instances", 0), "--instances: must be >= 1"),
        (("capacity", "--instances", 2, "--fewest"), "--instances: does not go with --fewest"),
        (("capacity", "--max-loras", 4, "--precision", 0), "--precision: must be above 0 and below 1"),
        (
            ("capacity", "--max-loras", 4, "--fewest", "--precision", 7),
            "--precision: must be above 0 and below 1",
        ),
        (
            ("capacity", "--max-loras", 4, "--fewest", "--confidence", 7),
            "--confidence: must be above 0 and below",
        ),
        (("capacity", "--router", "fastest"), "--router: must be one of plan-shares"),
        (("simulate", "--router", "toppings"), "--router: goes with --plan"),
        (("simulate", "--state-period-s", 1), "--state-period-s: goes with --plan"),
        (("simulate", "--plan", "PLAN", "--max-loras", 4), "--max-loras: does not go with --plan"),
        (("simulate", "--plan", "absent.json"), "absent.json: "),
        (("simulate", "--rebalance", 30), "--rebalance: goes with --plan"),
        (("simulate", "--rebalance-solver", "capplan"), "--rebalance-solver: goes with --plan"),
        (
            ("simulate", "--plan", "plan.json", "--gpus-per-link", 2),
            "--gpus-per-link: does not go with --plan",
        ),
    ],
)
def test_what_does_not_go_is_named(
    run: Run, workload_yaml: Path, words: tuple[object, ...], message: str
) -> None:
    command, *rest = words
    assert message in error_line(run(command, workload_yaml, *rest))
