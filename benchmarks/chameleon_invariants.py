"""Invariants of Chameleon's scheduler and cache under random worlds with short memory.

``python -m benchmarks.chameleon_invariants [--cases N] [--first-seed N]``

Every case replays a random engine and its requests in the compiled rules and in the readable reference: all
orders, caches and prefetches, whole and chunked prompts, bypassing on and off, with wrong predictions,
refreshes and cancelled requests. After every step both have the same state, which is checked as a whole: KV
and adapters fit into the pool, outstanding tokens into the quotas (but for recorded overruns), no adapter in
use is evicted and none that is wanted while another could go, and every request ends. Every tenth case has
ample memory instead, and compares each batch with algorithm 1 as printed. Failing seeds are printed.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from benchmarks.common import command_line

_PROGRESS_EVERY = 500
_LONG_EVERY = 8
"""Every so many cases have more requests."""
_AMPLE_EVERY = 10


def play(seed: int) -> Counter[str]:
    """Check one case; return how often each event occurred."""
    from tests.serving.algorithm_1 import compare_batches, make_ample_world
    from tests.serving.pooled_worlds import events_of, last_of, make_pooled_world
    from tests.serving.worlds import seeded

    if seed % _AMPLE_EVERY == 0:
        batches, loans = compare_batches(make_ample_world(seed))
        return Counter({"batches of algorithm 1": batches, "of them with loans": loans})
    requests = 60 if seed % _LONG_EVERY == 0 else 24
    run = last_of(make_pooled_world(seeded(seed), requests))
    counted = {"requests": len(run.accepted), "steps": run.steps}
    return events_of(run) + Counter(counted)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=int, default=10_000, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    given = parser.parse_args()
    events: Counter[str] = Counter()
    failures = 0
    began_s = time.perf_counter()
    for case in range(given.cases):
        seed = given.first_seed + case
        try:
            events += play(seed)
        except AssertionError as error:
            failures += 1
            print(f"seed {seed}: {' '.join(str(error).split())[:300]}", flush=True)
        if (case + 1) % _PROGRESS_EVERY == 0:
            elapsed_s = time.perf_counter() - began_s
            print(f"{case + 1} cases, {failures} failed, {elapsed_s:.0f} s", file=sys.stderr, flush=True)
    for name, count in events.most_common():
        print(f"{count:9}  {name.replace('_', ' ')}")
    print(f"{given.cases} cases, {failures} failed, {time.perf_counter() - began_s:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
