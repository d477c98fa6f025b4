"""What a simulation says: throughput, latencies, starvation, by the definitions of ARCHITECTURE section 4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capplan.spec import STARVED_BELOW
from capplan.twin import trace as t
from capplan.twin.scenario import NS_PER_MS, NS_PER_S, Scenario


@dataclass(frozen=True)
class SimulationResult:
    """One simulated GPU over one horizon. Latencies: requests completed within it, NaN without any."""

    throughput_tok_s: float
    """Input and output tokens of completed requests over the horizon."""
    input_tok_s: float
    output_tok_s: float
    offered_tok_s: float
    """Input and output tokens of submitted requests over the horizon."""
    itl_ms_mean: float
    """Mean gap between tokens as a client sees them, every gap counting alike."""
    itl_ms_p50: float
    itl_ms_p95: float
    itl_ms_p99: float
    """Percentiles are over the gaps of all requests, also unfinished ones, and exact to half a percent."""
    ttft_s_mean: float
    ttft_s_p50: float
    ttft_s_p95: float
    ttft_s_p99: float
    ttft_s_mean_charged: float
    """Over every submitted request; an unfinished one is charged the whole horizon."""
    tpot_ms_mean: float
    """(E2E - TTFT) / (output tokens - 1), every request counting alike."""
    tpot_ms_p50: float
    tpot_ms_p95: float
    tpot_ms_p99: float
    e2e_s_mean: float
    e2e_s_p50: float
    e2e_s_p95: float
    e2e_s_p99: float
    tpt_ms_mean: float
    """E2E / output tokens (Toppings section 7.1)."""
    tpt_ms_p50: float
    tpt_ms_p95: float
    tpt_ms_p99: float
    served_fraction: float
    """Tokens of completed over submitted requests, those in execution at the end left out of both."""
    starved: bool
    completed: int
    submitted: int
    rejected: int
    preemptions: int
    adapter_loads: int
    disk_loads: int
    load_s: float
    """Time that steps spent waiting for adapter loads."""
    steps: int
    busy_fraction: float
    """Share of the horizon in which a step ran."""
    running_mean: float
    """Mean over busy time, as are the next three."""
    waiting_mean: float
    kv_tokens_mean: float
    adapters_mean: float
    running_max: int
    waiting_max: int
    kv_tokens: int
    """KV capacity."""
    duration_s: float
    wall_s: float = 0.0
    """Seconds of computing, drawing of requests included."""


def summarize(
    scenario: Scenario, trace: t.Trace, request_overhead_ms: float, client_itl_factor: float = 1.0
) -> SimulationResult:
    """Reduce a trace to its metrics.

    Parameters
    ----------
    scenario, trace
        What was simulated and what it left.
    request_overhead_ms
        Time a request spends outside the engine's steps before its first token (HTTP, tokenizer).
    client_itl_factor
        How much longer the gaps between tokens are for a client than in the engine: where two tokens reach it
        in one chunk, it sees one gap for two steps.
    """
    requests = scenario.requests
    horizon_s = scenario.horizon_ns / NS_PER_S
    done = (trace.finish_ns != t.NEVER) & (trace.finish_ns <= scenario.horizon_ns)
    prompt, output = requests.prompt_tokens, _generated(scenario)
    tokens = prompt.astype(np.int64) + output
    # A step that began within the horizon may end after it; its requests were in execution at the end.
    executing = (trace.running_at_end != 0) | (trace.finish_ns > scenario.horizon_ns)
    completed_tokens = int(tokens[done].sum())
    answerable = int(tokens.sum()) - int(tokens[executing].sum())
    served = completed_tokens / answerable if answerable > 0 else 1.0

    arrival, first, last = requests.arrival_ns[done], trace.first_ns[done], trace.finish_ns[done]
    out = output[done]
    ttft_s = (first - arrival) / NS_PER_S + request_overhead_ms / 1e3
    e2e_s = (last - arrival) / NS_PER_S + request_overhead_ms / 1e3
    gaps = out - 1
    decoding_ms = (last - first) / NS_PER_MS
    several = gaps > 0
    unfinished = done.size - int(done.sum())
    charged = (float(ttft_s.sum()) + unfinished * horizon_s) / done.size if done.size else float("nan")
    busy = float(trace.sums[t.BUSY_NS])

    def mean_over_busy(position: int) -> float:
        return float(trace.sums[position]) / busy if busy else 0.0

    return SimulationResult(
        throughput_tok_s=completed_tokens / horizon_s,
        input_tok_s=float(prompt[done].sum()) / horizon_s,
        output_tok_s=float(out.sum()) / horizon_s,
        offered_tok_s=float(tokens.sum()) / horizon_s,
        itl_ms_mean=client_itl_factor * float(decoding_ms.sum() / gaps.sum())
        if several.any()
        else float("nan"),
        itl_ms_p50=client_itl_factor * t.gap_quantile_ms(trace.gaps, 0.50),
        itl_ms_p95=client_itl_factor * t.gap_quantile_ms(trace.gaps, 0.95),
        itl_ms_p99=client_itl_factor * t.gap_quantile_ms(trace.gaps, 0.99),
        ttft_s_mean_charged=charged,
        **_summary("ttft_s", ttft_s),
        **_summary("tpot_ms", decoding_ms[several] / gaps[several]),
        **_summary("e2e_s", e2e_s),
        **_summary("tpt_ms", e2e_s * 1e3 / out),
        served_fraction=served,
        starved=served < STARVED_BELOW,
        completed=int(done.sum()),
        submitted=done.size,
        rejected=int(trace.counts[t.REJECTED]),
        preemptions=int(trace.counts[t.PREEMPTIONS]),
        adapter_loads=int(trace.counts[t.ADAPTER_LOADS]),
        disk_loads=int(trace.counts[t.DISK_LOADS]),
        load_s=float(trace.counts[t.LOAD_NS]) / NS_PER_S,
        steps=int(trace.counts[t.STEPS]),
        busy_fraction=min(1.0, busy / scenario.horizon_ns),
        running_mean=mean_over_busy(t.RUNNING_NS),
        waiting_mean=mean_over_busy(t.WAITING_NS),
        kv_tokens_mean=mean_over_busy(t.KV_TOKEN_NS),
        adapters_mean=mean_over_busy(t.ADAPTER_NS),
        running_max=int(trace.counts[t.MAX_RUNNING]),
        waiting_max=int(trace.counts[t.MAX_WAITING]),
        kv_tokens=scenario.num_blocks * scenario.limits.block_size,
        duration_s=horizon_s,
    )


def _generated(scenario: Scenario) -> NDArray[np.int64]:
    """Return the output tokens that the engine generates: a request ends where max_model_len ends."""
    room = scenario.limits.max_model_len - scenario.requests.prompt_tokens.astype(np.int64)
    return np.minimum(scenario.requests.output_tokens, np.maximum(room, 1))


def _summary(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    """Return mean, p50, p95 and p99 under their field names."""
    if values.size == 0:
        return {f"{name}_{k}": float("nan") for k in ("mean", "p50", "p95", "p99")}
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_p50": float(p50),
        f"{name}_p95": float(p95),
        f"{name}_p99": float(p99),
    }
