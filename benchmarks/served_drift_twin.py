"""The twin's prediction of a run of ``benchmarks.served_drift``: same requests, router and final shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.served_drift import MAX_MODEL_LEN, RANKS, ClusterSetting, Drift
from capplan import EngineArgs, load_profile
from capplan.spec.engine_args import DEFAULT_GPU_MEMORY_UTILIZATION
from capplan.spec.routing import STATE_PERIOD_S
from capplan.twin.cluster import Instance, served_router, simulate_cluster


def predicted_ttft_ms(
    setting: ClusterSetting, drift: Drift, placement: Mapping[str, Any], router: str
) -> tuple[float, float]:
    """Return median and P95 of TTFT of the requests after the warm-up.

    Parameters
    ----------
    placement
        Shares by instance, as ``GET /v1/placement`` returns them; they hold from the start.
    """
    profile = load_profile(str(setting.profile))
    args = EngineArgs(
        max_loras=len(setting.names),
        max_lora_rank=max(RANKS),
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=DEFAULT_GPU_MEMORY_UTILIZATION,
    )
    trace = drift.trace(setting.names, setting.rate_rps, setting.held)
    result = simulate_cluster(
        setting.workload(drift).model_copy(update={"trace": trace}),
        [Instance.of(profile, args, own["adapters"]) for own in placement.values()],
        router=served_router(router),
        duration_s=drift.duration_s,
        seed=drift.seed,
        state_period_s=STATE_PERIOD_S,
    )
    requests = result.requests
    measured = (requests.arrival_s >= drift.warm_up_s) & ~np.isnan(requests.ttft_s)
    p50_s, p95_s = np.percentile(requests.ttft_s[measured], (50, 95)).tolist()
    return 1e3 * p50_s, 1e3 * p95_s
