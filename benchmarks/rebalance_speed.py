"""Speed of a re-balancing on one core: ``python -m benchmarks.rebalance_speed``.

10,000 adapters of ranks 8 to 128 on 256 servers, with a Zipf popularity and 70 % of what the servers sustain.
One step closes the window, forecasts the demand, places the adapters and permutes the servers, as twin and
router call it. Each window has the demand of the one before, times a random factor from 0.5 to 1.5 per
adapter. Times are medians and maxima over the steps, on one core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from benchmarks.common import command_line, markdown
from capplan.serving.rebalancing import AdapterDemand, Rebalancer
from capplan.spec import REBALANCE_SOLVERS, RebalanceSettings

RANKS = (8, 16, 32, 64, 128)
POINTS = {8: 4800.0, 16: 4600.0, 32: 4200.0, 64: 3400.0, 128: 2200.0}
"""Tokens per second that a server sustains, by rank."""
BYTES_PER_RANK = 2 * 2**20
LOAD = 0.7


def steps_s(rebalancer: Rebalancer, tok_s: np.ndarray, steps: int) -> tuple[list[float], int, int]:
    """Return the times of steps, and the bytes that new placements lack, with and without permutation."""
    rng = np.random.default_rng(1)
    stored = [set[str]() for _ in range(rebalancer.servers)]
    made = rebalancer.step(None, stored, [{} for _ in stored])
    times_s, moved, unpermuted = [], 0, 0
    for _ in range(steps):
        stored = [set(own) for own in made.shares]
        tok_s = tok_s * rng.uniform(0.5, 1.5, tok_s.size)
        began_s = time.perf_counter()
        made = rebalancer.step(tok_s, stored, made.shares)
        times_s.append(time.perf_counter() - began_s)
        moved += made.moved_bytes
        unpermuted += made.unpermuted_bytes
    return times_s, moved, unpermuted


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--servers", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    weights = rng.permutation(1.0 / np.arange(1, given.adapters + 1))
    ranks = [RANKS[i % len(RANKS)] for i in range(given.adapters)]
    used = float((weights / [POINTS[rank] for rank in ranks]).sum())
    tok_s = weights * LOAD * given.servers / used
    adapters = [
        AdapterDemand(f"a{i}", rank, float(tok_s[i]), rank * BYTES_PER_RANK) for i, rank in enumerate(ranks)
    ]
    rows = []
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for solver in REBALANCE_SOLVERS:
        rebalancer = Rebalancer(adapters, given.servers, POINTS, RebalanceSettings(solver=solver))
        times_s, moved, unpermuted = steps_s(rebalancer, tok_s, given.steps)
        row = [solver, f"{median(times_s):.2f}", f"{max(times_s):.2f}"]
        rows.append([*row, f"{moved / 1e9:.0f}", f"{unpermuted / 1e9:.0f}"])
    print(markdown(["solver", "median, s", "largest, s", "lacking, GB", "without permutation, GB"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
