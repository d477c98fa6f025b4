"""A fleet without some of its instances."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from capplan import Adapter, InputError, Lengths, Workload
from capplan.datasets import load_profile
from capplan.planner.verification import SimulatedFleet, without_instances
from capplan.spec import BaseTraffic, RouterOptions, Slo
from capplan.twin.cluster import Instance
from tests.cli.conftest import Run, error_line, run

__all__ = ["run"]

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
PROFILE = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")


def fleet(*shares: dict[str, float], router: str = "smooth-shares", base_rps: float = 0.0) -> SimulatedFleet:
    names = sorted({name for each in shares for name in each if name != MODEL})
    workload = Workload(
        base_model=MODEL,
        adapters=[Adapter(name=name, rank=8, rate_rps=1.0) for name in names],
        prompt_tokens=Lengths(mean=100),
        output_tokens=Lengths(mean=20),
        base=BaseTraffic(rate_rps=base_rps) if base_rps else None,
    )
    instances = tuple(Instance(PROFILE, a_max=4, s_max=8, adapters=each) for each in shares)
    return SimulatedFleet(workload, instances, tuple(f"g{i}-1" for i in range(len(shares))), router)


def test_the_others_serve_what_they_hold_and_the_rest_has_no_server() -> None:
    whole = fleet({"a": 0.5, "b": 1.0}, {"a": 0.5, "c": 1.0}, {"d": 1.0})
    degraded = without_instances(whole, ["g0"])
    assert degraded.failed == ("g0-1",)
    assert degraded.unserved == ("b",)
    assert degraded.unserved_share == pytest.approx(1 / 4)
    found = degraded.simulate(1, 600.0)
    result = found.result
    assert result.requests_per_instance[0] == pytest.approx(1200, rel=0.1)  # all of a, and c
    assert list(found.unserved) == ["b"]
    assert found.submitted == pytest.approx(2400, rel=0.1)
    assert found.submitted == result.submitted + found.unserved["b"]
    assert found.served_fraction == pytest.approx(0.75, abs=0.03)
    (broken,) = found.broken  # the instances that are left hold every bound of their own
    assert broken.startswith("all requests: served_fraction 0.7")


def test_a_bound_that_one_instance_breaks_is_not_hidden_by_the_others() -> None:
    """Over all requests TTFT p99 holds; the instance with the long prompts alone is over its bound."""
    whole = fleet({"a": 1.0}, {"b": 1.0}, {"c": 1.0})
    long = tuple(
        a.replace(prompt_tokens=Lengths(mean=4000), rate_rps=0.005) if a.name == "c" else a
        for a in whole.workload.adapters
    )
    slow = whole.workload.replace(adapters=long, slo=Slo(ttft_p99_s=0.1, served_fraction=0.1))
    found = without_instances(replace(whole, workload=slow), ["g0"]).simulate(1, 3600.0)
    assert found.result.ttft_s_p99 < 0.1
    assert [each.partition(":")[0] for each in found.broken] == ["g2-1"]


def test_adapters_that_are_only_stored_elsewhere_are_served_there() -> None:
    whole = fleet({"a": 1.0}, {"a": 0.0, "b": 1.0})
    degraded = without_instances(whole, ["g0:1"])
    assert degraded.unserved == ()
    assert degraded.fleet.simulate(1, 300.0).requests_per_instance[0] == pytest.approx(600, rel=0.15)


def test_any_instance_serves_the_base_model() -> None:
    whole = fleet({"a": 1.0, MODEL: 1.0}, {"b": 1.0}, base_rps=2.0)
    degraded = without_instances(whole, ["g0"])
    assert degraded.unserved == ("a",)
    assert degraded.unserved_share == pytest.approx(1 / 4)
    assert degraded.fleet.simulate(1, 300.0).requests_per_instance[0] == pytest.approx(900, rel=0.15)


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        (["g7"], r"must be a group, GROUP or GROUP:REPLICA \(from 1\), of g0, g1 \(got 'g7'\)"),
        (["g0:2"], r"got 'g0:2'"),
        (["g0", "g1"], "must leave an instance"),
    ],
)
def test_names_without_an_instance_and_fleets_without_any_left_are_refused(
    failed: list[str], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        without_instances(fleet({"a": 1.0}, {"b": 1.0}), failed)


def test_other_routers_choose_among_the_instances_that_are_left() -> None:
    whole = fleet({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0}, router="least-loaded")
    degraded = without_instances(whole, ["g0"])
    assert degraded.fleet.simulate(1, 60.0).served_fraction > 0.9
    assert whole.router_options is None or isinstance(whole.router_options, RouterOptions)


def test_the_command_says_what_fails_in_its_first_line(tmp_path: Path, run: Run) -> None:
    workload = tmp_path / "w.yaml"
    workload.write_text(
        f"base_model: {MODEL}\nprofile: {PROFILE.name}\ngpus: {{count: 2}}\nobjective: min_latency\n"
        "requests: {prompt_tokens: {mean: 100}, output_tokens: {mean: 20}}\nslo: {ttft_p99_s: 5}\n"
        'adapters: [{name: "a{i}", count: 6, rank: 8, rate_rps: 0.5}]\n'
    )
    plan = tmp_path / "plan.json"
    assert run("plan", workload, "-o", plan, "--quiet").exit_code == 0
    groups = [each["id"] for each in json.loads(plan.read_text())["groups"]]
    command = ("simulate", workload, "--plan", plan, "--duration", 60)
    shown = run(*command, "--fail", groups[0])
    assert shown.exit_code == 1, shown.output
    assert re.match(
        rf"without {groups[0]}: [\d,]+ of [\d,]+ requests served, TTFT p99 [\d.]+ s \(bound 5 s\)\n",
        shown.output,
    )
    found = json.loads(run(*command, "--fail", groups[0], "--json").output)["failure"]
    assert found["instances"] == [f"{groups[0]}-1"]
    assert found["served"] + sum(each["requests"] for each in found["unserved_adapters"]) <= found["requests"]
    assert found["unserved_share"] > 0.0
    assert "unserved: " in shown.output
    assert "lack the requests" in error_line(
        run(*command, "--fail", groups[0], "--requests-out", tmp_path / "r")
    )
    assert "must be a group" in error_line(run(*command, "--fail", "nothing"))
    assert "goes with --plan" in error_line(run("simulate", workload, "--fail", "g", "--max-loras", 2))
