"""Small surrogates of every kind, fitted to synthetic results of real scenarios."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from capplan import Adapter, Lengths, Profile, Workload, load_profile
from capplan.models import Surrogate
from capplan.models.surrogates import LOG_OVER_EXPECTED, feature_of
from capplan.models.surrogates._features import expected_tok_s
from capplan.models.surrogates._files import tree_forest
from capplan.models.surrogates._outputs import (
    OVER_EXPECTED,
    PROBABILITY,
    SERVED_AND_STEP,
    EnsembleOutput,
    flatten_forest,
)
from capplan.models.surrogates._surrogate import fit_domain
from capplan.models.surrogates._tree import PROBABILITY as CHANCE
from capplan.models.surrogates._tree import tree_of
from capplan.models.training._evaluation import fit_calibration, fit_intervals
from capplan.spec import DEFAULT_MAX_MODEL_LEN
from capplan.twin.dataset import draw

PROFILE = "h100-64g/llama-3.1-8b/vllm-0.8.5"
SETTINGS = {
    "a_max": 16,
    "s_max": 32,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.9,
}


class Made(NamedTuple):
    """Scenarios of the space-filling design with results by a formula."""

    features: np.ndarray
    throughput_tok_s: np.ndarray
    starved: np.ndarray


@functools.cache
def profile() -> Profile:
    """A shipped profile under a name that no surrogate is shipped for."""
    return load_profile(PROFILE).replace(name="test/made/vllm-0.8.5")


@functools.cache
def drawn(rows: int, seed: int) -> np.ndarray:
    """Return the features of scenarios of the space-filling design under which an engine would start."""
    features = np.array(
        [sample.features(profile()) for sample in draw("space-filling", profile(), seed, 0, rows)]
    )
    starts: np.ndarray = feature_of(features, "kv_tokens") >= DEFAULT_MAX_MODEL_LEN
    return features[starts]


@functools.cache
def made(rows: int = 512, seed: int = 0) -> Made:
    """Return scenarios with answers near the fluid estimate's, harder to tell where load is high."""
    features = drawn(rows, seed)
    load = feature_of(features, "load_over_capacity")
    noise = np.random.default_rng(seed).normal(0.0, 0.02 + 0.1 * (load > 1.0))
    throughput = expected_tok_s(features) * np.exp(noise)
    return Made(features, throughput, throughput < 0.9 * feature_of(features, "offered_tok_s"))


def _heads(kind: str, data: Made) -> tuple[EnsembleOutput, EnsembleOutput, dict[str, object]]:
    ratio = np.log(data.throughput_tok_s / expected_tok_s(data.features))
    if kind == "tree":
        throughput = tree_of(
            DecisionTreeRegressor(max_leaf_nodes=12, random_state=0).fit(data.features, ratio),
            LOG_OVER_EXPECTED,
        )
        starvation = tree_of(
            DecisionTreeClassifier(max_leaf_nodes=6, random_state=0).fit(data.features, data.starved), CHANCE
        )
        heads = (
            EnsembleOutput(OVER_EXPECTED, (tree_forest(throughput),)),
            EnsembleOutput(PROBABILITY, (tree_forest(starvation),)),
        )
        return *heads, {"throughput_tree": throughput, "starvation_tree": starvation}
    options = {"n_estimators": 8, "min_samples_leaf": 4, "random_state": 0}
    regressor = flatten_forest(RandomForestRegressor(**options).fit(data.features, ratio))
    classifier = flatten_forest(RandomForestClassifier(**options).fit(data.features, data.starved))
    if kind == "forest":
        return EnsembleOutput(OVER_EXPECTED, (regressor,)), EnsembleOutput(PROBABILITY, (classifier,)), {}
    return (
        EnsembleOutput(SERVED_AND_STEP, (regressor, regressor)),
        EnsembleOutput(PROBABILITY, (classifier,)),
        {},
    )


@functools.cache
def surrogates() -> Mapping[str, Surrogate]:
    """Return one of each kind."""
    data = made()
    result = {}
    for kind in ("best", "forest", "tree"):
        throughput, starvation, trees = _heads(kind, data)
        result[kind] = Surrogate(
            profile=profile(),
            kind=kind,
            throughput=throughput,
            starvation=starvation,
            calibration=fit_calibration(starvation.predict(data.features), data.starved),
            intervals=fit_intervals(
                data.features,
                throughput.predict(data.features),
                data.throughput_tok_s,
                np.arange(len(data.features)),
                seed=0,
            ),
            domain=fit_domain(data.features),
            report={"scenarios": {"space-filling": len(data.features)}},
            **trees,
        )
    return result


def asked(adapters: int = 32, rank: int = 32, rate_rps: float = 0.2, **fields: object) -> Workload:
    """Return a workload in the middle of what surrogates are trained on."""
    return Workload(
        **{
            "base_model": "meta-llama/Llama-3.1-8B-Instruct",
            "adapters": tuple(
                Adapter(name=f"a{i}", rank=rank, rate_rps=rate_rps * (0.5 + i / adapters))
                for i in range(adapters)
            ),
            "prompt_tokens": Lengths(mean=250, std=200),
            "output_tokens": Lengths(mean=150, std=100),
            **fields,
        }
    )
