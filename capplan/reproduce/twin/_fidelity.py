"""Error of the twin, and of surrogates learned from it, on measured runs (sections 8.2 and 8.3).

Also the twin's dependence on the draw of arrivals, and its cost.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

from capplan.datasets import load_profile
from capplan.datasets.published import (
    LENGTHS,
    MAX_NUM_SEQS,
    PUBLISHED,
    TOKEN_BUDGET,
    UTILIZATION,
    PublishedModel,
    PublishedRun,
    published_runs,
)
from capplan.errors import InfeasibleError
from capplan.models import load_surrogate
from capplan.models.calibration import smape
from capplan.models.surrogates import feature_vector
from capplan.reproduce._lab import Lab
from capplan.reproduce._results import Curve, Findings
from capplan.reproduce.twin._setting import numbered, published_profile, setting
from capplan.spec import DEFAULT_MAX_MODEL_LEN, EngineArgs, Lengths, Profile, Unpredictable, Workload
from capplan.twin import SimulationResult, simulate, simulate_detailed
from capplan.twin.dataset import generate_dataset
from capplan.workload import draw_requests

METRICS: Final = {"throughput": "throughput_tok_s", "itl": "itl_ms_mean", "ttft": "ttft_s_mean_charged"}
"""Fields of simulated and of measured runs."""
VARIANTS: Final = ("original", "mean")
Metrics: TypeAlias = dict[str, float]
_WINDOW_S: Final = 300.0
_OWN_PEAK: Final = """
import json, pathlib, resource, sys
from capplan import Workload, simulate
workload, profile, settings = json.load(sys.stdin)
simulate(Workload(**workload), profile, **settings)
status = pathlib.Path("/proc/self/status")  # of this process alone, unlike ru_maxrss
known = status.read_text().split("VmHWM:")[1].split()[0] if status.exists() else 0
print(known or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def published_model(name: str) -> PublishedModel:
    """Return the measured model of a name of the setting."""
    return next(each for each in PUBLISHED if each.profile == setting().models[name])


@dataclass(frozen=True)
class Fitted:
    """A profile fitted to the runs that are not judged."""

    model: str
    folder: str


def fitted(case: Fitted) -> str:
    return published_profile(
        Path(case.folder), published_model(case.model), (setting().fitted_on,)
    ).model_dump_json()


def held_out_profiles(lab: Lab) -> dict[str, str]:
    """Return the fitted profile of each model as JSON."""
    cases = [Fitted(model, str(lab.measurements())) for model in setting().models]
    return {case.model: found for case, found in zip(cases, lab.each(fitted, cases), strict=True)}


@dataclass(frozen=True)
class Judged:
    """The judged runs of a model, simulated with one seed."""

    model: str
    variant: str
    seed: int
    folder: str
    profile: str


def judged_runs(model: str, folder: Path) -> list[PublishedRun]:
    """Return the measured runs that the twin is judged on."""
    return published_runs(folder, published_model(model), (setting().judged_on,))


def simulated(case: Judged) -> list[Metrics]:
    """Return the metrics of every judged run."""
    profile = Profile.model_validate_json(case.profile)
    runs = judged_runs(case.model, Path(case.folder))
    return [_metrics(_simulated_run(run, case.variant, case.seed, profile)) for run in runs]


def _simulated_run(run: PublishedRun, variant: str, seed: int, profile: Profile) -> SimulationResult:
    workload = run.workload.at_rates_times(run.sent_share)
    if variant == "mean":
        workload = workload.replace(**_mean_lengths(run.model))
    return simulate(workload, profile, seed=seed, **run.settings)


def _metrics(found: SimulationResult) -> Metrics:
    return {name: getattr(found, field) for name, field in METRICS.items()}


def table1(lab: Lab) -> Findings:
    """Compare the twin with the measured runs."""
    profiles, folder = held_out_profiles(lab), str(lab.measurements())
    cases = [
        Judged(model, variant, seed, folder, profiles[model])
        for model, variant, seed in product(setting().models, VARIANTS, lab.seeds)
    ]
    values: dict[str, list[float]] = {}
    for case, found in zip(cases, lab.each(simulated, cases), strict=True):
        runs = judged_runs(case.model, Path(folder))
        for name, error in _errors(runs, found).items():
            values.setdefault(f"{case.model}-{case.variant}-{name}", []).append(error)
    return Findings(values)


def _errors(runs: Sequence[PublishedRun], found: Sequence[Metrics]) -> dict[str, float]:
    errors = {}
    for name, field in METRICS.items():
        measured = np.array([getattr(run, field) for run in runs])
        predicted = np.array([each[name] for each in found])
        known = np.isfinite(measured) & np.isfinite(predicted)
        if name == "itl":
            known &= [run.itl_is_reliable for run in runs]
        errors[name] = smape(predicted[known], measured[known])
    return errors


def fig8(lab: Lab) -> Findings:
    """Compare curves over adapters: Qwen, ranks 8 and 16, 8 slots, mean lengths."""
    profile, folder = held_out_profiles(lab)["qwen"], str(lab.measurements())
    (answers,) = lab.by_seed(simulated, [Judged("qwen", "mean", 0, folder, profile)])
    runs = judged_runs("qwen", Path(folder))
    rows = [
        at for at, run in enumerate(runs) if run.a_max == min(setting().predictable.slots) and run.s_max == 16
    ]
    shown = [runs[at] for at in rows]
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for found in answers:
        for name, error in _errors(shown, [found[at] for at in rows]).items():
            values[name].append(error)
    curves = []
    for regime, rates in setting().rates_rps.items():
        own = [at for at in rows if max(each.rate_rps for each in runs[at].workload.adapters) == max(rates)]
        own.sort(key=lambda at: len(runs[at].workload.adapters))
        x = tuple(len(runs[at].workload.adapters) for at in own)
        means = tuple(float(np.mean([found[at]["throughput"] for found in answers])) for at in own)
        measured = tuple(runs[at].throughput_tok_s for at in own)
        curves += [Curve(name=f"{regime} rates, twin", x=x, y=means)]
        curves += [Curve(name=f"{regime} rates, measured", x=x, y=measured)]
    return Findings(values, curves)


@dataclass(frozen=True)
class Scenario:
    """One simulated hour of the shipped profile of a model; without slots one per adapter is loaded."""

    model: str
    rates: str
    ranks: tuple[int, ...]
    adapters: int
    slots: int
    seed: int
    unpredictable: bool = False


def _workload(case: Scenario) -> tuple[Workload, Profile]:
    profile = load_profile(setting().models[case.model])
    random = np.random.default_rng((case.adapters, len(case.ranks)))
    rates_rps = random.choice(setting().rates_rps[case.rates], case.adapters)
    arrivals: dict[str, Any] = {"arrivals": Unpredictable(every_s=_WINDOW_S)} if case.unpredictable else {}
    adapters = numbered(random.choice(case.ranks, case.adapters), rates_rps)
    lengths = _mean_lengths(published_model(case.model).key)
    return Workload(base_model=profile.model.hf_ids[0], adapters=adapters, **lengths, **arrivals), profile


def _mean_lengths(model: str) -> dict[str, Lengths]:
    prompt, output = LENGTHS[model]
    return {"prompt_tokens": Lengths(mean=prompt.mean), "output_tokens": Lengths(mean=output.mean)}


def _settings(case: Scenario) -> dict[str, Any]:
    return {
        "a_max": case.slots,
        "max_num_seqs": 2048,
        "max_num_batched_tokens": 2048,
        "duration_s": setting().horizon_s,
        "seed": case.seed,
    }


def hour(case: Scenario) -> Metrics:
    """Return metrics of the hour, and how much the five-minute loads of its adapters scatter."""
    workload, profile = _workload(case)
    return _metrics(simulate(workload, profile, **_settings(case))) | {"scatter": _scatter(case, workload)}


def _scatter(case: Scenario, workload: Workload) -> float:
    """Return the variance of an adapter's requests per window over their mean, 1 under Poisson arrivals."""
    drawn = draw_requests(workload, setting().horizon_s, case.seed, DEFAULT_MAX_MODEL_LEN)
    windows = math.ceil(setting().horizon_s / _WINDOW_S)
    counts = np.zeros((case.adapters, windows))
    np.add.at(counts, (drawn.adapter - 1, (drawn.arrival_ns / 1e9 // _WINDOW_S).astype(int)), 1)
    return float(np.mean(counts.var(axis=1, ddof=1) / np.maximum(counts.mean(axis=1), 1e-9)))


def _unpredictable_hours(model: str, seeds: Sequence[int]) -> list[Scenario]:
    given = setting().unpredictable
    return [
        Scenario(model, rates, (given.rank,), adapters, given.slots, seed, unpredictable=True)
        for seed, rates, adapters in product(seeds, setting().rates_rps, given.adapters)
    ]


def unpredictable(lab: Lab) -> Findings:
    """Compare draws of unpredictable arrivals with each other."""
    values: dict[str, Any] = {}
    scatters = []
    for model in setting().models:
        found = []
        for seed in (*lab.seeds, lab.seeds[-1] + 1):
            hours = lab.each(hour, _unpredictable_hours(model, [seed]))
            found.append({name: np.array([each[name] for each in hours]) for name in METRICS})
            scatters += [each["scatter"] for each in hours]
        for name in METRICS:
            values[f"{model}-{name}"] = [smape(one[name], other[name]) for one, other in pairwise(found)]
    return Findings(values | {"non-stationary": min(scatters) > 1.0})


def series(case: Scenario) -> Mapping[str, list[float]]:
    """Return running and waiting requests over time."""
    workload, profile = _workload(case)
    found = simulate_detailed(workload, profile, **_settings(case)).series
    times = {"minutes": found.time_s / 60.0, "running": found.running, "waiting": found.waiting}
    return {name: [float(value) for value in each] for name, each in times.items()}


def fig9(lab: Lab) -> Findings:
    """Return running and waiting requests under unpredictable arrivals."""
    given = setting().unpredictable
    case = Scenario("llama", "high", (given.rank,), min(given.adapters), given.slots, 0, unpredictable=True)
    (found,) = lab.by_seed(series, [case])
    first = found[0]
    names = ("running", "waiting")
    curves = [Curve(name=name, x=tuple(first["minutes"]), y=tuple(first[name])) for name in names]
    return Findings({name: [float(np.mean(each[name])) for each in found] for name in names}, curves)


def seconds(case: Scenario) -> float | None:
    """Return wall seconds of the hour, compiled; None if the slots leave no memory for a request."""
    workload, profile = _workload(case)
    try:
        simulate(workload, profile, **_settings(case) | {"duration_s": 1.0})
    except InfeasibleError:
        return None
    started = time.perf_counter()
    simulate(workload, profile, **_settings(case))
    return time.perf_counter() - started


def peak_mb(case: Scenario) -> float:
    """Return the peak memory of a fresh process that simulates the hour."""
    workload, profile = _workload(case)
    words = json.dumps([workload.model_dump(mode="json", exclude_unset=True), profile.name, _settings(case)])
    command = [sys.executable, "-c", _OWN_PEAK]
    child = subprocess.run(  # noqa: S603 (the program below)
        command, input=words, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(child.stdout) * 1024 / 1e6


def table2(lab: Lab) -> Findings:
    """Measure time and memory of simulated hours."""
    given = setting().predictable
    cells = [(adapters, slots) for adapters in given.adapters for slots in given.slots if slots <= adapters]
    times: dict[str, list[float]] = {}
    for model in setting().models:
        hours = [
            Scenario(model, rates, ranks, *cell, seed=0)
            for rates, ranks, cell in product(setting().rates_rps, given.ranks, cells)
        ]
        times[model] = [found for found in lab.each(seconds, hours) if found is not None]
    corners = [
        Scenario("llama", rates, given.ranks[0], adapters, min(given.slots), seed=0)
        for rates, adapters in product(setting().rates_rps, (min(given.adapters), max(given.adapters)))
    ]
    means = {f"{model}-time": float(np.mean(each)) for model, each in times.items()}
    speedup = setting().horizon_s / max(means.values())
    return Findings({**means, "speedup": speedup, "memory": float(np.mean(lab.each(peak_mb, corners)))})


FAMILIES: Final = ("knn", "forest", "svm")
_ROUNDS: Final = 15
_MANY: Final = 16_384


class Measured(NamedTuple):
    """Measured runs with the features of surrogates."""

    features: NDArray[np.float32]
    throughput_tok_s: NDArray[np.float64]
    starved: NDArray[np.bool_]


def measured(runs: list[PublishedRun], profile: Profile) -> Measured:
    """Return measured runs as surrogates see them."""
    features = [feature_vector(run.workload, profile, engine_args(run)) for run in runs]
    throughput = [run.throughput_tok_s for run in runs]
    return Measured(np.array(features), np.array(throughput), np.array([run.starved for run in runs]))


def engine_args(run: PublishedRun) -> EngineArgs:
    return EngineArgs(
        max_loras=run.a_max,
        max_lora_rank=run.s_max,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=TOKEN_BUDGET,
        gpu_memory_utilization=UTILIZATION,
        max_model_len=DEFAULT_MAX_MODEL_LEN,
    )


@dataclass(frozen=True)
class Family:
    """A family trained on a dataset of the twin, and judged on measured runs."""

    model: str
    family: str
    seed: int
    dataset: str
    folder: str
    profile: str


def trained(case: Family) -> Mapping[str, float]:
    """Return errors on the measured runs, and milliseconds of a prediction."""
    from capplan.models.training import macro_f1, predictions, read_tables
    from capplan.reproduce.twin._tuning import subset, tuned

    given, table = setting().training, read_tables([case.dataset])
    runs = judged_runs(case.model, Path(case.folder))
    known = measured(runs, Profile.model_validate_json(case.profile))
    found: dict[str, float] = {}
    for task, grid in setting().grids[case.family].items():
        combinations = subset(grid, given.combinations, case.seed)
        best = tuned(case.family, task, table, combinations, folds=given.folds, seed=case.seed)  # type: ignore[arg-type]
        predicted = predictions(best, known.features)
        throughput = task == "throughput"
        found["smape" if throughput else "f1"] = (
            smape(predicted, known.throughput_tok_s) if throughput else macro_f1(predicted, known.starved)
        )
        found[f"{task}-ms"] = _fastest_s(best.predict, known.features) * 1e3 / len(runs)
    return found


def _fastest_s(call: Any, *arguments: Any) -> float:
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - started)
    return min(times)


def table3(lab: Lab) -> Findings:
    """Train the paper's three families on the twin, and judge them on the measured runs."""
    profiles, folder = held_out_profiles(lab), str(lab.measurements())
    cases = []
    for model, text in profiles.items():
        dataset = lab.folder / f"grid-{model}"
        generate_dataset(
            dataset,
            Profile.model_validate_json(text),
            design="paper-grid",
            scenarios=setting().training.scenarios,
            duration_s=setting().horizon_s,
            workers=lab.workers,
            ray_address=lab.ray_address,
            progress=lab.progress,
        )
        cases += [
            Family(model, *each, str(dataset), folder, text) for each in product(FAMILIES, lab.seeds[:1])
        ]
    values: dict[str, Any] = {}
    ms: dict[tuple[str, str], list[float]] = {}
    for case, found in zip(cases, lab.each(trained, cases), strict=True):
        for name in ("smape", "f1"):
            values.setdefault(f"{case.model}-{case.family}-{name}", []).append(found[name])
        ms[case.model, case.family] = [found["throughput-ms"], found["starvation-ms"]]
    slowest = [max(FAMILIES, key=lambda family: ms[model, family][0]) == "svm" for model in profiles]
    fast = max(each for (_, family), times in ms.items() if family != "svm" for each in times)
    return Findings(values | {"time": fast, "svm-slowest": slowest})


@dataclass(frozen=True)
class SmallTree:
    """The shipped small trees of a model."""

    model: str
    folder: str


def small_tree(case: SmallTree) -> Mapping[str, float]:
    """Return errors on the measured runs, rules, and nanoseconds of a compiled answer."""
    from capplan.models.surrogates import compile_tree
    from capplan.models.training import macro_f1

    profile = load_profile(setting().models[case.model])
    surrogate = load_surrogate(profile, "tree")
    known = measured(judged_runs(case.model, Path(case.folder)), profile)
    answers = surrogate.predict_many(known.features)
    trees = surrogate.throughput_tree, surrogate.starvation_tree
    if trees[0] is None or trees[1] is None:
        raise AssertionError("a surrogate of the kind tree has its trees")
    loop = _looped(compile_tree(trees[0]))
    many = known.features[np.random.default_rng(0).integers(0, len(known.features), _MANY)]
    loop(many)
    return {
        "smape": smape(answers.throughput_tok_s, known.throughput_tok_s),
        "f1": macro_f1(answers.starvation_probability, known.starved),
        "rules": trees[0].rules,
        "starvation-rules": trees[1].rules,
        "ns": _fastest_s(loop, many) * 1e9 / _MANY,
    }


def _looped(answer: Any) -> Any:
    """Return a compiled loop over rows, long enough to hide the call."""

    @numba.njit(error_model="numpy")
    def over(rows: Any) -> float:
        total = 0.0
        for at in range(rows.shape[0]):
            total += answer(rows[at])
        return total

    return over


def table4(lab: Lab) -> Findings:
    """Judge the shipped small trees on the measured runs."""
    cases = [SmallTree(model, str(lab.measurements())) for model in setting().models]
    found = zip(cases, lab.each(small_tree, cases), strict=True)
    return Findings({f"{case.model}-{name}": value for case, each in found for name, value in each.items()})
