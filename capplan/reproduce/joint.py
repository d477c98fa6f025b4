"""Interaction of what the papers propose: caches, schedulers, loading, placements, routers together.

Setting, systems and their simulation; fractional designs of factors and the effects that follow; figures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import combinations, product
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.reproduce import toppings
from capplan.reproduce._lab import Experiment, Lab, highest
from capplan.reproduce._recipe import cached, read_recipe
from capplan.reproduce._results import Curve, Findings
from capplan.serving import adapter_bytes
from capplan.serving.rebalancing import AdapterDemand, place, place_near
from capplan.spec import (
    Adapter,
    ArrivalProcess,
    Lengths,
    Popularity,
    Profile,
    RebalanceSettings,
    SpecModel,
    Workload,
)
from capplan.twin.cluster import ClusterResult, Instance, Rebalancing, simulate_cluster
from capplan.twin.instance import REJECTED

Shares: TypeAlias = Sequence[Mapping[str, float] | None]
"""Adapters and their shares on every GPU; None: all, in equal shares."""
BASE: Final = "slora"
"""System whose highest load is that to which loads are relative."""
_PRECISION: Final = 0.02


class Design(SpecModel):
    """Size of the design, and the load that it is simulated at, relative to the base system's highest."""

    load: float
    configurations: int
    candidates: int
    fresh_seeds: int


class Setting(SpecModel):
    """The setting of the recipe."""

    load_ms: float
    """Of an adapter of rank 64."""
    ranks: tuple[int, ...]
    adapters_per_gpu_and_rank: int
    popularity: Popularity
    prompt_tokens: Lengths
    output_tokens: Lengths
    arrivals: ArrivalProcess
    duration_s: float
    warmup_s: float
    """Requests before it are served and not counted."""
    engine: Mapping[str, Any]
    """Engine settings by their names in `Instance`."""
    ttft_s: float
    tbt_ms: float
    gpus: tuple[int, ...]
    loads: tuple[float, ...]
    curve: tuple[float, ...]
    design: Design
    factors: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """By factor and level, fields of a workload."""

    def fields(self, levels: Levels) -> dict[str, Any]:
        """Return the fields of a workload that levels set."""
        merged: dict[str, Any] = {}
        for known, level in zip(self.factors.values(), levels, strict=True):
            for key, value in known[level].items():
                merged[key] = {**merged.get(key, {}), **value} if isinstance(value, Mapping) else value
        return merged

    def combinations(self) -> tuple[Levels, ...]:
        """Return the combinations of levels that a workload may have."""
        plain = self.workload(1, 1.0)
        return tuple(levels for levels in product(*self.factors.values()) if self._is_valid(plain, levels))

    def _is_valid(self, plain: Workload, levels: Levels) -> bool:
        try:
            plain.replace(**self.fields(levels))
        except InputError:
            return False
        return True

    def workload(self, gpus: int, rps: float) -> Workload:
        """Return the requests of a cluster."""
        per_rank = self.adapters_per_gpu_and_rank * gpus
        return self._of_adapters(
            [
                Adapter(name=f"r{rank}-{i}", rank=rank, rate_rps=rps * share / len(self.ranks))
                for rank in self.ranks
                for i, share in enumerate(self.popularity.shares(per_rank))
            ]
        )

    def of_rank(self, rank: int, rps: float) -> Workload:
        """Return steady requests of as many adapters as one GPU has on average, all of one rank."""
        count = len(self.ranks) * self.adapters_per_gpu_and_rank
        steady = [Adapter(name=f"a{i}", rank=rank, rate_rps=rps / count) for i in range(count)]
        return self._of_adapters(steady).replace(arrivals="poisson")

    def _of_adapters(self, adapters: Sequence[Adapter]) -> Workload:
        return Workload(
            base_model=engine_profile(self.load_ms).model.hf_ids[0],
            adapters=adapters,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            arrivals=self.arrivals,
        )


@cached
def engine_profile(load_ms: float) -> Profile:
    """Return the profile of the engine that all systems share."""
    return toppings.profile(copy_ms=load_ms)


