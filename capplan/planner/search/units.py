"""What moves as one: parts of adapters that stay together, and where each such unit may be."""

from __future__ import annotations

from dataclasses import dataclass

from capplan.planner.problem import Part, Problem


@dataclass(frozen=True)
class Unit:
    """Parts that are placed together; mostly one.

    Attributes
    ----------
    parts
        Of different adapters, each the same share.
    pools
        Numbers of the pools that it may be in.
    foes
        Adapters that must not be on its instance.
    """

    parts: tuple[Part, ...]
    pools: frozenset[int]
    foes: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """Adapters in it."""
        return frozenset(part.name for part in self.parts)


def units_of(problem: Problem) -> tuple[Unit, ...]:
    """Return the units of a problem, in the order of its parts."""
    constraints = problem.constraints
    grouped: dict[tuple[str, int], list[Part]] = {}
    for part in problem.parts:
        grouped.setdefault((constraints.bundle[part.name], part.number), []).append(part)
    everywhere = frozenset(range(len(problem.pools)))
    units = []
    for (first, _), parts in grouped.items():
        pin = constraints.pool.get(first)
        pools = everywhere if pin is None else {n for n in everywhere if problem.pools[n].name == pin}
        foes = frozenset[str]().union(*(constraints.apart.get(part.name, ()) for part in parts))
        units.append(Unit(tuple(parts), frozenset(pools), foes))
    return tuple(units)
