"""Search near the plan in force, with a price on moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from capplan.planner.problem.previous import PreviousInstance, count_moves
from capplan.planner.problem.problem import Assignment, Problem
from capplan.planner.search.local_search import (
    FleetSize,
    LocalSearch,
    UnchangedSearch,
    fleet_cost,
    fleet_size_of,
    fleet_sizes,
)
from capplan.spec import Objective

_LATENCY_GAIN: Final = 0.05
"""Relative gain in mean request time that is worth moving all adapters, for the objective min_latency."""
_MAX_EQUAL_FLEETS: Final = 4
"""Fleet sizes of equal cost to try."""

Placement = tuple[Assignment, ...]


def placement_cost(
    problem: Problem, placement: Placement, old: Sequence[PreviousInstance]
) -> tuple[float, float, int]:
    """Return GPUs or price with the price of moves, the other of the two, and the number of moves."""
    workload, moves = problem.workload, count_moves(problem, placement, old)
    fleet = fleet_size_of(problem, placement)
    first, second, _ = fleet_cost(problem, fleet, workload.objective)
    return first + (workload.move_cost or 0.0) * moves, second, moves


@dataclass(frozen=True)
class MoveSearch:
    """Search for the placement of least cost, with `move_cost` added for every adapter that moves."""

    problem: Problem
    old: tuple[PreviousInstance, ...]
    """Problem, and instances of the plan in force."""
    local: LocalSearch
    """Search from initial solutions with more and more moves."""
    _unchanged: dict[FleetSize, UnchangedSearch] = field(default_factory=dict)
    """Results of the initial solutions as they are, which a second search does not try again."""

    def search(self, known: Placement | None) -> Placement | None:
        """Return a placement near the plan in force if it costs less than the known one, else that.

        If none is known, return the first on the size in force or a larger one.
        """
        best = known
        least = (math.inf, math.inf, len(self.problem.shares)) if known is None else self.cost(known)
        for fleet in self._fleets(known):
            if self.local.timed_out or least[2] == 0 or self._least_cost(fleet) > least[0]:
                return best
            found = self._search_fleet(fleet, improving=known is not None)
            if found is not None and self.cost(found) < least:
                best, least = found, self.cost(found)
        return best

    def _search_fleet(self, fleet: FleetSize, improving: bool) -> Placement | None:
        """Return an initial solution on a fleet that holds as it is or, if `improving`, improved."""
        if fleet not in self._unchanged:
            self._unchanged[fleet] = self.local.search_unchanged(fleet)
        unchanged = self._unchanged[fleet]
        if unchanged.confirmed is not None or not improving:
            return unchanged.confirmed
        return self.local.search_improved(unchanged.refused)

    def count_moves(self, placement: Sequence[Assignment]) -> int:
        """Return the number of adapters that a placement moves."""
        return count_moves(self.problem, placement, self.old)

    def cost(self, placement: Placement) -> tuple[float, float, int]:
        """Return the cost of a placement with the price of its moves, its second cost, and the moves."""
        workload = self.problem.workload
        if workload.objective is not Objective.MIN_LATENCY:
            return placement_cost(self.problem, placement, self.old)
        moves = self.count_moves(placement)
        price = _LATENCY_GAIN * moves / max(1, len(workload.adapters))
        return self.local.mean_e2e_s(placement) * (1.0 + price), 0.0, moves

    def _least_cost(self, fleet: FleetSize) -> float:
        """Return the cost of a fleet without moves."""
        objective = self.problem.workload.objective
        return 0.0 if objective is Objective.MIN_LATENCY else fleet_cost(self.problem, fleet, objective)[0]

    def _fleets(self, known: Placement | None) -> list[FleetSize]:
        """Return the fleet sizes that can cost less than the known placement, cheapest first.

        These are the size in force, and those that cost no less than the known placement, or than the size in
        force if none is known. Of equal ones, those closest to the size in force come first.
        """
        problem, objective = self.problem, self.problem.workload.objective
        order = fleet_sizes(problem, len(self.local.data.groups), objective)
        names = [pool.name for pool in problem.pools]
        held = Counter(instance.pool for instance in self.old)
        current = tuple(min(held[name], most) for name, most in zip(names, order[-1], strict=True))

        def costs(fleet: FleetSize) -> tuple[float, float]:
            return fleet_cost(problem, fleet, objective)[:2]

        def distance(fleet: FleetSize) -> int:
            return sum(abs(new - old) for new, old in zip(fleet, current, strict=True))

        least = costs(current if known is None else fleet_size_of(problem, known))
        fleets = [fleet for fleet in order if fleet == current or costs(fleet) >= least]
        equal: Counter[tuple[float, float]] = Counter()
        nearest = []
        for fleet in sorted(fleets, key=lambda fleet: (costs(fleet), distance(fleet))):
            equal[costs(fleet)] += 1
            if equal[costs(fleet)] <= _MAX_EQUAL_FLEETS:
                nearest.append(fleet)
        return nearest