@cached
def setting() -> Setting:
    """Return the setting of the recipe."""
    return read_recipe("joint").typed(Setting)


def papers() -> dict[str, Levels]:
    """Return the levels of the papers' systems."""
    return {name: tuple(levels) for name, levels in read_recipe("joint").systems.items()}


@dataclass(frozen=True)
class RankCase:
    """One GPU that serves adapters of one rank."""

    rank: int
    seed: int = 0


def operating_point(case: RankCase) -> float:
    """Return the highest token rate that a GPU sustains within the bound on TTFT, under the base system."""
    given = setting()
    tokens = given.prompt_tokens.mean_tokens + given.output_tokens.mean_tokens

    def holds(rps: float) -> bool:
        load = given.of_rank(case.rank, rps)
        engines = _instances(given, load, given.fields(papers()[BASE]), [None])
        answer = simulate_cluster(load, engines, duration_s=given.duration_s, seed=case.seed)
        return Counted.of(answer, given).ttft_p99_s <= given.ttft_s

    return tokens * highest(holds, 4.0, precision=_PRECISION)


@dataclass(frozen=True)
class SystemCase:
    """A system under a load; `points`: operating points by rank."""

    gpus: int
    levels: Levels
    seed: int
    points: tuple[tuple[int, float], ...]
    rps: float = 0.0


def highest_rps(case: SystemCase) -> float:
    """Return the highest load of a system whose P99 TTFT keeps the bound."""

    def holds(rps: float) -> bool:
        return _served(case, rps).ttft_p99_s <= setting().ttft_s

    return highest(holds, 6.0 * case.gpus, precision=_PRECISION)


def measured(case: SystemCase) -> dict[str, float]:
    """Return the metrics of a system under its load."""
    return asdict(_served(case, case.rps))


@dataclass(frozen=True)
class Counted:
    """Metrics of the requests after the warm-up."""

    ttft_p99_s: float
    attainment: float
    """Share of requests within the bounds on TTFT and on the mean time between tokens."""
    goodput_rps: float
    """Rate of these requests."""

    @classmethod
    def of(cls, answer: ClusterResult, given: Setting) -> Counted:
        """Count a request without a token with its wait so far, and a rejected one with all of the time."""
        requests, duration_s = answer.requests, given.duration_s
        ttft_s = np.where(np.isnan(requests.ttft_s), duration_s - requests.arrival_s, requests.ttft_s)
        ttft_s = np.where(requests.status == REJECTED, duration_s, ttft_s)
        between = np.maximum(1e3 * requests.e2e_s / requests.tpt_ms - 1.0, 1.0)
        tbt_ms = 1e3 * (requests.e2e_s - requests.ttft_s) / between  # NaN while a request runs
        counted = requests.arrival_s >= given.warmup_s
        kept = ((ttft_s <= given.ttft_s) & ~(tbt_ms > given.tbt_ms))[counted]
        goodput_rps = float(kept.sum()) / (duration_s - given.warmup_s)
        return cls(float(np.percentile(ttft_s[counted], 99)), float(kept.mean()), goodput_rps)


def _served(case: SystemCase, rps: float) -> Counted:
    given = setting()
    load, fields = given.workload(case.gpus, rps), given.fields(case.levels)
    placement = dict(zip(given.factors, case.levels, strict=True))["placement"]
    settings = fields.get("rebalance")
    answer = simulate_cluster(
        load,
        _instances(given, load, fields, PLACEMENTS[placement](load, case)),
        router=fields["router"],
        duration_s=given.duration_s,
        seed=case.seed,
        rebalance=settings and Rebalancing(RebalanceSettings(**settings), dict(case.points)),
    )
    return Counted.of(answer, given)


def _instances(given: Setting, load: Workload, fields: Mapping[str, Any], shares: Shares) -> list[Instance]:
    made = partial(
        Instance,
        engine_profile(given.load_ms),
        a_max=len(load.adapters),
        s_max=max(given.ranks),
        scheduler=fields["scheduler"],
        cache=fields["cache"],
        **given.engine,
    )
    return [made(adapters=None if own is None else dict(own)) for own in shares]


