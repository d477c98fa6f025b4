"""Routers with all they need to know of a cluster: from a name or parameters to what compiled code takes."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.serving.routing import Dlora, Gateway, Performance, Toppings, router_code
from capplan.serving.routing.choose import ASK_ADAPTER, BLIND, DLORA, GATEWAY, SMOOTH_SHARES, TOPPINGS, Rule
from capplan.serving.routing.smooth_shares import first_credit
from capplan.serving.routing.toppings import PREFILL_TOKEN
from capplan.twin.cluster.performance import base_iteration_ms, fit_performance, mean_lengths
from capplan.twin.cluster.scenario import ClusterScenario
from capplan.twin.scenario import NS_PER_S

NamedRouter: TypeAlias = str | Dlora | Gateway | Toppings

SLO_FACTOR: Final = 1.5
"""Toppings' SLO: so many times what inference without LoRA takes (section 7.4)."""


def build_rule(router: NamedRouter, scenario: ClusterScenario) -> Rule:
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
    if not isinstance(router, NamedRouter):
        raise InputError("must be the name of a router, or its parameters", router, "router")
    with_parameters = {"dlora": Dlora(), "inference-gateway": Gateway(), "toppings": Toppings()}
    chosen = with_parameters.get(router, router) if isinstance(router, str) else router
    rule = Rule(
        code=router_code(chosen) if isinstance(chosen, str) else -1,
        looks=True,
        asks_adapter=False,
        turn=np.full(1, -1, np.int64),
        credit=np.zeros(0),
        weights=np.zeros(0),
        period_ns=0,
        excess=0.0,
        request_s=1.0,
        migration_s=0.0,
        kernel=0,
        models=np.zeros((0, 0)),
        slo_ms=0.0,
        first_answer=mean_lengths(scenario.requests)[1],
    )
    if isinstance(chosen, Dlora):
        return rule._replace(
            code=DLORA,
            period_ns=max(1, round(chosen.period_s * NS_PER_S)),
            excess=float(chosen.excess),
            request_s=float(chosen.request_s),
            migration_s=float(chosen.migration_s),
        )
    if isinstance(chosen, Toppings):
        slo_ms = chosen.slo_ms
        if slo_ms is None:
            slo_ms = SLO_FACTOR * base_iteration_ms(scenario.engines[0].costs, scenario.requests)
        models = _models(chosen, scenario)
        return rule._replace(code=TOPPINGS, kernel=chosen.code, models=models, slo_ms=float(slo_ms))
    if isinstance(chosen, Gateway):
        weights = np.array([chosen.queue, chosen.kv_cache, chosen.lora], np.float64)
        return rule._replace(code=GATEWAY, asks_adapter=True, weights=weights)
    credit = first_credit(scenario.placement) if rule.code == SMOOTH_SHARES else rule.credit
    return rule._replace(looks=rule.code not in BLIND, asks_adapter=rule.code in ASK_ADAPTER, credit=credit)


def _models(router: Toppings, scenario: ClusterScenario) -> NDArray[np.float64]:
    """Return the performance models of all instances, one line each."""
    given = router.performance
    if given is None:
        every = [engine.costs for engine in scenario.engines]
        known = {id(costs): costs for costs in every}  # equal instances share theirs
        fitted = {key: fit_performance(costs, scenario.requests, router) for key, costs in known.items()}
        models = [fitted[id(costs)] for costs in every]
    elif isinstance(given, Performance):
        models = [given] * scenario.instances
    elif len(given) == scenario.instances:
        models = list(given)
    else:
        rule = f"must be one performance model, or one for each of {scenario.instances} instances"
        raise InputError(rule, len(given), "Toppings.performance")
    rows = np.array([model.row for model in models])
    if router.literal:
        rows[:, PREFILL_TOKEN] = 0.0
    return rows
