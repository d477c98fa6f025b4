"""Served plans of which every instance stores all adapters."""

import json
from pathlib import Path
from typing import Any

import pytest

from capplan import Plan, load_profile
from capplan.fleet import RouterConfig
from capplan.fleet._routing import InstanceRouter
from tests.cli.conftest import Run, error_line, run
from tests.engine.fake_instances import idle_state, tiny_plan
from tests.engine.test_router_config import started

__all__ = ["run", "started"]

PROFILE = "h100-64g/llama-3.1-8b/vllm-0.8.5"
OPTIONS: dict[str, Any] = {"router": "least-work-left", "router_options": {"holders": "all", "off_plan": 2.0}}


def everywhere(made: Plan) -> Plan:
    """Return a plan with the adapters of all groups stored in each."""
    names = {each.name: each for group in made.groups for each in group.adapters}
    groups = []
    for group in made.groups:
        own = {each.name for each in group.adapters}
        rest = tuple(each.replace(share=0.0) for name, each in names.items() if name not in own)
        args = group.engine_args.replace(max_lora_rank=16)
        groups.append(group.replace(adapters=(*group.adapters, *rest), engine_args=args, profile=PROFILE))
    return made.replace(groups=tuple(groups), **OPTIONS).with_digest()


@pytest.fixture
def router(run: Run, started: list[RouterConfig], tmp_path: Path) -> InstanceRouter:
    """Router as `capplan serve PLAN` makes it, with idle instances."""
    everywhere(tiny_plan()).to_json(tmp_path / "p.json")
    result = run("serve", tmp_path / "p.json", "--model", "tiny-llama")
    assert result.exit_code == 0, result.output
    [config] = started
    for spec in config.specs:
        assert spec.adapters.keys() == {"a", "b", "shared"}
    assert [dict(spec.shares) for spec in config.specs] == [
        {"a": 1.0, "shared": 0.25, "b": 0.0},
        {"b": 1.0, "shared": 0.75, "a": 0.0},
    ]
    made = InstanceRouter([spec.shares for spec in config.specs], None, config.routing)
    for instance in (0, 1):
        made.report(instance, json.dumps(idle_state()).encode(), 1)
    return made


def test_an_idle_cluster_is_routed_by_the_placement(router: InstanceRouter) -> None:
    chosen = {}
    for name in ("a", "b"):
        for instance in (0, 1):
            router.report(instance, json.dumps(idle_state()).encode(), 10**6)
        chosen[name] = router.choose(name, 100, now_ns=10**6 + 1)
    assert chosen == {"a": 0, "b": 1}


def test_requests_leave_a_placement_that_is_busy(router: InstanceRouter) -> None:
    busy = {**idle_state(), "running": 30, "running_tokens": 9000, "queued": 20, "free_blocks": 0}
    busy["by_rank"] = {"8": [50, 20, 5000]}
    router.report(0, json.dumps(busy).encode(), 10**6)
    assert router.choose("a", 100, now_ns=10**6 + 1) == 1
    router.set_available(1, is_available=False)
    assert router.choose("a", 100, now_ns=10**6 + 2) == 0, "what is left"
    router.set_available(1, is_available=True)
    router.set_available(0, is_available=False)
    assert router.choose("a", 100, now_ns=10**6 + 3) == 1, "whose share is 0"


def test_a_router_is_fitted_to_the_profile_of_the_workload(
    run: Run, started: list[RouterConfig], tmp_path: Path
) -> None:
    shipped = load_profile(PROFILE)
    own = tmp_path / "own.json"
    own.write_text(shipped.replace(name="a/users/own").model_dump_json(), encoding="utf-8")
    document = {
        "version": 1,
        "base_model": shipped.model.hf_ids[0],
        "profile": "./own.json",
        "gpus": {"count": 2},
        "adapters": [{"name": "a", "rank": 8, "rate_rps": 0.1}, {"name": "b", "rank": 8, "rate_rps": 0.1}],
        "requests": {"prompt_tokens": {"mean": 100}, "output_tokens": {"mean": 50}},
        **OPTIONS,
    }
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps(document), encoding="utf-8")
    planned = run("plan", workload, "-o", tmp_path / "plan.json", "--seeds", 1)
    assert planned.exit_code == 0, planned.output
    command = ("serve", tmp_path / "plan.json", "--model", "tiny-llama", "--max-model-len", 512)
    assert "--workload FILE reads the profile of the plan's workload" in error_line(run(*command))
    assert run(*command, "--workload", workload).exit_code == 0
    rule = started[0].routing.rule
    assert rule is not None
    assert rule.models.any()
