"""The requests of a workload: who asks when, and how long prompt and output are."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from capplan.errors import InputError
from capplan.spec import Arrivals, Lengths, Stickiness, Trace, Workload
from capplan.workload.arrivals import draw_arrivals, repeat_recent
from capplan.workload.discrete import Discrete, discrete, invert
from capplan.workload.length_tables import length_table
from capplan.workload.renewal import MAX_REQUESTS

NS_PER_S: Final = 1_000_000_000
_MAX_DURATION_S: Final = 9e9  # int64 nanoseconds end at 292 years


class Requests(NamedTuple):
    """Requests sorted by arrival: arrays of equal length."""

    arrival_ns: NDArray[np.int64]
    """Arrival in nanoseconds from the start."""
    adapter: NDArray[np.int32]
    """1 + position in ``workload.adapters``; 0 stands for the base model."""
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]


def draw_requests(workload: Workload, duration_s: float, seed: int, max_model_len: int) -> Requests:
    """Return the requests that arrive in [0, ``duration_s``).

    Each adapter has an arrival process of its own. Poisson ones together are one of the summed rate whose
    requests choose their adapter in proportion. Arrivals, adapters, prompts, outputs and repetitions have
    random streams of their own, so that changing lengths leaves arrivals as they are.

    A workload with a trace is replayed instead, whatever the seed, with the recorded lengths as they are:
    refusing a request that is too long is up to the serving rules.

    Parameters
    ----------
    duration_s : float
        Seconds, above 0.
    seed : int
        At least 0; the same seed gives the same requests.
    max_model_len : int
        Longest prompt, and longest output, drawn, in tokens.

    Raises
    ------
    InputError
        For a parameter out of range, over 1e8 requests, or a mean length that cannot be reached.
    """
    if not 0 < duration_s <= _MAX_DURATION_S:
        rule = f"must be a number of seconds above 0, at most {_MAX_DURATION_S:g}"
        raise InputError(rule, duration_s, "duration_s")
    if workload.trace is not None:
        return _replay(workload, workload.trace, duration_s)
    expected = workload.total_rate_rps * duration_s
    if expected > MAX_REQUESTS:
        raise InputError(
            f"rates x duration must not exceed {MAX_REQUESTS:g} requests", expected, "duration_s"
        )
    if seed < 0:
        raise InputError("must be a whole number >= 0", seed, "seed")
    streams = np.random.SeedSequence(seed).spawn(5)
    times, choices, prompts, outputs, repetitions = (
        np.random.Generator(np.random.PCG64(stream)) for stream in streams
    )
    horizon_ns = round(duration_s * NS_PER_S)
    if workload.arrivals == Arrivals.POISSON:
        arrival_ns = _arrivals(times, expected, horizon_ns)
        adapter = _choose(choices.random(len(arrival_ns)), tuple(a.rate_rps for a in workload.adapters))
    else:
        position, time_s = draw_arrivals(times, workload, duration_s)
        arrival_ns = np.minimum((time_s * NS_PER_S).astype(np.int64), horizon_ns - 1)
        adapter = position.astype(np.int32) + np.int32(1)
    n = len(arrival_ns)
    if workload.stickiness is not None:
        adapter = _sticky(repetitions, workload.stickiness, adapter)
    for_prompt, for_output = prompts.random(n), outputs.random(n)
    if workload.length_correlation != 0.0:
        for_output = _correlated(for_prompt, for_output, workload.length_correlation)
    lengths = [workload.lengths_of(adapter) for adapter in workload.adapters]
    prompt = [workload.prompt_tokens, *(prompts_of for prompts_of, _ in lengths)]
    output = [workload.output_tokens, *(outputs_of for _, outputs_of in lengths)]
    prompt_tokens = _lengths(for_prompt, adapter, prompt, max_model_len)
    output_tokens = _lengths(for_output, adapter, output, max_model_len)
    if workload.length_pairs is not None:
        own = [a.prompt_tokens is not None or a.output_tokens is not None for a in workload.adapters]
        rows = np.flatnonzero(~np.array([False, *own])[adapter])
        chosen = (for_prompt[rows] * len(workload.length_pairs)).astype(np.int64)
        prompt_tokens[rows] = np.minimum(workload.length_pairs.prompt_tokens[chosen], max_model_len)
        output_tokens[rows] = np.minimum(workload.length_pairs.output_tokens[chosen], max_model_len)
    return Requests(arrival_ns, adapter, prompt_tokens, output_tokens)


def _sticky(
    rng: np.random.Generator, stickiness: Stickiness, adapter: NDArray[np.int32]
) -> NDArray[np.int32]:
    repeats = rng.random(len(adapter)) < stickiness.probability
    return repeat_recent(adapter, repeats, rng.random(len(adapter)), stickiness.last)


def _correlated(
    first: NDArray[np.float64], second: NDArray[np.float64], correlation: float
) -> NDArray[np.float64]:
    """Return uniform numbers whose normal scores correlate with those of ``first`` (a Gaussian copula)."""
    scores = correlation * ndtri(first) + math.sqrt(1.0 - correlation**2) * ndtri(second)
    uniform: NDArray[np.float64] = ndtr(scores)
    return np.minimum(uniform, np.nextafter(1.0, 0.0))


def _arrivals(rng: np.random.Generator, expected: float, horizon_ns: int) -> NDArray[np.int64]:
    """Return the times of a Poisson process with ``expected`` arrivals on average, in [0, horizon)."""
    n = int(rng.poisson(expected))
    # n sorted uniform numbers are the partial sums of n + 1 exponential ones over their total.
    sums = np.cumsum(rng.standard_exponential(n + 1))
    times_ns: NDArray[np.int64] = (sums[:-1] * (horizon_ns / sums[-1])).astype(np.int64)
    return np.minimum(times_ns, horizon_ns - 1, out=times_ns)  # rounding can reach the horizon itself


def _choose(uniform: NDArray[np.float64], rates_rps: tuple[float, ...]) -> NDArray[np.int32]:
    """Return the number of each request's adapter, chosen by rate; without requests all rates may be 0."""
    if len(uniform) == 0:
        return np.zeros(0, dtype=np.int32)
    return invert(_chooser(rates_rps), uniform) + np.int32(1)