def _demands(load: Workload) -> list[AdapterDemand]:
    tokens = load.prompt_tokens.mean_tokens + load.output_tokens.mean_tokens
    model = engine_profile(setting().load_ms)
    return [
        AdapterDemand(
            each.name,
            each.rank,
            tokens * each.rate_rps,
            adapter_bytes(model.model, each.rank, model.engine.target_modules),
        )
        for each in load.adapters
    ]


def _at_random(load: Workload, case: SystemCase) -> Shares:
    """Return equally many adapters on every GPU."""
    names = np.random.default_rng(case.seed).permutation([each.name for each in load.adapters])
    return [dict.fromkeys(own.tolist(), 1.0) for own in np.array_split(names, case.gpus)]


def _by_loraserve(load: Workload, case: SystemCase) -> Shares:
    return place(_demands(load), dict(case.points), case.gpus).shares


def _by_capplan(load: Workload, case: SystemCase) -> Shares:
    empty = [dict[str, float]() for _ in range(case.gpus)]
    return place_near(_demands(load), dict(case.points), empty, empty, price_per_gb=0.0)


def _everywhere(_: Workload, case: SystemCase) -> Shares:
    return [None] * case.gpus


PLACEMENTS: Final[Mapping[str, Callable[[Workload, SystemCase], Shares]]] = {
    "random": _at_random,
    "loraserve": _by_loraserve,
    "capplan": _by_capplan,
    "everywhere": _everywhere,
}
"""Placements by the level of their factor."""


Levels: TypeAlias = tuple[str, ...]
"""A level of every factor, in the order of the recipe."""
Array: TypeAlias = NDArray[np.float64]
_PRIOR: Final = 1e-3
"""Information of every term before the first configuration."""
SHRINKAGE: Final = 1.0
"""Information that an interaction is 0: that of one configuration."""


@dataclass(frozen=True)
class Factors:
    """Factors with their levels, and the combinations that are possible."""

    levels: Mapping[str, Sequence[str]]
    possible: tuple[Levels, ...]

    @cached_property
    def _parts(self) -> Mapping[frozenset[str], Array]:
        """Terms by their factors; the effects of a factor's levels sum to 0."""
        main = {frozenset([name]): self._coded(place) for place, name in enumerate(self.levels)}
        both = {
            one | other: (left[:, :, None] * right[:, None, :]).reshape(len(self.possible), -1)
            for (one, left), (other, right) in combinations(main.items(), 2)
        }
        return {frozenset(): np.ones((len(self.possible), 1)), **main, **both}

    @cached_property
    def terms(self) -> Array:
        """Terms of each possible combination: the mean, main effects, interactions of two factors."""
        return np.hstack(list(self._parts.values()))

    def order(self) -> NDArray[np.int64]:
        """Return the number of factors of each term."""
        return np.concatenate([np.full(part.shape[1], len(names)) for names, part in self._parts.items()])

    def is_of(self, names: Collection[str]) -> NDArray[np.bool_]:
        """Return which terms are of exactly these factors."""
        return np.concatenate(
            [np.full(part.shape[1], own == set(names)) for own, part in self._parts.items()]
        )

    def _coded(self, place: int) -> Array:
        known = list(self.levels.values())[place]
        code = np.vstack([np.eye(len(known) - 1), -np.ones(len(known) - 1)])
        return code[[known.index(levels[place]) for levels in self.possible]]

    def design(self, first: Sequence[Levels], count: int) -> list[int]:
        """Return positions of so many possible combinations, a D-optimal choice one after the other."""
        chosen = [self.possible.index(levels) for levels in first]
        taken = self.terms[chosen]
        inverse = np.linalg.inv(_PRIOR * np.eye(self.terms.shape[1]) + taken.T @ taken)
        while len(chosen) < count:
            gain = np.einsum("ij,jk,ik->i", self.terms, inverse, self.terms)
            gain[chosen] = -1.0
            chosen.append(int(gain.argmax()))
            along = inverse @ self.terms[chosen[-1]]
            inverse -= np.outer(along, along) / (1.0 + along @ self.terms[chosen[-1]])
        return chosen

    def changed(self, factor: str, level: str) -> NDArray[np.int64]:
        """Return the position of each possible combination with this level instead of the factor's first.

        It is -1 where that is not possible, or the combination has not the first level.
        """
        place, first = list(self.levels).index(factor), self.levels[factor][0]
        position = {each: i for i, each in enumerate(self.possible)}
        instead = [(*each[:place], level, *each[place + 1 :]) for each in self.possible]
        return np.array(
            [
                position.get(new, -1) if each[place] == first else -1
                for each, new in zip(self.possible, instead, strict=True)
            ]
        )


