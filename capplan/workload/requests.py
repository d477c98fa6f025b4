"""The requests of a workload: who asks when, and how long prompt and output are."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference
from capplan.errors import InputError
from capplan.spec import (
    Adapter,
    Arrivals,
    BaseTraffic,
    Lengths,
    Renewal,
    ShiftingSkew,
    Stickiness,
    Trace,
    Workload,
)
from capplan.spec.limits import MAX_SIMULATED_S
from capplan.workload.arrivals import NS_PER_S, draw_arrivals, poisson_arrivals, repeat_recent
from capplan.workload.lengths import copula, length_sampler, length_score_sampler, sample_pairs
from capplan.workload.renewal import MAX_REQUESTS
from capplan.workload.sampling import (
    DiscreteTable,
    Streams,
    discrete_table,
    sample,
    sample_at,
    streams,
    uniforms,
)

_BASE: Final = (1,)
"""Branch of the seed for the traffic of the base model."""

Column: TypeAlias = NDArray[np.int32]


@by_reference
class Requests(NamedTuple):
    """Requests sorted by arrival: arrays of equal length."""

    arrival_ns: NDArray[np.int64]
    """Arrival in nanoseconds from the start."""
    adapter: NDArray[np.int32]
    """1 + position in ``workload.adapters``; 0 stands for the base model."""
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    predicted_tokens: NDArray[np.int32] = np.zeros(0, np.int32)
    """Outputs as predicted at arrival; empty: as they are."""


def draw_requests(
    workload: Workload, duration_s: float, seed: int, max_model_len: int, max_prompt_tokens: int | None = None
) -> Requests:
    """Return the requests that arrive in [0, ``duration_s``).

    Each adapter has an arrival process of its own. Poisson ones together are one of the summed rate whose
    requests choose their adapter in proportion. Arrivals, adapters, prompts, outputs and repetitions have
    random streams of their own, so that changing lengths leaves arrivals as they are. So has the traffic of
    the base model: adding it leaves the requests of adapters as they are.

    A workload with a trace is replayed instead, whatever the seed, with the recorded lengths as they are:
    refusing a request that is too long is up to the serving rules.

    Parameters
    ----------
    duration_s : float
        Seconds, above 0.
    seed : int
        At least 0; the same seed gives the same requests.
    max_model_len : int
        Where length distributions end, in tokens.
    max_prompt_tokens : int, optional
        What longer prompts are cut to after they were drawn; `max_model_len` unless given.

    Raises
    ------
    InputError
        For a parameter out of range, over 1e8 requests, or a mean length that cannot be reached.
    """
    if not 0 < duration_s <= MAX_SIMULATED_S:
        rule = f"must be a number of seconds above 0, at most {MAX_SIMULATED_S:g}"
        raise InputError(rule, duration_s, "duration_s")
    if workload.trace is not None:
        return _replay(workload, workload.trace, duration_s)
    if seed < 0:
        raise InputError("must be a whole number >= 0", seed, "seed")
    longest_prompt = max_model_len if max_prompt_tokens is None else max_prompt_tokens
    limits = (duration_s, max_model_len, longest_prompt)
    if workload.base is None:
        return _draw(workload, seed, (), *limits)
    alone = _draw(_base_alone(workload, workload.base), seed, _BASE, *limits)
    base = alone._replace(adapter=np.zeros_like(alone.adapter))
    if not workload.adapters:
        return base
    return _merge(_draw(workload, seed, (), *limits), base)


def _draw(
    workload: Workload,
    seed: int,
    branch: tuple[int, ...],
    duration_s: float,
    max_model_len: int,
    longest_prompt: int,
) -> Requests:
    """Draw the requests of the adapters from a branch of the seed."""
    keys = streams(seed, branch)
    arrival_ns, adapter = _arrivals(workload, duration_s, (seed, branch), keys)
    if workload.stickiness is not None:
        _repeat(adapter, workload.stickiness, keys)
    prompt_tokens, output_tokens = _lengths(workload, adapter, keys, max_model_len, longest_prompt)
    return Requests(arrival_ns, adapter, prompt_tokens, output_tokens)


def _base_alone(workload: Workload, base: BaseTraffic) -> Workload:
    """Return a workload whose only adapter has the traffic of the base model."""
    prompts, outputs = base.prompt_tokens, base.output_tokens
    stand_in = Adapter(
        name="base", rank=1, rate_rps=base.rate_rps, prompt_tokens=prompts, output_tokens=outputs
    )
    arrivals = base.arrivals or workload.arrivals
    if isinstance(arrivals, Renewal) and isinstance(arrivals.modulation, ShiftingSkew):
        arrivals = arrivals.replace(modulation=None)  # it moves requests between ranks
    changes = {"adapters": (stand_in,), "base": None, "arrivals": arrivals, "stickiness": None}
    return workload.model_copy(update=changes)


def _merge(first: Requests, second: Requests) -> Requests:
    """Return the requests of both by arrival, at one time those of the first before the others."""
    order = np.argsort(np.concatenate((first.arrival_ns, second.arrival_ns)), kind="stable")
    return Requests(
        np.concatenate((first.arrival_ns, second.arrival_ns))[order],
        np.concatenate((first.adapter, second.adapter))[order],
        np.concatenate((first.prompt_tokens, second.prompt_tokens))[order],
        np.concatenate((first.output_tokens, second.output_tokens))[order],
    )


def _arrivals(
    workload: Workload, duration_s: float, source: tuple[int, tuple[int, ...]], keys: Streams
) -> tuple[NDArray[np.int64], Column]:
    """Return when requests arrive, and whose adapter each asks for; `source` is a seed and its branch."""
    rates_rps = tuple(adapter.rate_rps for adapter in workload.adapters)
    total_rps = math.fsum(rates_rps)
    if total_rps * duration_s > MAX_REQUESTS:
        rule = f"rates x duration must not exceed {MAX_REQUESTS:g} requests"
        raise InputError(rule, total_rps * duration_s, "duration_s")
    horizon_ns = round(duration_s * NS_PER_S)
    if workload.arrivals == Arrivals.POISSON:
        arrival_ns = poisson_arrivals(keys.arrivals, total_rps, horizon_ns)
        adapter = np.empty(len(arrival_ns), np.int32)
        if len(arrival_ns):  # without any, all rates may be 0
            sample(adapter, _chooser(rates_rps), keys.adapters)
        return arrival_ns, adapter
    seed, branch = source
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(*branch, 0))))
    position, time_s = draw_arrivals(rng, workload, duration_s)
    arrival_ns = np.minimum((time_s * NS_PER_S).astype(np.int64), horizon_ns - 1)
    return arrival_ns, position.astype(np.int32) + np.int32(1)


@lru_cache(maxsize=64)
def _chooser(rates_rps: tuple[float, ...]) -> DiscreteTable:
    return discrete_table([(np.arange(1, len(rates_rps) + 1, dtype=np.int32), np.array(rates_rps))])


def _repeat(adapter: Column, stickiness: Stickiness, keys: Streams) -> None:
    recent = np.zeros(stickiness.last, np.int32)
    repeat_recent(adapter, recent, stickiness.probability, keys.repetitions, keys.repeated)


def _lengths(
    workload: Workload, adapter: Column, keys: Streams, max_model_len: int, longest_prompt: int
) -> tuple[Column, Column]:
    """Return each request's prompt and output length, in tokens."""
    prompts, prompts_of = _distinct_lengths(
        [workload.prompt_tokens, *(a.prompt_tokens for a in workload.adapters)]
    )
    outputs, outputs_of = _distinct_lengths(
        [workload.output_tokens, *(a.output_tokens for a in workload.adapters)]
    )
    prompt_table = length_sampler(prompts, max_model_len, longest_prompt)
    n = len(adapter)
    prompt_tokens, output_tokens = np.empty(n, np.int32), np.empty(n, np.int32)
    alike = len(prompts) == len(outputs) == 1
    correlation = workload.length_correlation or 0.0
    if correlation != 0.0 and workload.length_pairs is None:
        over_scores = length_score_sampler(outputs, max_model_len)
        of_prompt, of_output = (prompts_of[:0],) * 2 if alike else (prompts_of[adapter], outputs_of[adapter])
        tables = (prompt_table, over_scores, of_prompt, of_output)
        sample_pairs(prompt_tokens, output_tokens, *tables, keys.prompts, keys.outputs, copula(correlation))
        return prompt_tokens, output_tokens
    output_table = length_sampler(outputs, max_model_len, max_model_len)
    if alike and workload.length_pairs is None:
        sample(prompt_tokens, prompt_table, keys.prompts)
        sample(output_tokens, output_table, keys.outputs)
        return prompt_tokens, output_tokens
    for_prompt = uniforms(keys.prompts, n)
    sample_at(prompt_tokens, prompt_table, prompts_of[adapter], for_prompt)
    sample_at(output_tokens, output_table, outputs_of[adapter], uniforms(keys.outputs, n))
    if workload.length_pairs is not None:
        rows = np.flatnonzero((prompts_of + outputs_of)[adapter] == 0)
        chosen = (for_prompt[rows] * len(workload.length_pairs)).astype(np.int64)
        prompt_tokens[rows] = np.minimum(workload.length_pairs.prompt_tokens[chosen], longest_prompt)
        output_tokens[rows] = np.minimum(workload.length_pairs.output_tokens[chosen], max_model_len)
    return prompt_tokens, output_tokens


def _distinct_lengths(lengths: list[Lengths | None]) -> tuple[tuple[Lengths, ...], Column]:
    """Return the distinct lengths, and which of them each adapter has; the first is that of None."""
    kinds: dict[Lengths, int] = {}
    which = np.zeros(len(lengths), np.int32)
    for number, own in enumerate(lengths):
        if own is not None:
            which[number] = kinds.setdefault(own, len(kinds))
    return tuple(kinds), which


def _replay(workload: Workload, trace: Trace, duration_s: float) -> Requests:
    """Return the trace up to ``duration_s``, adapters numbered as in the workload."""
    number = {adapter.name: position for position, adapter in enumerate(workload.adapters, start=1)}
    if workload.base is not None:
        number[workload.base_model] = 0
    renumber = np.array([number[name] for name in trace.names], dtype=np.int32)
    end = int(np.searchsorted(trace.arrival_ns, math.ceil(duration_s * NS_PER_S), side="left"))
    return Requests(  # of copies: for arrays that cannot be written to, numba would compile the twin again
        trace.arrival_ns[:end].copy(),
        renumber[trace.adapter[:end]],
        trace.prompt_tokens[:end].copy(),
        trace.output_tokens[:end].copy(),
    )
