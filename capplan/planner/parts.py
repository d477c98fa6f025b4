"""What solvers place: every adapter as one part, hot ones split into equal shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from capplan.errors import InfeasibleError
from capplan.planner.bound import lower_bound_gpus
from capplan.planner.problem import Estimator, Part, Problem
from capplan.spec import Adapter


def whole_parts(problem: Problem) -> tuple[Part, ...]:
    """Return every adapter as one part."""
    return tuple(Part(a.name, a.rank, a.rate_rps) for a in problem.workload.adapters)


def in_input_order(problem: Problem) -> list[Part]:
    """Return the parts as the workload lists their adapters, shares of one adapter by their number."""
    position = {adapter.name: at for at, adapter in enumerate(problem.workload.adapters)}
    return sorted(problem.parts, key=lambda part: (position[part.name], part.number))


def split_hot(problem: Problem, estimator: Estimator) -> tuple[Part, ...]:
    """Return the parts of the problem, those that starve a GPU by themselves in the fewest shares.

    Among adapters that differ in nothing but their rates, the hottest are tried first, until one needs no
    split: a colder one needs none either.

    Raises
    ------
    InfeasibleError
        When one adapter alone does not fit in memory, or when its `max_replicas` or the GPUs allow too few
        shares.
    """
    require_memory(problem)
    split: dict[str, tuple[Part, ...]] = {}
    for kind in _kinds(problem):
        for adapter in sorted(kind, key=lambda a: (-a.rate_rps, a.name)):
            part = Part(adapter.name, adapter.rank, adapter.rate_rps)
            shares = _shares_needed(problem, estimator, part, adapter.max_replicas or problem.gpus)
            if shares == 1:
                break
            split[part.name] = equal_shares(part, shares)
    return tuple(share for part in problem.parts for share in split.get(part.name, (part,)))


def equal_shares(part: Part, count: int) -> tuple[Part, ...]:
    """Return an adapter as that many equal shares of its traffic."""
    return tuple(
        Part(part.name, part.rank, part.rate_rps / count, 1.0 / count, number) for number in range(count)
    )


def require_memory(problem: Problem) -> None:
    """Check that a GPU starts with nothing but the adapter of the largest rank.

    Raises
    ------
    InfeasibleError
        When it does not: then no solver has an answer.
    """
    largest = min(problem.parts, key=lambda part: (-part.rank, part.name))
    slots = problem.fixed_a_max or 1
    if not problem.fits_in_memory([largest], slots):
        raise InfeasibleError(
            f"memory: {slots} adapter slot(s) of rank {problem.s_max([largest])}, which adapter "
            f"{largest.name} needs, leave no room for one request of max_model_len "
            f"{problem.engine.max_model_len} on {problem.profile.gpu.name}",
            reason="memory",
        )


def _kinds(problem: Problem) -> Iterable[list[Adapter]]:
    """Return adapters that differ in name and rate only; in a trace every adapter is of its own kind."""
    kinds: dict[object, list[Adapter]] = {}
    for adapter in problem.workload.adapters:
        own = adapter.name if problem.workload.trace is not None else None
        key = (adapter.rank, adapter.prompt_tokens, adapter.output_tokens, own)
        kinds.setdefault(key, []).append(adapter)
    return kinds.values()


def _shares_needed(problem: Problem, estimator: Estimator, part: Part, replicas: int) -> int:
    slots, most = problem.fixed_a_max or 1, min(problem.gpus, replicas)
    if not estimator([part], slots).starved:
        return 1
    alone = replace(problem, workload=problem.workload.subset([part.name]))
    for count in range(max(2, lower_bound_gpus(alone)), most + 1):
        if not estimator([equal_shares(part, count)[0]], slots).starved:
            return count
    bounds = problem.workload.slo.latency_bounds()
    raise InfeasibleError(
        f"{'slo' if bounds else 'starvation'}: adapter {part.name} at {part.rate_rps:g} req/s breaks "
        f"{'a latency bound or ' if bounds else ''}served_fraction "
        f"{problem.workload.slo.served_fraction:g} even when spread over {most} instance(s) of its own with "
        f"headroom {problem.workload.headroom:g}",
        reason="slo" if bounds else "starvation",
    )
