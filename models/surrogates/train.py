"""Training of surrogates: two random forests (adapter-caching paper, section 6) on what the twin answered."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.metrics import f1_score

from capplan.models.calibrate import SMAPE_FORMULA, smape
from capplan.models.surrogates.features import FEATURES, expected_tok_s
from capplan.models.surrogates.forest import flatten_forest
from capplan.models.surrogates.surrogate import Surrogate
from capplan.spec import STARVED_BELOW, Profile

_TREES = 64
_INTERVAL = (0.05, 0.95)


def train_surrogate(
    profile: Profile,
    features: NDArray[np.float32],
    throughput_tok_s: NDArray[np.float64],
    served_fraction: NDArray[np.float64],
    seed: int = 0,
) -> Surrogate:
    """Train a surrogate and measure it on scenarios that the trees that answer had not seen (out of bag).

    Parameters
    ----------
    profile
        The profile whose twin answered.
    features, throughput_tok_s, served_fraction
        As in `capplan.twin.dataset.old.Dataset`.
    seed
        Seed of the forests.
    """
    offered = features[:, FEATURES.index("offered_tok_s")].astype(float)
    expected = expected_tok_s(features)
    target = np.log(np.maximum(throughput_tok_s, 1e-3) / expected)
    starved = served_fraction < STARVED_BELOW
    shared = {
        "n_estimators": _TREES,
        "oob_score": True,
        "random_state": seed,
        "max_features": 0.5,
        "n_jobs": -1,
    }
    regressor = RandomForestRegressor(min_samples_leaf=2, **shared).fit(features, target)
    classifier = RandomForestClassifier(min_samples_leaf=3, **shared).fit(features, starved)
    unseen = regressor.oob_prediction_
    probability = classifier.oob_decision_function_[:, 1]
    low, high = np.quantile(target - unseen, _INTERVAL)
    near = np.abs(served_fraction - STARVED_BELOW) < 0.1
    report: dict[str, object] = {
        "scenarios": int(target.size),
        "starved_share": float(starved.mean()),
        "held_out": "out of bag: every scenario is answered by the trees that were not trained on it",
        "error_formula": SMAPE_FORMULA,
        "throughput_smape": smape(expected * np.exp(unseen), throughput_tok_s),
        "throughput_smape_starved": smape((expected * np.exp(unseen))[starved], throughput_tok_s[starved]),
        "throughput_smape_offered_load": smape(offered, throughput_tok_s),
        "starvation_macro_f1": float(f1_score(starved, probability >= 0.5, average="macro")),
        "starvation_macro_f1_near_the_edge": float(
            f1_score(starved[near], probability[near] >= 0.5, average="macro")
        ),
    }
    return Surrogate(
        profile=profile,
        throughput=flatten_forest(regressor),
        starvation=flatten_forest(classifier),
        low=features.min(axis=0),
        high=features.max(axis=0),
        interval=(float(low), float(high)),
        report=report,
    )
