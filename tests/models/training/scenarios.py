"""Synthetic scenarios with saturation, noise, and near-duplicates in groups."""

from __future__ import annotations

import functools

import numpy as np

from capplan.models.surrogates import FEATURES
from capplan.models.surrogates._features import expected_tok_s


@functools.cache
def scenarios(rows: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return features, throughput in tokens per second, whether it starved, and groups of two."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 2.0, (rows, len(FEATURES))).astype(np.float32)
    load = np.exp(rng.uniform(-1.5, 1.5, rows))
    for name, values in (
        ("load_over_capacity", load),
        ("expected_share", 1.0 / np.maximum(1.0, load)),
        ("offered_tok_s", 5_000.0 * load),
        ("rate_sum_rps", 10.0 * load),
        ("adapters", rng.integers(8, 384, rows)),
        ("kv_tokens", rng.uniform(1e5, 4e5, rows)),
    ):
        x[:, FEATURES.index(name)] = values
    slots = x[:, FEATURES.index("a_max")]
    throughput = expected_tok_s(x) * (0.9 + 0.1 * np.tanh(slots)) * np.exp(rng.normal(0, 0.02, rows))
    starved = throughput < 0.9 * x[:, FEATURES.index("offered_tok_s")]
    return x, throughput, starved, np.arange(rows) // 2
