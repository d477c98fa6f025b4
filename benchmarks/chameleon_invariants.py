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
from collections import Counter

from benchmarks.common import play_cases

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
    return play_cases(__doc__, play, 10_000)


if __name__ == "__main__":
    sys.exit(main())
