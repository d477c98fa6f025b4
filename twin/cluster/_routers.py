"""Routers of a cluster: from a name or parameters to what compiled code takes, also for served plans.

Models by which routers predict iterations of an instance are fitted to its step-latency model. Toppings'
performance models are eq. 2. The paper fits them on served iterations of 4 to 32 requests with ranks from 8
to 64 (section 5). Here the iterations are those that the profile's step-latency model predicts on that grid,
for requests of the mean length: whole iterations, the base model included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.models import StepFeatures, StepRanks, rank_ms, step_ms
from capplan.serving.routers import (
    BGMV,
    MBGMV,
    PREFILL_TOKEN,
    RANK_BLIND,
    ROUTERS,
    Dlora,
    Gateway,
    LeastWorkLeft,
    Performance,
    RoutingRule,
    Toppings,
    WorkModel,
    first_credit,
    router_code,
)
from capplan.spec import MEAN_LENGTHS, Adapter, Group, Lengths, Plan, Profile, RouterOptions, Workload
from capplan.twin.cluster._scenario import ClusterScenario, Instance, build_cluster
from capplan.twin.instance._scenario import NS_PER_S, Costs, Scenario
from capplan.workload import Requests

DECODE_BATCHES: Final = (4, 8, 12, 16, 20, 24, 28, 32)

PREFILL_BATCHES: Final = (1, 2, 4, 8)

PROMPTS: Final = (0.5, 1.0, 2.0)
"""Prompt lengths of prefill iterations in mean prompts; eq. 2 alone is fitted to mean prompts."""

RANKS: Final = (8, 16, 32, 64)

WORK_BATCHES: Final = (1, *DECODE_BATCHES, 64)

CONTEXTS: Final = (256.0, 1024.0, 4096.0)
"""Tokens of each request of a decode iteration, and its prompt in one of prefill, for `fit_work`."""

ADAPTERS: Final = (0.25, 0.5, 1.0)
"""Adapters of a decode iteration over its requests, for `fit_work`."""


class _Batch(NamedTuple):
    """A number of requests, half of them of one rank, half of another."""

    requests: int
    ranks: tuple[int, int]
    prompt_tokens: float = 0.0
    adapters_each: float = 1.0
    """Adapters over requests."""

    @property
    def rank_sum(self) -> float:
        return self.requests * sum(self.ranks) / 2.0

    def adapters(self, costs: Costs) -> float:
        """Return the number of adapters in a step, which the slots limit; at least one."""
        return min(max(1.0, self.requests * self.adapters_each), float(costs.a_max), costs.rank.size - 1.0)

    def work(self, form: int) -> float:
        """Return the variable of eq. 2 in one of its forms."""
        if form == RANK_BLIND:
            return float(self.requests)
        return self.rank_sum if form == MBGMV else float(self.requests * max(self.ranks))


def fit_performance(costs: Costs, requests: Requests, router: Toppings) -> Performance:
    """Fit eq. 2 in the router's form to the step-latency model of an instance at mean lengths."""
    prompt, output = mean_lengths(requests)
    decode = list(_batches(DECODE_BATCHES, (0.0,)))
    alpha, beta = _fit(
        np.array([[batch.work(router.code)] for batch in decode]),
        np.array([_decode_ms(costs, batch, prompt + output / 2.0) for batch in decode]),
    )
    prompts = (1.0,) if router.literal else PROMPTS
    prefill = list(_batches(PREFILL_BATCHES, tuple(factor * prompt for factor in prompts)))
    prefill_ms = np.array([_prefill_ms(costs, batch) for batch in prefill])
    columns = [[batch.work(router.code), batch.requests * batch.prompt_tokens] for batch in prefill]
    *slopes, prefill_beta = _fit(np.array(columns)[:, : 1 if router.literal else 2], prefill_ms)
    return Performance(
        prefill_alpha_ms=slopes[0],
        prefill_beta_ms=prefill_beta,
        prefill_ms_per_token=0.0 if router.literal else slopes[1],
        decode_alpha_ms=alpha,
        decode_beta_ms=beta,
    )


def fit_work(engine: Scenario) -> WorkModel:
    """Fit the linear model of least work left to the step-latency model of an instance.

    Of kernels that pad and those that do not, the form with the smaller error is taken.
    """
    _, model = min((_fit_work(engine, form) for form in (BGMV, MBGMV)), key=lambda each: each[0])
    return model


def _fit_work(engine: Scenario, form: int) -> tuple[float, WorkModel]:
    """Return the squared error of a form of the rank terms, and the model."""
    costs = engine.costs
    batches = [b._replace(adapters_each=a) for b in _batches(WORK_BATCHES, CONTEXTS) for a in ADAPTERS]
    decode = np.array(
        [[b.requests, b.work(form), b.requests * b.prompt_tokens, b.adapters(costs)] for b in batches]
    )
    decode_ms = np.array([_decode_ms(costs, batch, batch.prompt_tokens) for batch in batches])
    *per_decode, step = _fit(decode, decode_ms)
    batches = list(_batches(PREFILL_BATCHES, CONTEXTS))
    prefill = np.array([[b.requests * b.prompt_tokens, b.work(form) * b.prompt_tokens] for b in batches])
    prefill_ms = np.array([_prefill_ms(costs, batch) for batch in batches])
    *per_prefill, constant = _fit(prefill, prefill_ms)
    decode_error = decode @ per_decode + step - decode_ms
    prefill_error = prefill @ per_prefill + constant - prefill_ms
    model = WorkModel(
        step_ms=max(0.0, step),
        decode_ms=max(0.0, per_decode[0]),
        decode_ms_per_rank=max(0.0, per_decode[1]),
        kv_ms_per_token=max(0.0, per_decode[2]),
        prefill_ms_per_token=max(0.0, per_prefill[0]),
        prefill_ms_per_rank_token=max(0.0, per_prefill[1]),
        load_ms=float(costs.load_ns[1:].mean() * 1e-6) if costs.load_ns.size > 1 else 0.0,
        batch_tokens=int(engine.limits.max_num_batched_tokens),
        padded=form == BGMV,
        adapter_ms=max(0.0, per_decode[3]),
    )
    return float(decode_error @ decode_error + prefill_error @ prefill_error), model


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
    """Return the prediction of the step model."""
    features = StepFeatures(
        tokens=tokens,
        requests=float(batch.requests),
        kv_tokens=kv_tokens,
        adapters=batch.adapters(costs),
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
    """Return the compiled form of a router, by its name or parameters, for a cluster.

    Raise `InputError` for an unknown name, or performance models that are not one per instance.
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

    `prior_output_tokens` are assumed as mean output before any request has finished. Raise `InputError` for
    an unknown name.
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
