"""Models of the routers of served plans, fitted to the engines that run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capplan import Plan
from capplan.cli.serve import unverified_overrides
from capplan.datasets import load_profile
from capplan.fleet import RouterConfig
from capplan.spec import PLAN_ROUTER, RebalanceSettings, Scheduler
from capplan.twin.cluster import MODELLED, served_rule
from tests.cli.conftest import Run, run
from tests.cli.examples import small_plan
from tests.engine.test_router_config import started
from tests.engine.test_router_registry import moving_flags, moving_plan

pytestmark = pytest.mark.process

__all__ = ["moving_plan", "run", "started"]


@pytest.mark.parametrize("router", MODELLED)
@pytest.mark.parametrize(("flags", "slots"), [([], 2), (["--max-loras", 3], 3), (["--scheduler", "fifo"], 2)])
def test_models_of_a_router_are_those_of_the_engines_that_run(
    run: Run,
    started: list[RouterConfig],
    moving_plan: Path,
    router: str,
    flags: list[Any],
    slots: int,
) -> None:
    """A plan with slots of rank 16 in one group, of rank 64 in the other, and equal ones for re-balancing."""
    plan = Plan.from_json(moving_plan)
    small, large = plan.groups
    args = large.engine_args.replace(max_lora_rank=64)
    plan.replace(groups=(small, large.replace(engine_args=args))).to_json(moving_plan)
    options = ["--router", router, "--rebalance", 60, *flags, *moving_flags(moving_plan.parent)]
    result = run("serve", "--unverified", "--model", "tiny-llama", *options, moving_plan)
    assert result.exit_code == 0, result.output
    [cluster] = started
    scheduler = Scheduler(policy="fifo") if "--scheduler" in flags else None
    equal = {"engine_args": args.replace(max_loras=slots), "scheduler": scheduler}
    groups = [group.replace(**equal) for group in plan.groups]
    rule = served_rule(plan, groups, router, {small.profile: load_profile(small.profile)})
    assert cluster.routing.rule is not None
    assert np.array_equal(cluster.routing.rule.models, rule.models)
    other = served_rule(plan, plan.groups, router, {small.profile: load_profile(small.profile)})
    assert not np.array_equal(rule.models, other.models)


def test_settings_of_the_command_line_that_were_not_verified_are_named() -> None:
    plan = small_plan()
    as_planned = plan.groups
    for router in (None, PLAN_ROUTER):
        assert unverified_overrides(plan, router, None, as_planned) == ()
    router, rebalance = unverified_overrides(plan, "toppings", RebalanceSettings(every_s=60.0), as_planned)
    assert "not verified with router toppings instead of smooth-shares" in router
    assert "not verified with re-balancing every 60 s instead of none" in rebalance
    moving = plan.replace(router="toppings", rebalance=RebalanceSettings(every_s=60.0))
    assert unverified_overrides(moving, "toppings", moving.rebalance, as_planned) == ()
    (slower,) = unverified_overrides(moving, None, RebalanceSettings(every_s=90.0), as_planned)
    assert "every 90 s instead of that of every 60 s" in slower
    args = {"max_num_seqs": 8}
    fewer = [group.replace(engine_args=group.engine_args.replace(**args)) for group in plan.groups]
    queued = [fewer[0].replace(scheduler=Scheduler(policy="sjf")), *fewer[1:]]
    seqs, scheduler = unverified_overrides(plan, None, None, queued)
    assert "not verified with max_num_seqs 8 instead of 256 (group g0, g1)" in seqs
    assert "not verified with another scheduler (group g0)" in scheduler
