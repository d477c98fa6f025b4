"""Routers of a cluster: from a name or parameters to what compiled code takes.

Routers and workloads of served plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.serving.routers import (
    PREFILL_TOKEN,
    ROUTERS,
    Dlora,
    Gateway,
    LeastWorkLeft,
    Performance,
    RoutingRule,
    Toppings,
    first_credit,
    router_code,
)
from capplan.spec import MEAN_LENGTHS, Adapter, Group, Lengths, Plan, Profile, RouterOptions, Workload
from capplan.twin.cluster._router_models import base_iteration_ms, fit_performance, fit_work, mean_lengths
from capplan.twin.cluster._scenario import ClusterScenario, Instance, build_cluster
from capplan.twin.instance._scenario import NS_PER_S, Scenario
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


NamedRouter: TypeAlias = str | Dlora | Gateway | LeastWorkLeft | Toppings

DEFAULTS: Final = MappingProxyType(
    {
        "dlora": Dlora(),
        "inference-gateway": Gateway(),
        "least-work-left": LeastWorkLeft(),
        "toppings": Toppings(),
        "toppings-rank-blind": Toppings(rank_aware=False),
    }
)
"""Parameters of the routers that have any."""

_OF_PARAMETERS: Final[Mapping[type, str]] = MappingProxyType(
    {
        Dlora: "dlora",
        Gateway: "inference-gateway",
        LeastWorkLeft: "least-work-left",
        Toppings: "toppings",
    }
)

MODELLED: Final = ("least-work-left", "toppings", "toppings-rank-blind")
"""Routers with models of the instances."""

NO_MIGRATION_S: Final = 1e9
"""Period of a router that moves no requests: longer than any simulation."""

SLO_FACTOR: Final = 1.5
"""Toppings' SLO relative to inference without LoRA (section 7.4)."""


def served_router(name: str, options: RouterOptions | None = None) -> NamedRouter:
    """Return a router as a running cluster has it, which does not move requests.

    Parameters of another router in `options` are left out.
    """
    if name == "least-work-left" and options is not None:
        return LeastWorkLeft(**options.parameters)
    return Dlora(period_s=NO_MIGRATION_S) if name == "dlora" else name


def build_rule(router: NamedRouter, scenario: ClusterScenario) -> RoutingRule:
    """Return the compiled form of a router.

    Parameters
    ----------
    router
        Its name, or the parameters of one that has any.
    scenario
        The cluster.

    Raises
    ------
    InputError
        For an unknown name, or performance models that are not one per instance.
    """
    rule = plain_rule(router, mean_lengths(scenario.requests)[1])
    chosen = DEFAULTS.get(router, router) if isinstance(router, str) else router
    if isinstance(chosen, Toppings):
        slo_ms = chosen.slo_ms
        if slo_ms is None:
            slo_ms = SLO_FACTOR * base_iteration_ms(scenario.engines[0].costs, scenario.requests)
        return rule._replace(models=_performance(chosen, scenario), slo_ms=float(slo_ms))
    if isinstance(chosen, LeastWorkLeft):
        rule = rule._replace(models=_models(chosen.models, scenario, fit_work, "LeastWorkLeft.models"))
    if ROUTERS[_name(chosen)].keeps_credit:
        return rule._replace(credit=first_credit(scenario.placement))
    return rule


def plain_rule(router: NamedRouter, prior_output_tokens: float) -> RoutingRule:
    """Return the compiled form of a router without models of instances and credits of shares.

    Parameters
    ----------
    router
        Its name, or the parameters of one that has any.
    prior_output_tokens
        Mean output tokens assumed before any request has finished.

    Raises
    ------
    InputError
        For an unknown name.
    """
    if not isinstance(router, NamedRouter):
        raise InputError("must be the name of a router, or its parameters", router, "router")
    chosen = DEFAULTS.get(router, router) if isinstance(router, str) else router
    name = _name(chosen)
    rule = RoutingRule(
        code=router_code(name),
        reads_state=ROUTERS[name].reads_state,
        reads_ranks=ROUTERS[name].reads_ranks,
        reads_adapter=ROUTERS[name].reads_adapter,
        turn=np.full(1, -1, np.int64),
        credit=np.zeros(0),
        weights=np.zeros(0),
        period_ns=0,
        excess=0.0,
        request_s=1.0,
        migration_s=0.0,
        kernel=chosen.code if isinstance(chosen, Toppings) else 0,
        models=np.zeros((0, 0)),
        slo_ms=0.0,
        prior_output_tokens=prior_output_tokens,
    )
    if isinstance(chosen, Dlora):
        return rule._replace(
            period_ns=max(1, round(chosen.period_s * NS_PER_S)),
            excess=float(chosen.excess),
            request_s=float(chosen.request_s),
            migration_s=float(chosen.migration_s),
        )
    if isinstance(chosen, Gateway):
        return rule._replace(weights=np.array([chosen.queue, chosen.kv_cache, chosen.lora], np.float64))
    if isinstance(chosen, LeastWorkLeft):
        return rule._replace(weights=chosen.parameters)
    return rule


def _name(router: object) -> str:
    return router if isinstance(router, str) else _OF_PARAMETERS[type(router)]


def _performance(router: Toppings, scenario: ClusterScenario) -> NDArray[np.float64]:
    """Return the performance models of all instances, one line each."""

    def fit(engine: Scenario) -> Performance:
        return fit_performance(engine.costs, scenario.requests, router)

    rows = _models(router.performance, scenario, fit, "Toppings.performance")
    if router.literal:
        rows[:, PREFILL_TOKEN] = 0.0
    return rows


def _models(
    given: Any, scenario: ClusterScenario, fit: Callable[[Scenario], Any], where: str
) -> NDArray[np.float64]:
    """Return the models of all instances, one line each: one per instance, one for all, or None: fitted."""
    if given is None:
        known = {id(engine.costs): engine for engine in scenario.engines}  # equal instances share theirs
        fitted = {key: fit(engine) for key, engine in known.items()}
        given = [fitted[id(engine.costs)] for engine in scenario.engines]
    elif not isinstance(given, Sequence):
        given = [given] * scenario.instances
    elif len(given) != scenario.instances:
        rule = f"must be one model, or one for each of {scenario.instances} instances"
        raise InputError(rule, len(given), where)
    return np.array([model.row for model in given], np.float64)