@lru_cache(maxsize=64)
def _chooser(rates_rps: tuple[float, ...]) -> Discrete:
    return discrete(np.array(rates_rps))


def _lengths(
    uniform: NDArray[np.float64], adapter: NDArray[np.int32], by_adapter: list[Lengths], max_model_len: int
) -> NDArray[np.int32]:
    """Return each request's length under the distribution of its adapter."""
    kinds: dict[Lengths, int] = {}
    kind_of_adapter = np.array([kinds.setdefault(lengths, len(kinds)) for lengths in by_adapter])
    tables = [length_table(lengths, max_model_len) for lengths in kinds]
    if len(tables) == 1:
        return tables[0].draw(uniform)
    kind = kind_of_adapter[adapter]
    order = np.argsort(kind, kind="stable")
    cuts = np.cumsum(np.bincount(kind, minlength=len(tables)))[:-1]
    tokens = np.empty(len(uniform), dtype=np.int32)
    for table, rows in zip(tables, np.split(order, cuts), strict=True):
        tokens[rows] = table.draw(uniform[rows])
    return tokens


def _replay(workload: Workload, trace: Trace, duration_s: float) -> Requests:
    """Return the trace up to ``duration_s``, adapters numbered as in the workload."""
    number = {adapter.name: position for position, adapter in enumerate(workload.adapters, start=1)}
    renumber = np.array([number[name] for name in trace.names], dtype=np.int32)
    end = int(np.searchsorted(trace.arrival_ns, math.ceil(duration_s * NS_PER_S), side="left"))
    return Requests(
        trace.arrival_ns[:end],
        renumber[trace.adapter[:end]],
        trace.prompt_tokens[:end],
        trace.output_tokens[:end],
    )
