"""Surrogates learned from the twin, on measured runs (section 8.3)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from capplan.datasets import load_profile
from capplan.datasets.published import MAX_NUM_SEQS, TOKEN_BUDGET, UTILIZATION, PublishedRun
from capplan.models import load_surrogate
from capplan.models.calibration import smape
from capplan.models.surrogates import feature_vector
from capplan.reproduce._lab import Lab
from capplan.reproduce._results import Findings
from capplan.reproduce.twin._fidelity import held_out_profiles, judged_runs
from capplan.reproduce.twin._setting import setting
from capplan.spec import DEFAULT_MAX_MODEL_LEN, EngineArgs, Profile
from capplan.twin.dataset import generate_dataset

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
    """Return the engine settings of a measured run."""
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