@dataclass(frozen=True)
class Effects:
    """Effects on a response, which was found at some of the possible combinations."""

    factors: Factors
    chosen: Sequence[int]
    response: Array
    """By chosen combination and seed."""
    shrinkage: float = SHRINKAGE
    """Information that an interaction is 0; there are almost as many terms as configurations."""

    @cached_property
    def _inverse(self) -> Array:
        taken = self.factors.terms[self.chosen]
        shrunk = np.diag(np.sqrt(self.shrinkage) * (self.factors.order() == 2))
        return _floats(np.linalg.pinv(np.vstack([taken, shrunk]))[:, : len(taken)])

    @cached_property
    def fitted(self) -> Array:
        """Response of every possible combination by least squares, by seed."""
        return _floats(self.factors.terms @ (self._inverse @ self.response))

    @cached_property
    def fitted_by_main_effects(self) -> Array:
        """What main effects alone explain of it."""
        return self._explained(self.factors.order() < 2)

    def _explained(self, kept: NDArray[np.bool_]) -> Array:
        terms = self.factors.terms[:, kept]
        return _floats(terms @ np.linalg.lstsq(terms, self.fitted, rcond=None)[0])

    def left_out(self) -> Array:
        """Return the errors of chosen combinations if each is left out, if the others have all terms."""
        terms = self.factors.terms[self.chosen]
        leverage = np.einsum("ij,ji->i", terms, self._inverse)
        known = leverage < 1.0 - 1e-6
        wrong = self.response - self.fitted[self.chosen]
        return _floats(wrong[known] / (1.0 - leverage[known])[:, None])

    def main(self, factor: str, level: str) -> Array:
        """Return the mean difference of a level from the first one, by seed."""
        new = self.factors.changed(factor, level)
        plain = np.flatnonzero(new >= 0)
        return _floats((self.fitted[new[plain]] - self.fitted[plain]).mean(axis=0))

    def together(self, one: tuple[str, str], other: tuple[str, str]) -> Array:
        """Return what two levels add together beyond the sum of what each adds alone, by seed."""
        left, right = self.factors.changed(*one), self.factors.changed(*other)
        plain = np.flatnonzero((left >= 0) & (right >= 0) & (right[left] >= 0))
        fitted, left_alone, right_alone = self.fitted, left[plain], right[plain]
        beyond = fitted[right[left_alone]] - fitted[left_alone] - fitted[right_alone] + fitted[plain]
        return _floats(beyond.mean(axis=0))

    def size(self, one: str, other: str) -> Array:
        """Return the root mean square, over the possible combinations, of what no other term explains."""
        own = self.fitted - self._explained(~self.factors.is_of({one, other}))
        return _floats(np.sqrt((own**2).mean(axis=0)))


def _floats(values: Any) -> Array:
    return np.asarray(values, np.float64)


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


def effects(gpus: int, lab: Lab) -> Findings:
    """Simulate the design on a number of GPUs."""
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


EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    "wholes": wholes,
    "effects-4": partial(effects, 4),
    "effects-16": partial(effects, 16),
    "joint": joint,
}
