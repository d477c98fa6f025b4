"""Engine knobs: GPUs of plans with open knobs against the defaults, on random workloads with tight bounds.

``python -m benchmarks.engine_knobs --out DIR`` plans every workload twice and prints the table; results are
kept in DIR, so that an interrupted run continues. ``--solve-time`` times 384 adapters on 4 GPUs instead.
Workload `seed` draws from one generator:

- profile: one of the two shipped ones;
- adapters: 8 to 64 (log-uniform), ranks each 8, 16 or 32, Zipf popularity with exponent 0 to 1.2;
- mean prompt 100 to 1,000 and mean output 50 to 300 tokens (log-uniform), each with a standard deviation of
  0.5 to 1.5 times the mean;
- total rate: keeps 1 to 2.5 GPUs busy by the lower bound, which ignores latencies;
- bounds: 2 to 10 times the TTFT p99 and 1.25 to 2.5 times the TPOT p99 (log-uniform) of one GPU where
  requests hardly ever wait, at a tenth of the load that keeps it busy; no tighter than 0.3 s and 20 ms, no
  looser than 3 s and 100 ms.

A workload that no fleet of 16 GPUs serves with the default knobs is drawn again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import placement_growth
from benchmarks.common import command_line, emit, numbered_adapters, read_or_make, records_table
from capplan import Lengths, Workload, load_profile, plan, simulate
from capplan.datasets._profile_files import profiles_with_surrogates
from capplan.errors import InfeasibleError
from capplan.planner.problem._bound import busy_gpus
from capplan.planner.problem._problem import KnobSearch
from capplan.planner.problem._setup import make_problem
from capplan.spec import Slo, zipf

GPUS: Final = 16
_LIGHT: Final = 0.1
_TTFT_P99_S: Final = (0.3, 3.0)
_TPOT_P99_MS: Final = (20.0, 100.0)
_DRAWS: Final = 20
_SOLVED: Final = ((0.1, 1.0, 80.0), (0.2, 1.0, 80.0), (0.3, 2.0, 150.0))
"""Loads and bounds of the problems of 384 adapters."""
_REPEATED: Final = 3


def drawn_workload(seed: int, draw: int) -> Workload:
    """Return a random workload with a TTFT and a TPOT bound."""
    random = np.random.default_rng((seed, draw))

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    profile = load_profile(random.choice(profiles_with_surrogates()))
    count = round(log_uniform(8, 64))
    ranks = random.choice([8, 16, 32], count)
    shares = np.array(zipf(count, random.uniform(0.0, 1.2)))
    prompt, output = log_uniform(100, 1000), log_uniform(50, 300)
    spread, busy = random.uniform(0.5, 1.5, 2), random.uniform(1.0, 2.5)
    times = log_uniform(2.0, 10.0), log_uniform(1.25, 2.5)

    def at(total_rps: float) -> Workload:
        return Workload(
            base_model=profile.model.hf_ids[0],
            profile=profile.name,
            prompt_tokens=Lengths(mean=prompt, std=spread[0] * prompt),
            output_tokens=Lengths(mean=output, std=spread[1] * output),
            adapters=numbered_adapters(ranks, shares * total_rps),
        )

    total_rps = busy / busy_gpus(make_problem(at(1.0), 1, None))
    light = simulate(at(_LIGHT * total_rps / busy), profile, a_max=count, s_max=int(max(ranks)), seed=seed)
    bounds = Slo(
        ttft_p99_s=float(np.clip(times[0] * light.ttft_s_p99, *_TTFT_P99_S)),
        tpot_p99_ms=float(np.clip(times[1] * light.tpot_ms_p99, *_TPOT_P99_MS)),
    )
    return at(total_rps).replace(slo=bounds)


def measure(seed: int) -> dict[str, Any]:
    """Return the table row of a workload."""
    for draw in range(_DRAWS):
        workload = drawn_workload(seed, draw)
        try:
            default, default_s = _planned(workload, "default")
        except InfeasibleError:
            continue
        tuned, tuned_s = _planned(workload, "fitted")
        slo, prompt, output = workload.slo, workload.prompt_tokens, workload.output_tokens
        return {
            "seed": seed,
            "drawn": draw + 1,
            "profile": str(workload.profile).split("/")[1],
            "adapters": len(workload.adapters),
            "req/s": f"{workload.total_rate_rps:.1f}",
            "prompt / output": f"{prompt.mean_tokens:.0f} / {output.mean_tokens:.0f}",
            "TTFT p99 s": f"{slo.ttft_p99_s:.3f}",
            "TPOT p99 ms": f"{slo.tpot_p99_ms:.1f}",
            "default: GPUs": default.totals.gpus,
            "verified": default.verification.ok,
            "s": f"{default_s:.1f}",
            "open: GPUs": tuned.totals.gpus,
            "open: verified": tuned.verification.ok,
            "open: s": f"{tuned_s:.1f}",
            "tokens": _values(tuned, "max_num_batched_tokens"),
            "seqs": _values(tuned, "max_num_seqs"),
        }
    raise RuntimeError(f"no feasible workload in {_DRAWS} draws of seed {seed}")


def _planned(workload: Workload, knobs: str) -> tuple[Any, float]:
    started = time.perf_counter()
    found = plan(workload, gpus=GPUS, knobs=knobs)
    return found, time.perf_counter() - started


def _values(found: Any, knob: str) -> str:
    return " ".join(map(str, sorted({getattr(group.engine_args, knob) for group in found.groups})))


def solve_times() -> list[dict[str, Any]]:
    """Return the solve time of 384 adapters on 4 GPUs, without verification; the best of three runs."""
    rows = []
    for load, ttft_p99_s, tpot_p99_ms in _SOLVED:
        bounds = Slo(ttft_p99_s=ttft_p99_s, tpot_p99_ms=tpot_p99_ms)
        problem = make_problem(placement_growth.workload(384, 4, load).replace(slo=bounds), 4, None)
        row: dict[str, Any] = {"load": load, "TTFT p99 s": ttft_p99_s, "TPOT p99 ms": tpot_p99_ms}
        for knobs in (KnobSearch.DEFAULT, KnobSearch.FITTED):
            given = replace(problem, knobs=knobs)
            runs = [placement_growth.solve_once(given, "capplan")[0] for _ in range(_REPEATED)]
            solve_s = min(run.solve_s for run in runs)
            row |= {f"{knobs}: GPUs": len(runs[0].assignments), f"{knobs}: s": f"{solve_s:.2f}"}
        rows.append(row)
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the totals of the table in one sentence."""
    gpus = [(row["default: GPUs"], row["open: GPUs"]) for row in rows]
    fewer, more = (sum(sign * (a - b) > 0 for a, b in gpus) for sign in (1, -1))
    verified = sum(row["open: verified"] for row in rows)
    time_s = [sum(float(row[key]) for row in rows) for key in ("s", "open: s")]
    return (
        f"{len(rows)} workloads: fewer GPUs in {fewer}, more in {more}; {sum(a for a, _ in gpus)} GPUs with "
        f"the defaults, {sum(b for _, b in gpus)} with open knobs; {verified} verified; planning took "
        f"{time_s[0]:.0f} s and {time_s[1]:.0f} s\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workloads", type=int, default=40, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a JSON result per workload")
    parser.add_argument("--solve-time", action="store_true", help="time 384 adapters on 4 GPUs instead")
    parser.add_argument("--done", action="store_true", help="only print the table of the results in DIR")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.solve_time:
        emit(records_table(solve_times()) + "\n", given.markdown)
        return
    if given.out is None:
        parser.error("--out DIR is required")
    seeds = range(given.first, given.first + given.workloads)
    files = {seed: given.out / f"{seed}.json" for seed in seeds}
    if given.done:
        rows = [json.loads(file.read_text(encoding="utf-8")) for file in files.values() if file.exists()]
    else:
        rows = []
        for seed, file in files.items():
            rows.append(read_or_make(file, partial(measure, seed)))
            print(json.dumps(rows[-1]), flush=True)
    emit(f"{records_table(rows)}\n\n{summary(rows)}", given.markdown)


if __name__ == "__main__":
    main()
