"""The closed loop on the reference engine: profile, calibrate, plan, validate.

    python -m benchmarks.closed_loop --out DIR

measures the engine, makes a profile of the tables, plans 24 adapters on one engine with it, and runs the plan
at 40, 70 and 90 % of its capacity and once overloaded, each under the requests of the twin; then it measures
other numbers of slots under overload, for comparison with the plan's choice. Each stage writes a file to DIR;
an interrupted run is resumed. The run takes about half an hour with the defaults, on an idle machine.

    python -m benchmarks.closed_loop --out DIR --shape SEED

does so for a model, adapters, popularity and lengths drawn at random, which the engine was not developed on:
one profile of 300 s, and loads of 60, 90 and 150 %, or those of `--loads`. The bars are `SHAPE_BARS`, for
predictions at the speed that the engine's probe finds. Errors of those at the profile's speed stand beside.

Load 100 % is the capacity of the plan, at which a tenth of the offered tokens may be left unserved: 90 % is
about where the engine saturates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from benchmarks.common import command_line, records_table
from capplan.profiling.validation._loop import ClosedLoop, LoopSettings, VoidError
from capplan.spec import zipf

LOADS: Final = (0.4, 0.7, 0.9, 1.5)
OVERLOAD: Final = 1.5
STAGES: Final = ("memory", "loads", "served")
"""Stages of `capplan profile engine` that calibration needs."""
METRICS: Final = ("throughput_tok_s", "itl_ms_mean", "ttft_s_mean", "served_fraction")
SHAPE_LOADS: Final = (0.6, 0.9, 1.5)
SHAPE_METRICS: Final = ("throughput_tok_s", "itl_ms_mean", "ttft_s_p50", "ttft_s_mean")
SHAPE_BARS: Final = MappingProxyType({"throughput_tok_s": 4.0, "itl_ms_mean": 8.0, "ttft_s_p50": 20.0})
"""Largest SMAPE in percent; of the TTFT only below saturation."""
SPAN_BAR: Final = 2.0
SLOTS_BAR: Final = 0.05


@dataclass(frozen=True)
class Run:
    load: float
    a_max: int
    facts: Mapping[str, Any]

    def metric(self, name: str) -> dict[str, Any]:
        return next(each for each in self.group["comparisons"] if each["name"] == name)

    @property
    def group(self) -> dict[str, Any]:
        return self.facts["groups"][0]


def measure(given: argparse.Namespace) -> list[Run]:
    """Run the missing validations: the plan at its loads, then other numbers of slots."""
    slots = tuple(given.profiled_slots)
    setting = LoopSettings(
        model=given.model, threads=given.threads, slots=slots, form=given.form, point_s=given.point_s
    )
    loop = ClosedLoop(given.out, setting, lambda line: print(time.strftime("%H:%M:%S"), line, flush=True))
    if not loop.profile.exists():
        loop.measure(given.budget_s, STAGES)
    loop.plan()
    planned = int(loop.group()["engine_args"]["max_loras"])
    runs = [Run(load, planned, loop.validate(load, given.duration_s)) for load in LOADS]
    others = [n for n in given.slots if n != planned]
    return runs + [Run(OVERLOAD, n, loop.validate(OVERLOAD, given.duration_s, n)) for n in others]


def report(runs: Sequence[Run]) -> bool:
    """Print the plan at its loads and the slots; return whether all bars hold."""
    at_plan = runs[: len(LOADS)]
    print(records_table(map(_load_row, at_plan)))
    gaps = [run.metric("itl_ms_mean")["measured"] for run in at_plan]
    span = max(gaps) / min(gaps)
    print(f"\nmeasured mean ITL spans a factor {span:.2f} (bar {SPAN_BAR:g})\n")
    swept = {run.a_max: run.metric("throughput_tok_s") for run in runs if run.load == OVERLOAD}
    best = max(throughput["measured"] for throughput in swept.values())
    planned = at_plan[0].a_max
    print(
        records_table(
            {
                "slots": f"{a_max} (plan)" if a_max == planned else a_max,
                "throughput, tok/s": _shown(throughput["measured"]),
                "predicted": _shown(throughput["predicted"]),
                "of the best": f"{throughput['measured'] / best:.3f}",
            }
            for a_max, throughput in sorted(swept.items())
        )
    )
    near = swept[planned]["measured"] >= (1.0 - SLOTS_BAR) * best
    return near and span >= SPAN_BAR and all(run.group["agrees"] for run in at_plan)


def _load_row(run: Run) -> dict[str, object]:
    metrics = {name: run.metric(name) for name in METRICS}
    throughput, itl = metrics["throughput_tok_s"], metrics["itl_ms_mean"]
    steps = f"{_shown(throughput['constant_step_error'])}, {_shown(itl['constant_step_error'])}"
    return {
        "load": f"{run.load:.0%}",
        **{f"{name}: measured": _shown(each["measured"]) for name, each in metrics.items()},
        **{f"{name}: SMAPE, %": _shown(each["error"]) for name, each in metrics.items()},
        "constant step: throughput, ITL, %": steps,
        "offered load, %": _shown(throughput["offered_load_error"]),
        "starved: measured, predicted": f"{run.group['starved']}, {run.group['predicted_starved']}",
        "agrees": "yes" if run.group["agrees"] else "NO: " + "; ".join(run.group["faults"]),
    }


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def drawn_shape(seed: int) -> LoopSettings:
    """Return a closed loop of a random model and workload."""
    rng = np.random.default_rng(seed)
    while True:
        group, kv_heads, head_dim = (int(rng.choice(each)) for each in (range(1, 8), (1, 2, 4), (16, 32, 64)))
        hidden = group * kv_heads * head_dim
        if 128 <= hidden <= 384:
            break
    family = str(rng.choice(["Llama", "Qwen2"]))
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_size": hidden,
        "intermediate_size": 8 * round(hidden * rng.uniform(2.0, 3.5) / 8),
        "num_hidden_layers": int(rng.integers(2, 9)),
        "num_attention_heads": group * kv_heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": int(rng.choice([512, 1024, 2048])),
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": bool(rng.integers(2)),
        "torch_dtype": "float32",
    }
    adapters = int(rng.integers(8, 41))
    ranks = sorted(rng.choice([4, 8, 16, 32], int(rng.integers(1, 4)), replace=False).tolist())
    exponent = float(rng.choice([0.0, 0.7, 1.0]))
    prompt, output = float(rng.choice([40, 60, 100])), float(rng.choice([30, 50, 80]))
    return LoopSettings(
        config=config,
        adapters=adapters,
        ranks=tuple(ranks),
        popularity=zipf(adapters, exponent),
        slots=(8,),
        engine=LoopSettings.engine.replace(max_num_seqs=int(rng.choice([16, 24, 32, 48]))),
        prompt_tokens=(prompt, 0.6 * prompt),
        output_tokens=(output, 0.6 * output),
        form=None,
    )


def measure_shape(given: argparse.Namespace) -> bool:
    """Run the missing validations of a random shape and print them; return whether all bars hold."""
    setting = drawn_shape(given.shape)
    loop = ClosedLoop(given.out, setting, lambda line: print(time.strftime("%H:%M:%S"), line, flush=True))
    if not loop.profile.exists():
        loop.measure(given.budget_s)
    loop.plan()
    planned = int(loop.group()["engine_args"]["max_loras"])
    runs = [Run(load, planned, loop.validate(load, given.duration_s)) for load in given.loads]
    names = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    print(", ".join(f"{name} {setting.config[name]}" for name in names))
    print(f"{setting.adapters} adapters of ranks {setting.ranks}", end=", ")
    print(f"{setting.engine.max_num_seqs} sequences, {planned} slots")
    print(records_table(map(_shape_row, runs)))
    return all(_holds(run) for run in runs)


def _shape_row(run: Run) -> dict[str, object]:
    metrics = {name: run.metric(name) for name in SHAPE_METRICS}
    return {
        "load": f"{run.load:.0%}",
        "time of the probe over the profile's": _shown(run.group["slowdown"]),
        **{
            name: f"{_shown(each['measured'])} / {_shown(each['predicted'])} ({each['error']:.1f} %; "
            f"as profiled {each['as_profiled_error']:.1f} %)"
            for name, each in metrics.items()
        },
        "starved: measured, predicted": f"{run.group['starved']}, {run.group['predicted_starved']}",
        "holds": "yes" if _holds(run) else "NO",
    }


def _holds(run: Run) -> bool:
    bars = {name: bar for name, bar in SHAPE_BARS.items() if run.load < 1.0 or name != "ttft_s_p50"}
    verdict = run.group["starved"] == run.group["predicted_starved"] and not run.group["faults"]
    return verdict and all(run.metric(name)["error"] <= bar for name, bar in bars.items())


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--shape", type=int, metavar="SEED", help="draw the model and the workload at random")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=SHAPE_LOADS, metavar="SHARE", help="of a shape"
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="small-llama", help="small-llama, or as for capplan serve")
    parser.add_argument("--form", default="additive")
    parser.add_argument("--budget-s", type=float, help="of the profile; default 600, of a shape 300")
    parser.add_argument("--point-s", type=float, default=2.0)
    parser.add_argument("--duration", dest="duration_s", type=float, default=120.0, help="of each validation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profiled-slots", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--slots", type=int, nargs="*", default=[2, 4, 8, 16, 24])
    given = parser.parse_args()
    given.budget_s = given.budget_s or (600.0 if given.shape is None else 300.0)
    try:
        if given.shape is not None:
            return 0 if measure_shape(given) else 1
        runs = measure(given)
    except VoidError as error:
        raise SystemExit(f"{error}; the same command measures it again") from None
    return 0 if report(runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
