"""Setting of the interaction study: factors and their levels, workloads, placements, one simulated system."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, Final, TypeAlias

import numpy as np

from capplan.errors import InputError
from capplan.reproduce import toppings
from capplan.reproduce._recipe import cached, read_recipe
from capplan.reproduce._search import highest
from capplan.reproduce.joint._design import Levels
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
