"""How fast datasets are generated: ``python -m benchmarks.dataset_rate PROFILE`` prints a line per design.

One-hour scenarios, through the public `generate_dataset`, into a folder that is thrown away. Wall time, after
compilation, with everything that a user waits for: drawing, simulating, features, writing and checking. Peak
memory is that of the largest process.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from capplan import load_profile, simulate
from capplan.spec import Adapter, Lengths, Profile, Workload
from capplan.twin.dataset import DESIGNS, generate_dataset
from capplan.twin.sweep import cores

HOUR_S = 3600.0
BAR_SCENARIOS, BAR_MINUTES, BAR_CORES = 10_000, 40.0, 2
_KIB_PER_MIB = 1024.0


def measure(profile: Profile, design: str, scenarios: int, workers: int, seed: int) -> tuple[float, float]:
    """Return the scenarios per second and core, and per CPU second (alike where nothing else runs)."""
    with tempfile.TemporaryDirectory() as folder:
        started, cpu_s = time.perf_counter(), cpu_seconds()
        generate_dataset(
            Path(folder) / "data", profile, design=design, scenarios=scenarios, seed=seed, workers=workers
        )
        wall_s = time.perf_counter() - started
        return scenarios / wall_s / workers, scenarios / (cpu_seconds() - cpu_s)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the workers that have ended."""
    both = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in both)


def compile_twin(profile: Profile) -> None:
    tokens = Lengths(mean=8)
    small = Workload(
        base_model="any",
        adapters=(Adapter(name="a", rank=8, rate_rps=1.0),),
        prompt_tokens=tokens,
        output_tokens=tokens,
    )
    simulate(small, profile, a_max=1, s_max=8, duration_s=10.0)
    with tempfile.TemporaryDirectory() as folder:
        generate_dataset(
            Path(folder) / "data", profile, design="paper-grid", scenarios=1, duration_s=1.0, workers=1
        )


def peak_mib() -> float:
    """Return the most memory that one process, this one or a worker, has held."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak = max(resource.getrusage(kind).ru_maxrss for kind in kinds)
    return peak / _KIB_PER_MIB / (1024.0 if sys.platform == "darwin" else 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", metavar="PROFILE", help="shipped profile or path of a profile JSON")
    parser.add_argument("--scenarios", type=int, default=512, metavar="N", help="of each design")
    parser.add_argument("--workers", type=int, default=cores(), metavar="W")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    given = parser.parse_args()
    profile = load_profile(given.profile)
    compile_twin(profile)
    print(f"{given.scenarios} one-hour scenarios of each design, {given.workers} workers, {profile.name}")
    for design in DESIGNS:
        rate, per_cpu_s = measure(profile, design, given.scenarios, given.workers, given.seed)
        minutes = BAR_SCENARIOS / rate / BAR_CORES / 60.0
        print(
            f"{design:14} {rate:6.2f} scenarios per second and core ({per_cpu_s:.2f} per CPU second);"
            f" {BAR_SCENARIOS:,} on {BAR_CORES} cores: {minutes:.1f} min (bar {BAR_MINUTES:.0f});"
            f" peak {peak_mib():.0f} MiB per process",
            flush=True,
        )


if __name__ == "__main__":
    main()
