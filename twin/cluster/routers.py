"""Routers of a cluster: from a name or parameters to what compiled code takes.

Toppings' performance models of an instance are eq. 2 fitted to iterations that the step model predicts. The
paper fits them on served iterations of 4 to 32 requests with ranks from 8 to 64 (section 5). Here the
iterations are those that the profile's step-latency model predicts on that grid, for requests of the mean
length: whole iterations, the base model included.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.models.step_latency import StepFeatures, StepRanks, rank_ms, step_ms
from capplan.serving.routers import Dlora, Gateway, Performance, Toppings, router_code
from capplan.serving.routers.choose import (
    ASK_ADAPTER,
    BLIND,
    DLORA,
    GATEWAY,
    SMOOTH_SHARES,
    TOPPINGS,
    RoutingRule,
)
from capplan.serving.routers.smooth_shares import first_credit
from capplan.serving.routers.toppings import PREFILL_TOKEN
from capplan.twin.cluster.scenario import ClusterScenario
from capplan.twin.scenario import NS_PER_S, Costs
from capplan.workload import Requests

NamedRouter: TypeAlias = str | Dlora | Gateway | Toppings

SLO_FACTOR: Final = 1.5
"""Toppings' SLO relative to inference without LoRA (section 7.4)."""


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
    if not isinstance(router, NamedRouter):
        raise InputError("must be the name of a router, or its parameters", router, "router")
    with_parameters = {"dlora": Dlora(), "inference-gateway": Gateway(), "toppings": Toppings()}
    chosen = with_parameters.get(router, router) if isinstance(router, str) else router
    rule = RoutingRule(
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


DECODE_BATCHES: Final = (4, 8, 12, 16, 20, 24, 28, 32)

PREFILL_BATCHES: Final = (1, 2, 4, 8)

PROMPTS: Final = (0.5, 1.0, 2.0)
"""Prompt lengths of prefill iterations in mean prompts; eq. 2 alone is fitted to mean prompts."""

RANKS: Final = (8, 16, 32, 64)


class _Batch(NamedTuple):
    """A number of requests, half of them of one rank, half of another."""

    requests: int
    ranks: tuple[int, int]
    prompt_tokens: float = 0.0

    @property
    def rank_sum(self) -> float:
        return self.requests * sum(self.ranks) / 2.0

    def work(self, kernel: str) -> float:
        """Return the variable of eq. 2."""
        return self.rank_sum if kernel == "mbgmv" else self.requests * max(self.ranks)


def fit_performance(costs: Costs, requests: Requests, router: Toppings) -> Performance:
    """Fit eq. 2 in the router's form to the step-latency model of an instance at mean lengths."""
    prompt, output = mean_lengths(requests)
    decode = list(_batches(DECODE_BATCHES, (0.0,)))
    alpha, beta = _fit(
        np.array([[batch.work(router.kernel)] for batch in decode]),
        np.array([_decode_ms(costs, batch, prompt + output / 2.0) for batch in decode]),
    )
    prompts = (1.0,) if router.literal else PROMPTS
    prefill = list(_batches(PREFILL_BATCHES, tuple(factor * prompt for factor in prompts)))
    prefill_ms = np.array([_prefill_ms(costs, batch) for batch in prefill])
    columns = [[batch.work(router.kernel), batch.requests * batch.prompt_tokens] for batch in prefill]
    *slopes, prefill_beta = _fit(np.array(columns)[:, : 1 if router.literal else 2], prefill_ms)
    return Performance(
        prefill_alpha_ms=slopes[0],
        prefill_beta_ms=prefill_beta,
        prefill_ms_per_token=0.0 if router.literal else slopes[1],
        decode_alpha_ms=alpha,
        decode_beta_ms=beta,
    )


def base_iteration_ms(costs: Costs, requests: Requests) -> float:
    """Return the decode iteration of the base model without slots in the middle of the paper's grid."""
    prompt, output = mean_lengths(requests)
    bare = costs._replace(a_max=0, s_max=0)
    middle = DECODE_BATCHES[len(DECODE_BATCHES) // 2 - 1]
    return _decode_ms(bare, _Batch(middle, (0, 0)), prompt + output / 2.0)


def mean_lengths(requests: Requests) -> tuple[float, float]:
    """Return mean prompt and output tokens; 1 without requests."""
    if requests.arrival_ns.size == 0:
        return 1.0, 1.0
    return float(requests.prompt_tokens.mean()), float(requests.output_tokens.mean())


def _batches(sizes: tuple[int, ...], prompts: tuple[float, ...]) -> Iterator[_Batch]:
    for requests, low, high, prompt in product(sizes, RANKS, RANKS, prompts):
        if low <= high:
            yield _Batch(requests, (low, high), prompt)


def _fit(columns: np.ndarray, milliseconds: np.ndarray) -> list[float]:
    """Return the slopes of a least-squares fit, followed by its constant."""
    with_constant = np.column_stack([columns, np.ones(len(columns))])
    found: list[float] = np.linalg.lstsq(with_constant, milliseconds)[0].tolist()
    return found


def _decode_ms(costs: Costs, batch: _Batch, tokens_each: float) -> float:
    ranks = _ranks(batch)._replace(
        decodes=float(batch.requests),
        lora_decodes=float(batch.requests) if max(batch.ranks) else 0.0,
        decode_rank_sum=batch.rank_sum,
    )
    return _iteration_ms(costs, batch, float(batch.requests), batch.requests * tokens_each, ranks)


def _prefill_ms(costs: Costs, batch: _Batch) -> float:
    tokens = batch.requests * batch.prompt_tokens
    ranks = _ranks(batch)._replace(
        prefills=float(batch.requests),
        lora_prefills=float(batch.requests),
        lora_prefill_tokens=tokens,
        prefill_rank_sum=batch.rank_sum,
        prefill_rank_tokens=batch.rank_sum * batch.prompt_tokens,
        prefill_mpairs=tokens * (batch.prompt_tokens + 1.0) / 2e6,
    )
    return _iteration_ms(costs, batch, tokens, 0.0, ranks)


def _ranks(batch: _Batch) -> StepRanks:
    return StepRanks(0.0, 0.0, 0.0, 0.0, 0.0, float(max(batch.ranks)), 0.0, 0.0, 0.0)


def _iteration_ms(costs: Costs, batch: _Batch, tokens: float, kv_tokens: float, ranks: StepRanks) -> float:
    """Return the prediction of the step model; every request has another adapter, up to the slots."""
    features = StepFeatures(
        tokens=tokens,
        requests=float(batch.requests),
        kv_tokens=kv_tokens,
        adapters=float(min(batch.requests, costs.a_max, costs.rank.size - 1)),
        a_max=float(costs.a_max),
        s_max=float(costs.s_max),
        waiting=0.0,
        slots_per_adapter=costs.slots_per_adapter,
        adapters_served=float(costs.adapters_served),
    )
    return float(
        step_ms(costs.form, costs.coefficients, features)
        + rank_ms(costs.form, costs.coefficients, float(costs.s_max), ranks)
    )
