"""Error of the shipped surrogates: on measured runs, fresh twin runs, and queries out of range.

``python -m benchmarks.surrogate_fidelity --reference DIR`` prints tables; DIR holds runs.csv, on none of
whose runs any surrogate was trained. ``--fresh DIR ...`` adds datasets of `capplan dataset generate` with
other seeds than that of the training data; several of one design are summed up by mean and 95 % interval.
``--trained DIR`` takes the surrogates of one profile from ``capplan train --output DIR`` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from benchmarks.common import command_line, emit, records_table
from capplan import Lengths, Profile, load_profile, load_surrogate
from capplan.datasets import surrogate_path
from capplan.datasets.published import PUBLISHED, PublishedModel, published_runs
from capplan.models import Surrogate
from capplan.models.calibration import smape
from capplan.models.surrogates import FEATURES, KINDS, feature_vector, profile_digest, unsupported_workload
from capplan.models.surrogates._features import offered_tok_s
from capplan.models.surrogates._files import read_surrogate
from capplan.models.training import read_manifest, read_tables
from capplan.models.training._data import TrainingTable
from capplan.models.training._evaluation import (
    coverage,
    macro_f1,
    regimes,
    starvation_scores,
    throughput_errors,
)
from capplan.profiling.load._requests import scaled
from capplan.reproduce.twin._fidelity import engine_args
from capplan.spec import allowed_lora_rank
from capplan.twin.dataset import Sample, draw

PAPER = MappingProxyType(
    {"llama-3.1-8b-instruct": ("4.39 %", "0.95"), "qwen-2.5-7b-instruct": ("5.28 %", "0.99")}
)
"""Random forests of the adapter-caching paper (table 3), on its validation runs."""

QUERIES = 500
SOBOL_POINTS = 512  # balanced for powers of two
QUERY_SEED = 2_000
DASH = "-"
OUTSIDE = {"rank": "rank", "prompt length": "prompt", "output length": "output", "rate": "rate"}


class Measured(NamedTuple):
    """Published runs with features."""

    features: np.ndarray
    known: np.ndarray
    throughput_tok_s: np.ndarray
    offered_tok_s: np.ndarray
    starved: np.ndarray


def measured(reference: Path, model: PublishedModel, profile: Profile) -> Measured:
    runs = published_runs(reference, model)
    features = [feature_vector(run.workload, profile, engine_args(run)) for run in runs]
    return Measured(
        np.array(features),
        np.array([unsupported_workload(run.workload, profile) is None for run in runs]),
        np.array([run.throughput_tok_s for run in runs]),
        np.array([offered_tok_s(run.workload) for run in runs]),
        np.array([run.starved for run in runs]),
    )


def measured_rows(
    model: PublishedModel, runs: Measured, surrogates: Mapping[str, Surrogate]
) -> Iterator[dict[str, str]]:
    """Yield a row per kind, the paper's forests, and the offered load."""

    def row(answers: str, count: str, errors: Sequence[str], f1: str, in_range: str) -> dict[str, str]:
        scores = dict(zip(("throughput", "of starved", "of not starved"), errors, strict=True))
        head = {"model": model.arch.name, "answers": answers, "n": count}
        return head | scores | {"starvation macro-F1": f1, "in range": in_range}

    count = str(len(runs.starved))
    for kind, surrogate in surrogates.items():
        answers = surrogate.predict_many(runs.features)
        f1 = macro_f1(answers.starvation_probability, runs.starved)
        in_range = np.mean(answers.in_range & runs.known)
        yield row(kind, count, _errors(answers.throughput_tok_s, runs), f"{f1:.3f}", f"{in_range:.1%}")
    error, f1_of_paper = PAPER[model.key]
    yield row("the paper's forests", DASH, [error, DASH, DASH], f1_of_paper, DASH)
    yield row("offered load", count, _errors(runs.offered_tok_s, runs), DASH, DASH)


def _errors(predicted: np.ndarray, runs: Measured) -> list[str]:
    kept = (np.ones_like(runs.starved), runs.starved, ~runs.starved)
    return [f"{smape(predicted[rows], runs.throughput_tok_s[rows]):.2f} %" for rows in kept]


def fresh_tables(folders: Sequence[Path], profile: Profile) -> list[TrainingTable]:
    digest = profile_digest(profile)
    manifests = [(folder, read_manifest(folder)) for folder in folders]
    own = [folder for folder, found in manifests if found is None or found.asked.profile_digest == digest]
    return [read_tables([folder], profile_digest=digest) for folder in own]


def fresh_row(name: str, kind: str, surrogate: Surrogate, table: TrainingTable) -> dict[str, str]:
    answers = surrogate.predict_many(table.features)
    scores = starvation_scores(table, answers.starvation_probability)
    near = scores.get("near the edge")
    inside = coverage(table, answers.low_tok_s, answers.high_tok_s)["all"]
    trees = (surrogate.throughput_tree, surrogate.starvation_tree)
    return {
        "model": name,
        "design": " and ".join(np.unique(table.design)),
        "surrogate": kind,
        "n": str(len(table)),
        "throughput": f"{throughput_errors(table, answers.throughput_tok_s)['all']:.2f} %",
        "starvation macro-F1": f"{scores['all']:.4f}",
        "n near the edge": str(int(regimes(table)["near the edge"].sum())),
        "macro-F1 near the edge": DASH if near is None else f"{near:.3f}",
        "90 % interval covers": f"{inside:.1%}",
        "in range": f"{answers.in_range.mean():.1%}",
        "rules": " and ".join(str(tree.rules) for tree in trees if tree is not None) or DASH,
    }


