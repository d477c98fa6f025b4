"""Composed steps and those of the tables' own estimator, each with host terms fitted on the same rows.

Steps are evaluated at the measured batch: decodes of the mean context, and for closed loops the share of
prefills. What two host terms per method cannot explain tells which of the two agrees better with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from benchmarks.fit_host_terms import bare_profile
from benchmarks.measured.case import RefusedCase
from benchmarks.measured.dense_stages import Stage
from benchmarks.measured.estimator import MODELS, engine_of
from benchmarks.measured.silicon_vllm import ClosedLoopRun
from benchmarks.measured.step_times import model_ms

StepMs = Callable[[int, int, int], float]
"""Milliseconds of a step by tokens of a prompt alone, decodes and their context."""

_EXPERTS: Final = {each: each for each in ("openai/gpt-oss-120b", "MiniMaxAI/MiniMax-M2.5")}
_MODELS: Final = {**MODELS, **_EXPERTS} | {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-2-70b-hf": "meta-llama/Meta-Llama-3.1-70B",
}
"""Llama-2-70B differs from Llama-3.1-70B in the output head alone."""
_KV_TOKENS: Final = 250_000
"""KV tokens up to which a closed loop at TP 2 has all of its requests running."""
_FIRST_OF_EXPERTS: Final = "0.15"
"""Rows of earlier versions, and of none, are of something else."""


def supported(
    stages: Sequence[Stage], runs: Sequence[ClosedLoopRun], experts: Sequence[ClosedLoopRun | RefusedCase]
) -> Iterator[dict[str, object]]:
    """Yield the errors of both methods on stages and closed loops of models that both know."""
    known = [stage for stage in stages if stage.deployment.model in _MODELS]
    yield from _lines("dense_stages", [_stage(stage) for stage in known])
    loops = [run for run in runs if run.deployment.dtype == "bfloat16" and _is_running_whole(run)]
    yield from _lines("silicon_vllm", [_closed_loop(run) for run in loops])
    for model in _EXPERTS:
        mixtures = [
            run
            for run in experts
            if isinstance(run, ClosedLoopRun)
            and run.deployment.model == model
            and run.deployment.version >= _FIRST_OF_EXPERTS
            and _is_running_whole(run)
        ]
        yield from _lines(f"silicon_moe, {model.split('/')[-1]}", [_closed_loop(run) for run in mixtures])


def _is_running_whole(run: ClosedLoopRun) -> bool:
    tokens = run.concurrency * (run.prompt_tokens + run.output_tokens)
    return tokens <= _KV_TOKENS * run.deployment.tp / 2


def _stage(stage: Stage) -> tuple[float, float, float, float]:
    requests = stage.rate_rps * stage.measured["e2e_ms"] / 1e3
    context = int(stage.prompt_tokens + stage.output_tokens / 2)
    composed, estimated = (step_ms(0, round(requests), context) for step_ms in _methods(stage))
    return stage.measured["itl_ms"], requests, composed, estimated


def _closed_loop(run: ClosedLoopRun) -> tuple[float, float, float, float]:
    requests, prompt = run.concurrency, run.prompt_tokens
    context = prompt + run.output_tokens // 2
    composed, estimated = (
        step_ms(0, requests, context)
        + requests / run.output_tokens * (step_ms(prompt, 0, 0) - step_ms(1, 0, 0))
        for step_ms in _methods(run)
    )
    return run.measured["tpot_ms"], float(requests), composed, estimated


def _methods(row: Stage | ClosedLoopRun) -> tuple[StepMs, StepMs]:
    at = row.deployment
    profile = bare_profile(at)
    engine = engine_of(_MODELS[at.model], at.gpu, at.tp, at.expert_parallel)

    def composed(chunk: int, decodes: int, context: int) -> float:
        return model_ms(profile, chunk, decodes, context)

    def estimated(chunk: int, decodes: int, context: int) -> float:
        if chunk:
            return float(engine.predict_prefill_latency(1, chunk))
        return float(engine.decode_step_latency(decodes, context, 2))

    return composed, estimated


def _lines(source: str, rows: Sequence[tuple[float, ...]]) -> Iterator[dict[str, object]]:
    measured, requests, *methods = (np.array(column) for column in zip(*rows, strict=True))
    for name, step_ms in zip(("composed", "estimator"), methods, strict=True):
        columns = np.stack([1.0 / measured, requests / measured], axis=1)
        terms, *_ = np.linalg.lstsq(columns, 1.0 - step_ms / measured, rcond=None)
        error = step_ms / measured + columns @ terms - 1.0
        yield {
            "rows of": source,
            "method": name,
            "rows": measured.size,
            "bias without host terms": f"{100.0 * np.mean(step_ms / measured - 1.0):+.1f} %",
            "ms per step": f"{terms[0]:.2f}",
            "ms per request": f"{terms[1]:.3f}",
            "MAPE with them": f"{100.0 * np.mean(np.abs(error)):.1f} %",
        }
