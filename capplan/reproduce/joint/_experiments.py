"""Figures of the interaction study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.reproduce._lab import Experiment, Lab
from capplan.reproduce._recipe import cached
from capplan.reproduce._results import Curve, Findings
from capplan.reproduce.joint._design import Effects, Factors, Levels
from capplan.reproduce.joint._setting import (
    BASE,
    RankCase,
    SystemCase,
    highest_rps,
    measured,
    operating_point,
    papers,
    setting,
)

_BETTER: Final = 0.9
"""P99 TTFT over another system's that counts as better."""
JOINT: Final = "joint"


@dataclass(frozen=True)
class Bench:
    """Simulates systems on the workloads of seeds, at loads relative to the base system's highest."""

    lab: Lab
    seeds: tuple[int, ...]

    def knees_rps(self, gpus: int, systems: Sequence[Levels]) -> NDArray[np.float64]:
        """Return highest loads by system and seed."""
        points = self._points()
        cases = [SystemCase(gpus, levels, seed, points) for levels in systems for seed in self.seeds]
        return np.array(self.lab.each(highest_rps, cases)).reshape(len(systems), -1)

    def measured(
        self, gpus: int, load: float, systems: Sequence[Levels]
    ) -> Mapping[str, NDArray[np.float64]]:
        """Return metrics by name, system and seed."""
        points, (knees,) = self._points(), self.knees_rps(gpus, [papers()[BASE]]).tolist()
        cases = [
            SystemCase(gpus, levels, seed, points, load * knee)
            for levels in systems
            for seed, knee in zip(self.seeds, knees, strict=True)
        ]
        found = self.lab.each(measured, cases)
        return {name: np.array([each[name] for each in found]).reshape(len(systems), -1) for name in found[0]}

    def log_ttft(self, gpus: int, load: float, systems: Sequence[Levels]) -> NDArray[np.float64]:
        """Return logarithms of the P99 TTFT by system and seed."""
        return np.log(self.measured(gpus, load, systems)["ttft_p99_s"])

    def _points(self) -> tuple[tuple[int, float], ...]:
        ranks = setting().ranks
        found = self.lab.each(operating_point, [RankCase(rank) for rank in ranks])
        return tuple(zip(ranks, found, strict=True))


def settings() -> list[tuple[int, float]]:
    """Return the numbers of GPUs and loads that systems are compared at."""
    return [(gpus, load) for gpus in setting().gpus for load in setting().loads]


@cached
def factors() -> Factors:
    """Return the factors of the study."""
    given = setting()
    return Factors({name: tuple(levels) for name, levels in given.factors.items()}, given.combinations())


def wholes(lab: Lab) -> Findings:
    """Simulate the papers' systems."""
    bench, systems = Bench(lab, lab.seeds), papers()
    values = {f"knee-{gpus}": bench.knees_rps(gpus, [papers()[BASE]])[0].tolist() for gpus in setting().gpus}
    for gpus, load in settings():
        found = bench.measured(gpus, load, list(systems.values()))["ttft_p99_s"]
        values |= {f"{name}-{gpus}-{load:g}": own.tolist() for name, own in zip(systems, found, strict=True)}
    return Findings(values)


def fitted(lab: Lab, gpus: int) -> Effects:
    """Simulate the design and return the effects."""
    size, known = setting().design, factors()
    chosen = known.design(list(papers().values()), size.configurations)
    systems = [known.possible[i] for i in chosen]
    return Effects(known, chosen, Bench(lab, lab.seeds).log_ttft(gpus, size.load, systems))


def effects(gpus: int) -> Experiment:
    """Return the experiment of a number of GPUs."""
    return partial(_effects, gpus)


def _effects(gpus: int, lab: Lab) -> Findings:
    found = fitted(lab, gpus)
    rows = lab.recipe.figure(f"effects-{gpus}").rows
    return Findings({row.id: _effect(found, row.id).tolist() for row in rows})


def _effect(found: Effects, row: str) -> NDArray[np.float64]:
    """Return the value of a row by its id: a level, two levels, or two factors."""
    if row == "error":
        return _percent(np.median(np.abs(found.left_out()), axis=0))
    parts = [part.partition("=") for part in row.split("*")]
    if len(parts) == 1:
        return _percent(found.main(parts[0][0], parts[0][2]))
    one, other = ((factor, level) for factor, _, level in parts)
    return np.exp(found.together(one, other)) if one[1] else _percent(found.size(one[0], other[0]))


