"""A lower bound on GPUs: no plan that the twin would accept uses fewer.

Relaxation: adapters are divisible and free, batches are as large as they may be, nobody ever waits. What remains is the
time that the step model charges for tokens, for reading KV, and for its base once per batch of decodes.
"""

from __future__ import annotations

import math

from capplan.models.step_latency import ADDITIVE
from capplan.planner.problem import Problem


def lower_bound_gpus(problem: Problem) -> int:
    """Return the bound; 1 where the profile's step model has another form than ours."""
    return max(1, math.ceil(busy_gpus(problem) - 1e-9))


def busy_gpus(problem: Problem) -> float:
    """Return the GPU-seconds per second that the load keeps busy at the very least."""
    workload, step = problem.workload, problem.profile.step_latency
    if step.form != ADDITIVE.name:
        return 0.0
    tokens = outputs = context = 0.0
    for adapter in workload.adapters:
        prompt = (adapter.prompt_tokens or workload.prompt_tokens).mean_tokens
        output = (adapter.output_tokens or workload.output_tokens).mean_tokens
        # The last token of a request is never fed back: output - 1 decode tokens.
        tokens += adapter.rate_rps * (prompt + max(0.0, output - 1.0))
        outputs += adapter.rate_rps * max(0.0, output - 1.0)
        # Mean lengths understate the KV read by longer outputs, which keeps this a lower bound.
        context += adapter.rate_rps * max(0.0, output - 1.0) * (prompt + output / 2.0)
    milliseconds = (
        step.value("ms_per_ktoken") * tokens / 1e3
        + step.value("ms_per_kv_ktoken") * context / 1e3
        + step.value("base_ms") * outputs / problem.engine.max_num_seqs
    )
    # The plan must serve this fraction of the load, at the load over (1 - headroom).
    return milliseconds / 1e3 * workload.slo.served_fraction / (1.0 - workload.headroom)
