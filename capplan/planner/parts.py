"""From adapters to what is placed: an adapter too hot for one GPU is split into equal shares."""

from __future__ import annotations

from capplan.errors import InfeasibleError
from capplan.planner.problem import Estimator, Part, Problem


def whole_parts(problem: Problem) -> tuple[Part, ...]:
    """Return every adapter as one part."""
    return tuple(Part(a.name, a.rank, a.rate_rps) for a in problem.workload.adapters)


def split_hot(problem: Problem, estimator: Estimator) -> tuple[Part, ...]:
    """Return the parts of the problem, with every adapter that starves a GPU by itself split into the fewest shares.

    Adapters are tried from the one that asks for most tokens downwards, until one needs no split: a colder one needs
    none either.

    Raises
    ------
    InfeasibleError
        When its `max_replicas`, or the GPUs, allow too few shares.
    """
    whole = sorted(problem.parts, key=lambda part: (-problem.offered_tok_s(part), part.name))
    split: dict[str, tuple[Part, ...]] = {}
    for part in whole:
        shares = _shares_needed(problem, estimator, part)
        if shares == 1:
            break
        split[part.name] = equal_shares(part, shares)
    return tuple(share for part in problem.parts for share in split.get(part.name, (part,)))


def equal_shares(part: Part, count: int) -> tuple[Part, ...]:
    """Return an adapter as that many equal shares of its traffic."""
    return tuple(
        Part(part.name, part.rank, part.rate_rps / count, 1.0 / count, number) for number in range(count)
    )


def _shares_needed(problem: Problem, estimator: Estimator, part: Part) -> int:
    adapter = next(a for a in problem.workload.adapters if a.name == part.name)
    most = min(problem.gpus, adapter.max_replicas or problem.gpus)
    slots = problem.fixed_a_max or 1
    if not problem.fits_in_memory([part], slots):
        raise InfeasibleError(
            f"memory: {slots} slot(s) of rank {problem.s_max([part])} for adapter {part.name} leave no room for one "
            f"request of max_model_len {problem.engine.max_model_len} on {problem.profile.gpu.name}",
            reason="memory",
        )
    for count in range(1, most + 1):
        if not estimator([equal_shares(part, count)[0]], slots).starved:
            return count
    bounds = problem.workload.slo.latency_bounds()
    raise InfeasibleError(
        f"{'slo' if bounds else 'starvation'}: adapter {part.name} at {part.rate_rps:g} req/s breaks "
        f"{'a latency bound or ' if bounds else ''}served_fraction {problem.workload.slo.served_fraction:g} even when "
        f"spread over {most} GPU(s) of its own with headroom {problem.workload.headroom:g}",
        reason="slo" if bounds else "starvation",
    )