def over_seeds(rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Yield mean and 95 % interval (Student's t) of each surrogate over the datasets of one design."""
    keys = ("model", "design", "surrogate")
    for same in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        found = [row for row in rows if tuple(row[key] for key in keys) == same]
        if len(found) > 1:
            scores = {
                name: _mean_interval((float(row[name].removesuffix(" %")) for row in found), digits)
                for name, digits in (("throughput", 2), ("starvation macro-F1", 4))
            }
            yield dict(zip(keys, same, strict=True)) | {"seeds": str(len(found))} | scores


def _mean_interval(values: Iterable[float], digits: int) -> str:
    known = np.array(list(values))
    half = student.ppf(0.975, known.size - 1) * known.std(ddof=1) / np.sqrt(known.size)
    return f"{known.mean():.{digits}f} ± {half:.{digits}f}"


def outside_row(name: str, kind: str, surrogate: Surrogate) -> dict[str, str]:
    """Return shares of flagged queries with one property outside the training range, or none."""
    samples = draw("space-filling", surrogate.profile, QUERY_SEED, 0, SOBOL_POINTS)[:QUERIES]
    rng = np.random.default_rng(QUERY_SEED)
    row = {"model": name, "surrogate": kind}
    for title, what in OUTSIDE.items():
        flagged = [not _in_range(surrogate, _outside(what, surrogate, sample, rng)) for sample in samples]
        row[title] = f"{np.mean(flagged):.1%}"
    flagged = [not _in_range(surrogate, sample) for sample in samples]
    return row | {"not strange": f"{np.mean(flagged):.1%}"}


def _outside(what: str, surrogate: Surrogate, sample: Sample, rng: np.random.Generator) -> Sample:
    """Return a scenario with a rank, a mean length or rates outside the training range."""
    workload = sample.workload
    beyond = float(np.exp(rng.uniform(np.log(1.02), np.log(8.0))))
    if what == "rank":
        largest = int(_high(surrogate, "rank_max"))
        rank = min(512, max(largest + 1, round(largest * beyond)))
        first, *others = workload.adapters
        changes = {"adapters": (first.model_copy(update={"rank": rank}), *others)}
        settings = {**sample.settings, "s_max": allowed_lora_rank(rank)}
        return Sample(sample.group, workload.model_copy(update=changes), settings)
    if what == "rate":
        workload = scaled(workload, beyond * _high(surrogate, "rate_sum_rps") / workload.total_rate_rps)
        return replace(sample, workload=workload)
    mean = beyond * _high(surrogate, f"{what}_mean_tokens")
    old: Lengths = getattr(workload, f"{what}_tokens")
    new = Lengths(mean=mean, std=old.std_tokens / old.mean_tokens * mean)
    return replace(sample, workload=workload.model_copy(update={f"{what}_tokens": new}))


def _high(surrogate: Surrogate, name: str) -> float:
    return float(surrogate.domain.high[FEATURES.index(name)])


def _in_range(surrogate: Surrogate, sample: Sample) -> bool:
    supported = not unsupported_workload(sample.workload, surrogate.profile)
    return surrogate.predict_features(sample.features(surrogate.profile), supported=supported).in_range


def surrogate_of(profile: Profile, kind: str, trained: Path | None) -> Surrogate:
    if trained is None:
        return load_surrogate(profile, kind)
    return read_surrogate(trained / f"{kind}{surrogate_path(profile.name, kind).suffix}", profile, kind)


def report(
    reference: Path,
    fresh: Sequence[Path],
    kinds: Sequence[str],
    models: Sequence[PublishedModel],
    trained: Path | None = None,
) -> str:
    on_measured: list[dict[str, str]] = []
    on_fresh: list[dict[str, str]] = []
    outside: list[dict[str, str]] = []
    for model in models:
        profile, name = load_profile(model.profile), model.arch.name
        surrogates = {kind: surrogate_of(profile, kind, trained) for kind in kinds}
        on_measured += measured_rows(model, measured(reference, model, profile), surrogates)
        for table in fresh_tables(fresh, profile):
            on_fresh += [fresh_row(name, kind, each, table) for kind, each in surrogates.items()]
        outside += [outside_row(name, kind, each) for kind, each in surrogates.items()]
    parts = ["Against the measured runs (throughput: SMAPE):", records_table(on_measured)]
    if on_fresh:
        parts += ["Against fresh twin runs:", records_table(on_fresh)]
        if summed := list(over_seeds(on_fresh)):
            parts += ["Over seeds, mean and 95 % interval (throughput: SMAPE in %):", records_table(summed)]
    parts += [
        f"Share of {QUERIES} questions flagged, one thing beyond what was trained on in each:",
        records_table(outside),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--reference", type=Path, required=True, help="folder with runs.csv")
    parser.add_argument("--fresh", type=Path, nargs="+", default=[], help="datasets of another seed")
    parser.add_argument("--profile", help="one profile; default: all that were measured")
    parser.add_argument("--trained", type=Path, help="surrogates of --profile; default: the shipped ones")
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: all")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    given = parser.parse_args()
    models = [model for model in PUBLISHED if given.profile in (None, model.profile)]
    if not models:
        parser.error(f"--profile must be one of {', '.join(model.profile for model in PUBLISHED)}")
    if given.trained is not None and len(models) > 1:
        parser.error("--trained needs --profile")
    emit(report(given.reference, given.fresh, given.kinds.split(","), models, given.trained), given.markdown)


if __name__ == "__main__":
    main()
