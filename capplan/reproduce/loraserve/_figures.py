"""LoRAServe's figures: a system under a load, its highest load, operating points, one server; experiments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.models import disk_load_ms, gpu_load_ms
from capplan.reproduce._lab import Experiment, Lab, highest
from capplan.reproduce._results import Curve, Findings, mean_curve
from capplan.reproduce.loraserve._setting import LengthsOf, mixed, of_lengths, server, setting
from capplan.serving import adapter_bytes
from capplan.serving.rebalancing import AdapterDemand, place
from capplan.spec import ATTENTION_MODULES, Adapter, Lengths, RebalanceSettings, Renewal, Workload
from capplan.twin.cluster import ClusterResult, Instance, Rebalancing, TransferLink, simulate_cluster
from capplan.twin.instance import REJECTED

LORASERVE: Final = "loraserve"
OWN_RANK: Final = "loraserve-own-rank"
TOPPINGS: Final = "toppings-rank-blind"
RANK_AWARE: Final = "toppings"
CONTIGUOUS: Final = "slora-contiguous"
RANDOM: Final = "slora-random"
MOST_SERVERS: Final = 16
_STEP: Final = 1.25
Points: TypeAlias = tuple[tuple[int, float], ...]
"""Operating points by rank."""


@dataclass(frozen=True)
class Scene:
    """A mix of adapters on equal servers; `copies` of each adapter and of the traffic (weak scaling)."""

    mix: str
    arrivals: str = "poisson"
    servers: int = 4
    copies: int = 1
    model: str = "llama-7b"
    tp: int = 4
    engine: str = "authors"

    @property
    def horizon_s(self) -> float:
        return setting().mixes[self.mix].horizon_s

    def load(self, rps: float, seed: int) -> Workload:
        return mixed(self.mix, self.arrivals, self.copies, rps, seed)


@dataclass(frozen=True)
class Point:
    """An adapter of a rank alone on a server of a scene."""

    scene: Scene
    rank: int


@dataclass(frozen=True)
class Run:
    """A system on a scene under a load; `draw` numbers random placements."""

    scene: Scene
    system: str
    points: Points
    rps: float
    seed: int
    draw: int = 0


@dataclass(frozen=True)
class Alone:
    """One server with an adapter of each rank, requests of fixed lengths."""

    ranks: tuple[int, ...]
    rps: float
    seed: int
    prompt_tokens: int = 512
    output_tokens: int = 128
    model: str = "llama-7b"
    tp: int = 4
    engine: str = "authors"
    arrivals: Literal["poisson", "deterministic"] = "poisson"


def operating_point(case: Point) -> float:
    """Return the highest token rate of a server within the bound (section IV-A)."""
    scene, given = case.scene, setting()
    lengths = given.lengths[given.mixes[scene.mix].lengths]

    def alone(rps: float) -> Workload:
        return of_lengths(lengths, [Adapter(name="a", rank=case.rank, rate_rps=rps)])

    def holds(rps: float) -> bool:
        load = alone(rps)
        result = _static(load, [_instance(scene, load)], "round-robin", 0, scene.horizon_s)
        return p95_s(result, scene.horizon_s) <= given.bound_s

    return highest(holds, 8.0, _STEP, given.precision) * _tokens(alone(1.0))


def highest_rps(run: Run) -> float:
    """Return the highest load within the bound, searched from that of the run."""
    given = setting()
    return highest(lambda rps: _holds(replace(run, rps=rps)), run.rps, _STEP, given.precision)


def fewest_servers(run: Run) -> int:
    """Return the fewest servers that keep the bound, searched from those of the run."""

    def holds(servers: int) -> bool:
        return _holds(replace(run, scene=replace(run.scene, servers=servers)))

    servers = run.scene.servers
    while servers > 1 and holds(servers - 1):
        servers -= 1
    while servers < MOST_SERVERS and not holds(servers):
        servers += 1
    return servers


def _holds(run: Run) -> bool:
    return p95_s(serve(run), run.scene.horizon_s) <= setting().bound_s


def served(run: Run) -> dict[str, Any]:
    """Return the latencies of a run, and what its servers used.

    ``p95_s`` and ``tbt_ms`` over all requests; ``server_p95_s`` by server; ``emptiest`` by time step: the
    fewest adapters that a server used, and their ranks.
    """
    result, horizon_s = serve(run), run.scene.horizon_s
    requests, servers = result.requests, range(run.scene.servers)
    rank = np.array([0, *(adapter.rank for adapter in run.scene.load(run.rps, run.seed).adapters)])
    window = requests.arrival_s // setting().window_s
    emptiest = []
    for step in np.unique(window):
        used = [np.unique(requests.adapter[(window == step) & (requests.instance == at)]) for at in servers]
        fewest = min(used, key=len)
        emptiest.append((len(fewest), len({*rank[fewest].tolist()})))
    return {
        "p95_s": p95_s(result, horizon_s),
        "tbt_ms": result.itl_ms_mean,
        "server_p95_s": [p95_s(result, horizon_s, requests.instance == at) for at in servers],
        "emptiest": emptiest,
    }


def alone(case: Alone) -> dict[str, float]:
    """Return the P95 TTFT of the first rank, and the mean TTFT and time between tokens of all requests."""
    adapters = [
        Adapter(name=f"r{rank}", rank=rank, rate_rps=case.rps / len(case.ranks)) for rank in case.ranks
    ]
    lengths = LengthsOf(prompt=Lengths(mean=case.prompt_tokens), output=Lengths(mean=case.output_tokens))
    load = of_lengths(lengths, adapters, Renewal(process=case.arrivals))
    scene, horizon_s = Scene("", model=case.model, tp=case.tp, engine=case.engine), setting().alone_s
    result = _static(load, [_instance(scene, load)], "round-robin", case.seed, horizon_s)
    return {
        "p95_s": p95_s(result, horizon_s, result.requests.adapter == 1),
        "ttft_ms": 1e3 * result.ttft_s_mean,
        "tbt_ms": result.itl_ms_mean,
    }


def p95_s(result: ClusterResult, horizon_s: float, of: NDArray[np.bool_] | None = None) -> float:
    """Return the P95 TTFT, without requests that arrive too late to exceed the bound.

    A request without an answer counts with its wait so far, a rejected one as infinite.
    """
    requests = result.requests
    waited_s = np.where(np.isnan(requests.ttft_s), horizon_s - requests.arrival_s, requests.ttft_s)
    waited_s[requests.status == REJECTED] = np.inf
    counted = requests.arrival_s < horizon_s - setting().bound_s
    if of is not None:
        counted &= of
    return float(np.percentile(waited_s[counted], 95, method="higher")) if counted.any() else 0.0


def serve(run: Run) -> ClusterResult:
    scene, load = run.scene, run.scene.load(run.rps, run.seed)
    if run.system not in (LORASERVE, OWN_RANK):
        router = "plan-shares" if run.system in (CONTIGUOUS, RANDOM) else run.system
        instances = [_instance(scene, load, own) for own in held(run, load)]
        return _static(load, instances, router, run.seed, scene.horizon_s)
    model, tokens, points = server(scene.model, scene.tp, scene.engine).model, _tokens(load), dict(run.points)
    mix = setting().mixes[scene.mix]
    now = {
        rank: first / share
        for rank, first, share in zip(setting().ranks, mix.first or mix.shares, mix.shares, strict=True)
    }
    demands = [
        AdapterDemand(a.name, a.rank, a.rate_rps * now[a.rank] * tokens, adapter_bytes(model, a.rank))
        for a in load.adapters
    ]
    solve, solver = (_at_own_rank, "capplan") if run.system == OWN_RANK else (_algorithm_1, "loraserve")
    settings = RebalanceSettings(every_s=setting().window_s, forecast="linear", solver=solver)
    first = solve(demands, points, [()] * scene.servers)
    return simulate_cluster(
        load,
        [_instance(scene, load, own) for own in first],
        router="plan-shares",
        duration_s=scene.horizon_s,
        seed=run.seed,
        rebalance=Rebalancing(
            settings, points, replan=lambda now: solve(now.adapters, now.operating_points, now.stored)
        ),
    )


def _algorithm_1(
    demands: Sequence[AdapterDemand], points: Mapping[int, float], stored: Sequence[Collection[str]]
) -> Sequence[Mapping[str, float]]:
    return place(demands, points, len(stored), stored=stored).shares


def _at_own_rank(
    demands: Sequence[AdapterDemand], points: Mapping[int, float], stored: Sequence[Collection[str]]
) -> Sequence[Mapping[str, float]]:
    """Return the placement if an adapter's work did not depend on the largest rank beside it."""
    work = [replace(each, tok_s=each.tok_s / points[each.rank]) for each in demands]
    return _algorithm_1(work, dict.fromkeys(points, 1.0), stored)


