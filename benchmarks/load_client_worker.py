"""Load on paced servers from one process, and its CPU time; `benchmarks.load_client` starts it.

It is run as a file, so it imports the package that PYTHONPATH names: two versions are compared in one run.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from capplan import Adapter, Lengths, Workload
from capplan.profiling.load import LoadSettings, RequestFile, Target
from capplan.profiling.load._bench import OpenLoop
from capplan.profiling.load._requests import PromptWriter, RequestBodies, schedule_of


def measured(url: str, rate_rps: float, output_tokens: int, duration_s: float) -> dict[str, float]:
    """Send a workload; return CPU seconds of this process, requests and tokens."""
    adapters = [Adapter(name=f"a{number}", rank=8, rate_rps=rate_rps / 20) for number in range(20)]
    lengths = {"prompt_tokens": Lengths(mean=100), "output_tokens": Lengths(mean=output_tokens)}
    schedule = schedule_of(Workload(base_model="base", adapters=adapters, **lengths), duration_s)
    bodies = RequestBodies(PromptWriter(), [name or "base" for name in schedule.names], {})
    settings = LoadSettings(duration_s=duration_s)

    async def run(file: RequestFile) -> OpenLoop:
        loop = OpenLoop(schedule, bodies, Target(url), settings, file)
        await loop.run(asyncio.Event())
        return loop

    with tempfile.TemporaryDirectory() as folder, RequestFile(Path(folder) / "requests.parquet") as file:
        begin_s = time.process_time()
        record = asyncio.run(run(file)).record
        cpu_s = time.process_time() - begin_s
    finished = record.of_kind("finished")
    if not finished.all():
        raise SystemExit(f"{int((~finished).sum())} of {finished.size} requests have failed")
    return {"cpu_s": cpu_s, "requests": finished.size, "tokens": int(record.events.sum())}


def main() -> None:
    loads: list[dict[str, Any]] = json.loads(sys.argv[1])
    measured(**loads[0] | {"duration_s": 0.5})  # imports and compilation
    json.dump([measured(**load) for load in loads], sys.stdout)


if __name__ == "__main__":
    main()
