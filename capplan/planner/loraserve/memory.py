"""How many adapters stay on a server's GPU: all that it serves, or as many as its memory holds.

LoRAServe runs on S-LoRA, whose adapters share one pool of memory with the KV cache: there is no number of
slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from capplan.planner.problem import Assignment, Part, Problem, distinct_adapters


def most_slots(problem: Problem, parts: Sequence[Part]) -> int:
    """Return the largest number of slots that fits in memory, at most the adapters there.

    A number that the workload fixes stays. Where not even one slot fits, the answer is 1 all the same.
    """
    if problem.fixed_a_max is not None:
        return problem.fixed_a_max
    everyone = tuple(parts)
    fits, most = 1, distinct_adapters(parts)
    while fits < most:
        middle = (fits + most + 1) // 2
        if problem.fits_in_memory(Assignment(everyone, middle)):
            fits = middle
        else:
            most = middle - 1
    return fits
