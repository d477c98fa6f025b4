"""Models by which routers predict iterations of an instance, fitted to its step-latency model.

Toppings' performance models are eq. 2. The paper fits them on served iterations of 4 to 32 requests with
ranks from 8 to 64 (section 5). Here the iterations are those that the profile's step-latency model predicts
on that grid, for requests of the mean length: whole iterations, the base model included.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

import numpy as np

from capplan.models import StepFeatures, StepRanks, rank_ms, step_ms
from capplan.serving.routers import BGMV, MBGMV, RANK_BLIND, Performance, Toppings, WorkModel
from capplan.twin.instance._scenario import Costs, Scenario
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
