"""Step tables of composed profiles against the forward passes that they tabulate.

    python -m benchmarks.composed_grid

Random decode steps (1 to 512 requests, contexts of 16 to 8,000 tokens) and mixed steps (up to 8,192 tokens)
of two models on every GPU with operators, run at the size of the CUDA graph that holds them. Errors are
``100 * mean(|p / a - 1|)`` of table over forward pass; beside them those of the additive form, fitted to the
same steps by non-negative least squares on relative errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from benchmarks.common import emit, mape, records_table
from capplan.models import StepFeatures, coefficient_array, latency_code, step_ms
from capplan.models._step_latency import GRAPH_TOKENS
from capplan.models.compose import SYSTEMS, known_decoder, operator_times
from capplan.models.compose._forward import StepTimes
from capplan.models.compose._profile import CAPTURED, step_tables
from capplan.spec import TABLE_FORM, Fit, FittedModel

Floats = NDArray[np.float64]

MODELS: Final = (("meta-llama/Llama-3.1-8B-Instruct", 1), ("meta-llama/Llama-3.1-70B-Instruct", 4))
STEPS: Final = 1000


def main() -> None:
    """Print the errors per GPU and model."""
    emit(records_table(lines()))


def lines() -> Iterator[dict[str, object]]:
    """Yield one line per GPU and model."""
    for system in SYSTEMS:
        for model, tp in MODELS:
            times = operator_times(system.key, known_decoder(model), tp)
            rng = np.random.default_rng(0)
            line: dict[str, object] = {"gpu": system.sheet_key, "model": model.split("/")[1], "tp": tp}
            for kind, most in (("decode", 1.0), ("mixed", 8192.0)):
                requests = np.round(np.exp(rng.uniform(0.0, np.log(512.0), STEPS)))
                kv_tokens = requests * np.exp(rng.uniform(np.log(16.0), np.log(8000.0), STEPS))
                tokens = np.maximum(requests, np.round(np.exp(rng.uniform(0.0, np.log(most), STEPS))))
                actual = times.tokens_ms(graph_sizes(tokens)) + times.requests_ms(requests, kv_tokens)
                line[f"{kind}: table"] = mape(tabulated(times, tokens, requests, kv_tokens), actual)
                line[f"{kind}: additive"] = mape(additive(tokens, requests, kv_tokens, actual), actual)
            yield line


def graph_sizes(tokens: Floats) -> Floats:
    """Return the sizes at which vLLM runs steps of these tokens."""
    captured = np.array(CAPTURED, dtype=float)
    held = captured[np.minimum(np.searchsorted(captured, tokens), captured.size - 1)]
    return np.where(tokens <= captured[-1], held, tokens)


def tabulated(times: StepTimes, tokens: Floats, requests: Floats, kv_tokens: Floats) -> Floats:
    """Return the milliseconds by the step tables."""
    fit = Fit(source=times.source, samples=0, error_formula="none", error=0.0)
    model = FittedModel(form=TABLE_FORM, coefficients={}, tables=step_tables(times), fit=fit)
    code, k = latency_code(model.form), coefficient_array(model)
    nothing = dict.fromkeys(
        ("adapters", "a_max", "s_max", "waiting", "slots_per_adapter", "adapters_served"), 0.0
    )
    steps = zip(tokens, requests, kv_tokens, strict=True)
    return np.array([step_ms(code, k, StepFeatures(*map(float, step), **nothing)) for step in steps])


def additive(tokens: Floats, requests: Floats, kv_tokens: Floats, actual: Floats) -> Floats:
    """Return the milliseconds of the best additive form."""
    beyond = np.maximum(0.0, tokens - GRAPH_TOKENS)
    design = np.stack([np.ones_like(tokens), tokens, beyond, requests, kv_tokens], axis=1)
    coefficients, _ = nnls(design / actual[:, None], np.ones_like(actual))
    return np.asarray(design @ coefficients)


if __name__ == "__main__":
    main()
