"""Routers and workloads of served plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from capplan.serving.routers.choose import RoutingRule
from capplan.spec import Adapter, Group, Lengths, Plan, Profile, Workload
from capplan.spec.routing import MEAN_LENGTHS
from capplan.twin.cluster.routers import MODELLED, build_rule, plain_rule, served_router
from capplan.twin.cluster.scenario import Instance, build_cluster
from capplan.workload import Requests

_DEFAULT_MEANS = (512.0, 128.0)
"""Mean prompt and output tokens of a plan that does not have them."""


def served_rule(
    plan: Plan, groups: Sequence[Group], router: str, profiles: Mapping[str, Profile]
) -> RoutingRule:
    """Return the compiled form of a router for the running instances of groups of a plan.

    Parameters
    ----------
    plan
        The plan. Models of the router are fitted at the mean lengths in its provenance.
    groups
        Groups that run, with the engine settings that run.
    router
        Name of the router.
    profiles
        Profiles of the groups, by name; only for routers of `MODELLED`.

    Raises
    ------
    InputError
        For an unknown name.
    """
    workload = workload_of(plan, groups)
    prompt, output = workload.prompt_tokens.mean_tokens, workload.output_tokens.mean_tokens
    named = served_router(router, plan.router_options)
    if router not in MODELLED:
        return plain_rule(named, output)
    instances = [
        Instance.of(
            profiles[group.profile],
            group.engine_args,
            plan.shares_of(group),
            group.scheduling,
            group.queues,
        )
        for group in groups
        for _ in range(group.replicas)
    ]
    lengths = (np.array([mean], np.int32) for mean in (prompt, output))
    requests = Requests(np.zeros(1, np.int64), np.zeros(1, np.int32), *lengths)
    scenario = build_cluster(workload, instances, 1.0, 0, requests=requests)
    return build_rule(named, scenario)


def workload_of(plan: Plan, groups: Sequence[Group]) -> Workload:
    """Return the adapters of groups of a plan with their rates, and constant lengths.

    The lengths are the means in the plan's provenance, or assumed, and within the least `max_model_len`.
    """
    prompt, output = _mean_lengths(plan)
    longest = min(group.engine_args.max_model_len for group in groups)
    fit = min(1.0, longest / (prompt + output))
    known = {adapter.name: adapter for group in groups for adapter in group.adapters}
    return Workload(
        base_model=plan.base_model,
        adapters=[Adapter(name=a.name, rank=a.rank, rate_rps=a.rate_rps) for a in known.values()],
        base_rate_rps=next((group.base.rate_rps for group in groups if group.base is not None), None),
        prompt_tokens=Lengths(mean=max(1.0, fit * prompt)),
        output_tokens=Lengths(mean=max(1.0, fit * output)),
    )


def _mean_lengths(plan: Plan) -> tuple[float, float]:
    """Return the mean prompt and output tokens of a plan's requests."""
    found = []
    for name, default in zip(MEAN_LENGTHS, _DEFAULT_MEANS, strict=True):
        value = plan.provenance.get(name)
        is_length = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < 1e9
        found.append(float(value) if is_length else default)  # type: ignore[arg-type]
    return found[0], found[1]