def _percent(logarithm: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(100.0 * np.expm1(logarithm))


def joint(lab: Lab) -> Findings:
    """Choose the joint system, and compare it with the papers' on fresh seeds."""
    found = {gpus: fitted(lab, gpus) for gpus in setting().gpus}
    system = chosen(lab, found)
    fresh = Bench(lab, tuple(seed + setting().design.fresh_seeds for seed in lab.seeds))
    values, below = _compared(fresh, system)
    for gpus, own in found.items():
        base, at = (own.factors.possible.index(levels) for levels in (papers()[BASE], system))
        added = own.fitted_by_main_effects
        values[f"main-effects-{gpus}"] = np.exp(added[at] - added[base]).tolist()
        logs = Bench(lab, lab.seeds).log_ttft(gpus, setting().design.load, [system, papers()[BASE]])
        values[f"simulated-{gpus}"] = np.exp(logs[0] - logs[1]).tolist()
    return Findings({**values, **below}, _curves(fresh, system))


def chosen(lab: Lab, found: Mapping[int, Effects]) -> Levels:
    """Return the joint system: of two rounds of candidates, the best in the setting where it is worst."""
    known, count = factors(), setting().design.candidates
    fits, responses = (
        np.mean([getattr(each, name).mean(axis=1) for each in found.values()], axis=0)
        for name in ("fitted", "response")
    )
    design, order = next(iter(found.values())).chosen, np.argsort(fits).tolist()
    first = dict.fromkeys([*order[:count], *(design[i] for i in np.argsort(responses)[:count])])
    best = _best(lab, [known.possible[i] for i in first])
    near = [levels for i in order if _changes(levels := known.possible[i], best) == 1]
    return _best(lab, [best, *near[:count]])


def _changes(levels: Levels, others: Levels) -> int:
    return sum(one != other for one, other in zip(levels, others, strict=True))


def _best(lab: Lab, systems: Sequence[Levels]) -> Levels:
    bench = Bench(lab, lab.seeds)
    worst = np.full(len(systems), -np.inf)
    for gpus, load in settings():
        of_papers = bench.log_ttft(gpus, load, list(papers().values())).mean(axis=1).min()
        worst = np.maximum(worst, bench.log_ttft(gpus, load, systems).mean(axis=1) - of_papers)
    return systems[int(worst.argmin())]


def _compared(bench: Bench, system: Levels) -> tuple[dict[str, list[float] | float], dict[str, bool]]:
    """Return the joint system over the best paper's by setting, and whether it is below each of them."""
    systems = papers()
    values: dict[str, list[float] | float] = {}
    below = dict.fromkeys(systems, True)
    better = 0
    for gpus, load in settings():
        metrics = bench.measured(gpus, load, [system, *systems.values()])
        logs = np.log(metrics["ttft_p99_s"])
        over = (logs[0] - logs[1:]).mean(axis=1)
        best = 1 + int(over.argmax())
        below = {name: below[name] and bool(own <= 0.0) for name, own in zip(systems, over, strict=True)}
        better += bool(np.exp(over.max()) <= _BETTER)
        at = f"{gpus}-{load:g}"
        values[f"ttft-{at}"] = np.exp(logs[0] - logs[best]).tolist()
        kept = metrics["attainment"]
        values[f"attainment-{at}"] = (100.0 * (kept[0] - kept[best])).tolist()
        if load == max(setting().loads):
            goodput = metrics["goodput_rps"]
            values[f"goodput-{at}"] = (goodput[0] / goodput[best]).tolist()
    for gpus in setting().gpus:
        knees = bench.knees_rps(gpus, [system, *systems.values()])
        values[f"knee-{gpus}"] = (knees[0] / knees[1 + int(knees[1:].mean(axis=1).argmax())]).tolist()
    return values | {"better": float(better)}, below


def _curves(bench: Bench, system: Levels) -> list[Curve]:
    """Return the P99 TTFT by load, means over seeds."""
    named = {f"{JOINT}: {', '.join(system)}": system, **papers()}
    loads = setting().curve
    curves = []
    for gpus in setting().gpus:
        ttft = [bench.measured(gpus, load, list(named.values()))["ttft_p99_s"].mean(axis=1) for load in loads]
        curves += [
            Curve(name=f"{name}, {gpus} GPUs", x=loads, y=own)
            for name, own in zip(named, np.transpose(ttft).tolist(), strict=True)
        ]
    return curves