def _static(
    load: Workload, instances: Sequence[Instance], router: Any, seed: int, horizon_s: float
) -> ClusterResult:
    return simulate_cluster(load, instances, router=router, duration_s=horizon_s, seed=seed)


def held(run: Run, load: Workload) -> list[Mapping[str, float] | None]:
    """Return the adapters of each server; None: all."""
    servers, names = run.scene.servers, [adapter.name for adapter in load.adapters]  # in order of rank
    if run.system not in (CONTIGUOUS, RANDOM):
        return [None] * servers
    if run.system == RANDOM:
        names = np.random.default_rng([run.seed, run.draw]).permutation(names).tolist()
    ends = [len(names) * number // servers for number in range(servers + 1)]
    return [dict.fromkeys(names[a:b], 1.0) for a, b in pairwise(ends)]


def _instance(scene: Scene, load: Workload, adapters: Mapping[str, float] | None = None) -> Instance:
    given = setting()
    return Instance(
        server(scene.model, scene.tp, scene.engine),
        a_max=len(load.adapters),
        s_max=max(adapter.rank for adapter in load.adapters),
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.engines[scene.engine].batch_tokens,
        max_model_len=given.max_model_len,
        adapters=adapters,
    )


def _tokens(load: Workload) -> float:
    return load.prompt_tokens.mean_tokens + load.output_tokens.mean_tokens


SHOWN: Final = {
    LORASERVE: "LoRAServe",
    TOPPINGS: "Toppings",
    CONTIGUOUS: "S-LoRA Contiguous",
    RANDOM: "S-LoRA Random",
}
"""The systems that the paper compares. Its Toppings knows the work of each server, not ranks."""
BASELINES: Final = tuple(SHOWN)[1:]
SKEWS: Final = ("uniform", "shifting", "exponential")
SIX: Final = {
    f"{arrivals}-{skew}": Scene(skew, arrivals) for arrivals in ("poisson", "deterministic") for skew in SKEWS
}
PRODUCTION: Final = {count: Scene(f"production-{count}") for count in (50, 100, 200)}
EXPONENTS: Final = {1 / 3: "skew-third", 1.0: "skew-1", 2.0: "skew-2", 3.0: "skew-3"}
LOW, HIGH = 8, 128
LONG_TOKENS: Final = 2000
MICRO_RPS: Final = 4.0
MICRO_BOUND_S: Final = 20.0
IDLE_RPS: Final = 0.02
"""One request at a time."""
Table = Mapping[str, Sequence[float]]
"""By system, a value per seed."""


def points_of(lab: Lab, scene: Scene) -> tuple[tuple[int, float], ...]:
    ranks, steady = setting().ranks, replace(scene, arrivals="poisson")
    return tuple(zip(ranks, lab.each(operating_point, [Point(steady, rank) for rank in ranks]), strict=True))


def each_run(
    lab: Lab, function: Callable[[Run], Any], runs: Iterable[tuple[Scene, str, float | Sequence[float]]]
) -> list[list[list[Any]]]:
    """Return the results of systems on scenes at loads, the same or one per seed: by seed, by draw."""
    listed = list(runs)
    points = {scene: points_of(lab, scene) for scene in dict.fromkeys(scene for scene, _, _ in listed)}
    cases, sizes = [], []
    for scene, system, rps in listed:
        draws = setting().draws if system == RANDOM else 1
        sizes.append(draws)
        known = points[scene] if system in (LORASERVE, OWN_RANK) else ()
        for at, seed in enumerate(lab.seeds):
            load = rps if isinstance(rps, float) else rps[at]
            cases += [Run(scene, system, known, load, seed, draw) for draw in range(draws)]
    found = iter(lab.each(function, cases))
    return [[[next(found) for _ in range(draws)] for _ in lab.seeds] for draws in sizes]


def _means(found: Sequence[Sequence[Sequence[Any]]], key: str) -> list[list[float]]:
    """Return a number of each run of `each_run` by seed, means over random placements."""
    return [[fmean(run[key] for run in draws) for draws in own] for own in found]


def rates(
    lab: Lab, scenes: Sequence[Scene], systems: Sequence[str] = tuple(SHOWN)
) -> list[dict[str, list[float]]]:
    """Return the highest loads of systems on scenes, per seed; means over random placements."""
    starts = [_sustained_rps(scene, points_of(lab, scene)) for scene in scenes]
    runs = [(scene, system, start) for scene, start in zip(scenes, starts, strict=True) for system in systems]
    found = iter(each_run(lab, highest_rps, runs))
    return [{system: [fmean(draws) for draws in next(found)] for system in systems} for _ in scenes]


def _sustained_rps(scene: Scene, points: Sequence[tuple[int, float]]) -> float:
    """Return the load of servers at their operating points, if ranks were never mixed."""
    mix = setting().mixes[scene.mix]
    lengths = setting().lengths[mix.lengths]
    tokens = lengths.prompt.mean_tokens + lengths.output.mean_tokens
    busy = sum(share * tokens / point for share, (_, point) in zip(mix.shares, points, strict=True))
    return scene.servers * sum(mix.shares) / busy


def _first(table: Table) -> list[float]:
    """Return whether LoRAServe sustains more than every baseline."""
    return [float(own > max(others)) for own, *others in _by_seed(table)]


def _by_seed(table: Table) -> list[tuple[float, ...]]:
    return list(zip(*(table[system] for system in SHOWN), strict=True))


def _over(tables: Sequence[Table], *systems: str) -> list[float]:
    """Return LoRAServe's load over that of systems, the largest of all tables and systems."""
    ratios = [
        [own / other for own, other in zip(table[LORASERVE], table[system], strict=True)]
        for table in tables
        for system in systems
    ]
    return _largest(ratios)


def _largest(by_case: Sequence[Sequence[float]]) -> list[float]:
    return [max(values) for values in zip(*by_case, strict=True)]


def _percent(ratios: Sequence[float]) -> list[float]:
    return [100.0 * (ratio - 1.0) for ratio in ratios]


def _curves(x: Sequence[float], tables: Sequence[Table]) -> list[Curve]:
    return [mean_curve(shown, x, [table[system] for table in tables]) for system, shown in SHOWN.items()]


def fig1(lab: Lab) -> Findings:
    """Rank 8 beside rank 128."""
    loads = (2.0, 3.0, MICRO_RPS)
    mixes = {"rank 8 alone": (LOW,), "beside rank 128": (LOW, HIGH)}
    cases = [Alone(ranks, rps, 0, engine="motivation") for ranks in mixes.values() for rps in loads]
    p95_s = _p95_s(lab, cases)
    alone_s, beside_s = p95_s[: len(loads)], p95_s[len(loads) :]
    return Findings(
        {"beside": _percent([b / a for a, b in zip(alone_s[-1], beside_s[-1], strict=True)])},
        [mean_curve(name, loads, own) for name, own in zip(mixes, (alone_s, beside_s), strict=True)],
    )


def _p95_s(lab: Lab, cases: Sequence[Alone]) -> list[list[float]]:
    return [[each["p95_s"] for each in own] for own in lab.by_seed(alone, cases)]


def _prefills(lab: Lab, servers: Iterable[tuple[str, int]]) -> list[dict[str, float]]:
    """Return TTFT and time between tokens at rank 128 over rank 8, one request at a time."""
    lengths = LONG_TOKENS, setting().max_model_len - LONG_TOKENS
    cases = [
        Alone((rank,), IDLE_RPS, 0, *lengths, model, tp, "sweeps", "deterministic")
        for model, tp in servers
        for rank in (LOW, HIGH)
    ]
    found = lab.each(alone, cases)
    pairs = zip(found[::2], found[1::2], strict=True)
    return [{name: high[name] / low[name] for name in ("ttft_ms", "tbt_ms")} for low, high in pairs]


def fig3(lab: Lab) -> Findings:
    """One request of Llama-7B by rank."""
    (found,) = _prefills(lab, [("llama-7b", 1)])
    sizes = (250, 500, 1000, 1500, LONG_TOKENS)
    cases = [
        Alone((rank,), IDLE_RPS, 0, tokens, 48, tp=1, engine="sweeps", arrivals="deterministic")
        for rank in setting().ranks
        for tokens in sizes
    ]
    times = iter([each["ttft_ms"] for each in lab.each(alone, cases)])
    curves = [
        Curve(name=f"rank {rank}", x=sizes, y=tuple(next(times) for _ in sizes)) for rank in setting().ranks
    ]
    decode_is_subtle = found["tbt_ms"] - 1.0 < 0.5 * (found["ttft_ms"] - 1.0)
    return Findings({"prefill": found["ttft_ms"], "decode": decode_is_subtle}, curves)


def fig4(lab: Lab) -> Findings:
    """Models."""
    found = _prefills(lab, [("llama-7b", 8), ("llama-30b", 4), ("llama-2-70b", 8)])
    percent = _percent([each["ttft_ms"] for each in found])
    return Findings({"70b": percent[-1], "grows": percent == sorted(percent)})


def fig5(lab: Lab) -> Findings:
    """Tensor parallelism."""
    one, eight = _prefills(lab, [("llama-7b", 1), ("llama-7b", 8)])
    (percent,) = _percent([eight["ttft_ms"]])
    return Findings({"tp8": percent, "falls": eight["ttft_ms"] < one["ttft_ms"]})


def fig6(lab: Lab) -> Findings:
    """4 req/s by rank."""
    ranks = setting().ranks
    p95_s = _p95_s(lab, [Alone((rank,), MICRO_RPS, 0, engine="motivation") for rank in ranks])
    keeps = {
        rank: [float(each <= MICRO_BOUND_S) for each in own] for rank, own in zip(ranks, p95_s, strict=True)
    }
    return Findings(
        {
            "low": [min(each) for each in zip(keeps[8], keeps[16], keeps[32], strict=True)],
            "r64": [1.0 - each for each in keeps[64]],
            "r128": [1.0 - each for each in keeps[128]],
        },
        [mean_curve("4 req/s", ranks, p95_s)],
    )


def fig14(_lab: Lab) -> Findings:
    """Fetching an adapter."""
    profile, link = server("llama-7b", 4, "authors"), TransferLink()
    local_ms = gpu_load_ms(profile.loading, HIGH, HIGH)
    size = adapter_bytes(profile.model, HIGH, ATTENTION_MODULES)
    remote_ms = 1e3 * (link.latency_s + size / link.bytes_per_s)
    return Findings({"remote": remote_ms / local_ms, "ssd": disk_load_ms(profile.loading, HIGH) / local_ms})


def points(lab: Lab) -> Findings:
    """Operating points."""
    found = dict(points_of(lab, SIX["poisson-uniform"]))
    curve = Curve(name="one server", x=tuple(found), y=tuple(each / 1e3 for each in found.values()))
    values = {"ratio": found[LOW] / found[HIGH], "r8": found[LOW] / 1e3, "r128": found[HIGH] / 1e3}
    return Findings(values, [curve])


def runs(lab: Lab) -> Findings:
    """Runs that the authors published."""
    scenes = {
        "uniform": SIX["poisson-uniform"],
        "production-50": PRODUCTION[50],
        "production-200": PRODUCTION[200],
    }
    loads = {"uniform": 32.0, "production-50": 25.0, "production-200": 25.0}
    found = each_run(lab, served, [(scene, LORASERVE, loads[name]) for name, scene in scenes.items()])
    values = {}
    for name, own in zip(scenes, found, strict=True):
        values[f"{name}-ttft"] = [run["p95_s"] for (run,) in own]
        values[f"{name}-tbt"] = [run["tbt_ms"] for (run,) in own]
    del values["uniform-tbt"]  # fixes the step
    return Findings(values)


def fig17(lab: Lab) -> Findings:
    """Production traces."""
    scenes = list(PRODUCTION.values())
    tables = rates(lab, scenes, (*SHOWN, RANK_AWARE))
    at = [
        (scene, [0.95 * rps for rps in table[LORASERVE]]) for scene, table in zip(scenes, tables, strict=True)
    ]
    saved = {}
    for system in (TOPPINGS, RANDOM):
        needed = each_run(lab, fewest_servers, [(scene, system, loads) for scene, loads in at])
        saved[system] = _largest(
            [
                [100.0 * (1.0 - scene.servers / fmean(draws)) for draws in own]
                for scene, own in zip(scenes, needed, strict=True)
            ]
        )
    return Findings(
        {
            **{f"first-{count}": _first(table) for count, table in zip(PRODUCTION, tables, strict=True)},
            "slora": _over(tables, RANDOM, CONTIGUOUS),
            "toppings": _percent(_over(tables, TOPPINGS)),
            "saved-toppings": saved[TOPPINGS],
            "saved-slora": saved[RANDOM],
            "rank-aware": _percent(_over(tables, RANK_AWARE)),
        },
        _curves(tuple(PRODUCTION), tables),
    )


def fig18(lab: Lab) -> Findings:
    """30 req/s of production, 100 adapters."""
    scene, adapters = PRODUCTION[100], 100
    systems = (*SHOWN, OWN_RANK)
    own, toppings, contiguous, random, at_own = each_run(
        lab, served, [(scene, each, 30.0) for each in systems]
    )
    emptiest = [run["emptiest"] for (run,) in own]
    baselines = (toppings, contiguous, random)
    worst = [[fmean(max(run["server_p95_s"]) for run in draws) for draws in each] for each in baselines]
    spread = [
        [fmean(max(run["server_p95_s"]) / min(run["server_p95_s"]) for run in draws) for draws in each]
        for each in baselines
    ]
    bound_s = setting().bound_s
    return Findings(
        {
            "storage": [adapters / fmean(used for used, _ in steps) for steps in emptiest],
            "own-rank": [adapters / fmean(used for used, _ in run["emptiest"]) for (run,) in at_own],
            "hot": [float(fmean(ranks == 1 for _, ranks in steps) > 0.5) for steps in emptiest],
            "timeouts": [float(min(others) > bound_s) for _, *others in zip(*worst, strict=True)],
            "even": [float(each < min(others)) for each, *others in zip(*spread, strict=True)],
            "ttft": [b["p95_s"] / a["p95_s"] for (a,), (b,) in zip(own, toppings, strict=True)],
        }
    )


def fig19(lab: Lab) -> Findings:
    """Six open traces."""
    scenes = list(SIX.values())
    tables = rates(lab, scenes, (*SHOWN, RANK_AWARE))
    skewed = [table for name, table in zip(SIX, tables, strict=True) if not name.endswith("uniform")]
    at_own = [
        (scene, system, table[baseline])
        for scene, table in zip(scenes, tables, strict=True)
        for baseline in BASELINES
        for system in (baseline, LORASERVE)
    ]
    p95_s = _means(each_run(lab, served, at_own), "p95_s")
    ratios = [
        [theirs / ours for theirs, ours in zip(*pair, strict=True)]
        for pair in zip(p95_s[::2], p95_s[1::2], strict=True)
    ]
    loads = tuple(float(rps) for rps in range(16, 45, 4))
    line = each_run(lab, served, [(scenes[0], system, rps) for system in SHOWN for rps in loads])
    means = iter([fmean(run["p95_s"] for draws in own for run in draws) for own in line])
    poisson = tables[: len(SKEWS)]
    return Findings(
        {
            **{f"first-{name}": _first(table) for name, table in zip(SIX, tables, strict=True)},
            "skewed": _over(skewed, TOPPINGS),
            "ttft": _largest(ratios),
            "contiguous": [float(a > max(others)) for a, *others in _across(poisson, CONTIGUOUS)],
            "random": [float(shifting < min(a, b)) for a, shifting, b in _across(poisson, RANDOM)],
            "over-random": _over(tables, RANDOM),
            "over-contiguous": _over(tables, CONTIGUOUS),
            "rank-aware": _over(tables, RANK_AWARE),
        },
        [Curve(name=shown, x=loads, y=tuple(next(means) for _ in loads)) for shown in SHOWN.values()],
    )


def _across(tables: Sequence[Table], system: str) -> list[tuple[float, ...]]:
    """Return per seed the loads of a system in all tables."""
    return list(zip(*(table[system] for table in tables), strict=True))


def fig20(lab: Lab) -> Findings:
    """Time between tokens."""
    scenes = list(SIX.values())
    at = [[0.8 * rps for rps in table[LORASERVE]] for table in rates(lab, scenes, (LORASERVE,))]
    wanted = [(scene, system, loads) for scene, loads in zip(scenes, at, strict=True) for system in SHOWN]
    found = each_run(lab, served, wanted)
    tbt_ms = _means(found, "tbt_ms")
    width = len(SHOWN)
    relative = [
        [ours / theirs for ours, theirs in zip(tbt_ms[first], tbt_ms[first + other], strict=True)]
        for first in range(0, len(tbt_ms), width)
        for other in range(1, width)
    ]
    by_seed = list(zip(*relative, strict=True))
    return Findings(
        {
            "cut": [100.0 * (1.0 - min(each)) for each in by_seed],
            "similar": [float(sum(ratio <= 1.05 for ratio in each) > len(each) / 2) for each in by_seed],
        }
    )


def fig21(lab: Lab) -> Findings:
    """Weak scaling."""
    clusters = (4, 8, 12)
    scenes = [replace(SIX["poisson-uniform"], servers=servers, copies=servers // 2) for servers in clusters]
    found = [table[LORASERVE] for table in rates(lab, scenes, (LORASERVE,))]
    at = [(scene, LORASERVE, 8.0 * scene.servers) for scene in scenes]
    p95_s = [[run["p95_s"] for (run,) in own] for own in each_run(lab, served, at)]
    four, eight, twelve = found
    return Findings(
        {
            "hold": [float(max(each) <= setting().bound_s) for each in zip(*p95_s, strict=True)],
            "load": four,
            "eight": [b / a for a, b in zip(four, eight, strict=True)],
            "twelve": [b / a for a, b in zip(four, twelve, strict=True)],
        },
        [mean_curve("LoRAServe", clusters, found)],
    )


def fig22(lab: Lab) -> Findings:
    """Rank skew."""
    wanted = [(Scene(mix), system, 36.0) for mix in EXPONENTS.values() for system in SHOWN]
    found = iter(_means(each_run(lab, served, wanted), "p95_s"))
    tables = [{system: next(found) for system in SHOWN} for _ in EXPONENTS]
    bound_s = setting().bound_s
    own = _across(tables, LORASERVE)
    random = _across(tables, RANDOM)
    return Findings(
        {
            "within": [float(max(each) <= bound_s) for each in own],
            "improves": [float(each[-1] < each[0]) for each in own],
            "contiguous": [float(min(each[2:]) > bound_s) for each in _across(tables, CONTIGUOUS)],
            "random-low": [float(each[0] <= bound_s) for each in random],
            "random-high": [float(each[-1] > bound_s) for each in random],
        },
        _curves(tuple(EXPONENTS), tables),
    )


def fig23(lab: Lab) -> Findings:
    """Larger models."""
    sizes = {7.0: ("llama-7b", 4), 30.0: ("llama-30b", 4), 70.0: ("llama-2-70b", 8)}
    tables = rates(lab, [replace(SIX["poisson-uniform"], model=model, tp=tp) for model, tp in sizes.values()])
    _, middle, large = tables
    falling = [float(a > b > c) for a, b, c in _across(tables, LORASERVE)]
    values = {"first-30b": _first(middle), "first-70b": _first(large), "lower": falling}
    return Findings(values, _curves(tuple(sizes), tables))


def fig24(lab: Lab) -> Findings:
    """Tensor parallelism of clusters."""
    degrees = (2, 4, 8)
    tables = rates(lab, [replace(SIX["poisson-uniform"], tp=tp) for tp in degrees])
    values = {f"first-tp{tp}": _first(table) for tp, table in zip(degrees, tables, strict=True)}
    return Findings(values, _curves(degrees, tables))


def profiles(lab: Lab) -> Findings:
    """Other engine terms."""
    engines = ("sweeps", "roofline")
    tables = rates(lab, [replace(SIX["poisson-uniform"], engine=engine) for engine in engines])
    values: dict[str, Sequence[float]] = {}
    for engine, table in zip(engines, tables, strict=True):
        values[engine] = table[LORASERVE]
        values[f"{engine}-ratio"] = [own / max(others) for own, *others in _by_seed(table)]
    return Findings(values)


EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    function.__name__: function
    for function in (
        fig1,
        fig3,
        fig4,
        fig5,
        fig6,
        fig14,
        points,
        runs,
        fig17,
        fig18,
        fig19,
        fig20,
        fig21,
        fig22,
        fig23,
        fig24,
        profiles,
    )
}
