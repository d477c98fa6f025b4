"""Speed with step tables: ``python -m benchmarks.step_tables`` prints the table of the docs.

A shipped profile is compared with itself as tables, which predict the same times. The twin runs one workload
with both in turn. The ratio of CPU seconds is the median over all pairs of neighbouring runs. Plans have no
surrogates for tables, so their search asks the twin.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Final

import numpy as np

from benchmarks.common import H100_LLAMA, LLAMA, command_line, cpu_timed, emit, equal_adapters, records_table
from capplan import Lengths, Profile, SimulationResult, Workload, load_profile, load_workload, plan, simulate
from capplan.models import ADDITIVE, TABLE
from capplan.models._step_latency import GRAPH_TOKENS
from capplan.spec import Coefficient, FittedModel, StepTable

CHATS: Final = (Lengths(mean=223, std=245), Lengths(mean=194, std=206))
_POINTS: Final = 32  # per axis
_MOST: Final = {"tokens": 16_384.0, "requests": 1_024.0, "kv_tokens": 2_097_152.0}


def tabulated(profile: Profile, points: int = _POINTS) -> Profile:
    """Return a profile of the additive form with its terms of tokens, requests and KV tokens as tables."""
    model = profile.step_latency
    if model.form != ADDITIVE.name:
        raise ValueError(f"form must be {ADDITIVE.name}, got {model.form}")
    value = {name: each.value for name, each in model.coefficients.items()}
    tokens = np.union1d(_grid("tokens", points), [GRAPH_TOKENS])
    requests, kv_tokens = _grid("requests", points), np.append(0.0, _grid("kv_tokens", points - 1))
    beyond = np.maximum(0.0, tokens - GRAPH_TOKENS)
    tokens_ms = (value["ms_per_ktoken"] * tokens + value["ms_per_ktoken_beyond_graphs"] * beyond) / 1e3
    requests_ms = np.add.outer(
        value.get("ms_per_request", 0.0) * requests, value["ms_per_kv_ktoken"] * kv_tokens / 1e3
    )
    tables = {
        "tokens_ms": StepTable.of({"tokens": tokens}, tokens_ms),
        "requests_ms": StepTable.of({"requests": requests, "kv_tokens": kv_tokens}, requests_ms),
    }
    moved = ("ms_per_ktoken", "ms_per_ktoken_beyond_graphs", "ms_per_request", "ms_per_kv_ktoken")
    return profile.replace(step_latency=_with_tables(model, tables, moved))


def _grid(name: str, points: int) -> np.ndarray:
    return np.unique(np.geomspace(1.0, _MOST[name], points).round())


def _with_tables(model: FittedModel, tables: dict[str, StepTable], moved: Sequence[str]) -> FittedModel:
    rest: dict[str, Coefficient] = {n: c for n, c in model.coefficients.items() if n not in moved}
    return model.replace(form=TABLE.name, coefficients=rest, tables=tables, uncertainty=None)


def with_prefill_pairs(profile: Profile) -> Profile:
    """Return a profile with tables whose prefill attention takes time, so that the twin counts its pairs."""
    model = profile.step_latency
    pairs = {"ms_per_prefill_mpair": Coefficient(value=0.1)}
    return profile.replace(step_latency=model.replace(coefficients=model.coefficients | pairs))


def workloads() -> dict[str, tuple[Workload, int, float]]:
    """Return workload, slots and seconds of each case."""
    return {
        "128 adapters at 7.5 req/s, 64 slots, an hour": (_workload(128, 7.5, *CHATS), 64, 3600.0),
        "384 adapters at 20 req/s, 32 slots, 10 minutes": (_workload(384, 20.0, *CHATS), 32, 600.0),
        "16 adapters at 1 req/s, 16 slots, 4 hours": (_workload(16, 1.0, *CHATS), 16, 14_400.0),
    }


def _workload(adapters: int, total_rps: float, prompt: Lengths, output: Lengths) -> Workload:
    return Workload(
        base_model=LLAMA,
        adapters=equal_adapters(adapters, 8, total_rps),
        prompt_tokens=prompt,
        output_tokens=output,
    )


def ratios(first: Callable[[], object], second: Callable[[], object], pairs: int) -> list[float]:
    """Return CPU seconds of the second over those of the first, of runs in turn."""
    found = []
    for number in range(pairs):
        order = (first, second) if number % 2 else (second, first)
        seconds = {call: cpu_timed(call)[0] for call in order}
        found.append(seconds[second] / seconds[first])
    return found


def twin_table(pairs: int) -> str:
    """Return the CPU time of the twin with tables relative to that of the additive form."""
    plain = load_profile(H100_LLAMA)
    tables = tabulated(plain)
    others = {
        "tables": tables,
        "tables and prefill pairs": with_prefill_pairs(tables),
        "additive again": plain,
    }
    rows = []
    for name, (workload, a_max, duration_s) in workloads().items():
        run = partial(simulate, workload, a_max=a_max, s_max=8, duration_s=duration_s)
        result: SimulationResult = run(profile=plain)
        row: dict[str, object] = {"workload": name, "steps": f"{result.steps:,}"}
        for label, other in others.items():
            run(profile=other)
            measured = ratios(partial(run, profile=plain), partial(run, profile=other), pairs)
            row[label] = f"{median(measured):.3f}"
        rows.append(row)
    return records_table(rows)


def plan_table(pairs: int) -> str:
    """Return the CPU seconds of `plan` with both profiles; 64 and 384 adapters have no latency bound."""
    plain = load_profile(H100_LLAMA)
    tables = tabulated(plain)
    cases = {
        "examples/chat-96, TTFT p99 bound": (load_workload("examples/chat-96/workload.yaml"), None),
        "64 adapters at 12.8 req/s, 4 GPUs": (_workload(64, 12.8, *CHATS), 4),
        "384 adapters at 38.4 req/s, 8 GPUs": (_workload(384, 38.4, *CHATS), 8),
    }
    rows = []
    for name, (workload, gpus) in cases.items():
        run = partial(plan, workload, gpus=gpus)
        answers = run(profile=plain), run(profile=tables)
        seconds = [
            median(cpu_timed(partial(run, profile=each))[0] for _ in range(pairs)) for each in (plain, tables)
        ]
        rows.append(
            {
                "workload": name,
                "GPUs": " and ".join(str(each.totals.gpus) for each in answers),
                "additive, CPU s": f"{seconds[0]:.1f}",
                "tables, CPU s": f"{seconds[1]:.1f}",
                "ratio": f"{seconds[1] / seconds[0]:.1f}",
            }
        )
    return records_table(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser: argparse.ArgumentParser = command_line(__doc__)
    parser.add_argument("--pairs", type=int, default=21, help="pairs of runs of each case")
    parser.add_argument("--plans", type=int, default=0, metavar="N", help="time plans as well, N of each")
    chosen = parser.parse_args(arguments)
    parts = [twin_table(chosen.pairs)] if chosen.pairs else []
    parts += [plan_table(chosen.plans)] if chosen.plans else []
    emit("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
