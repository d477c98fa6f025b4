"""Which way an answer may move with a feature when all other features stay: the signs that physics demands.

Derived features carry most of an effect: a higher load also raises `load_over_capacity`, more KV lowers it.
So signs stand on them, each in the direction in which its cause moves it:

- **More load never un-starves.** All rates times a factor above 1 raise the rates, what is in flight and what
  waits for slots, and lower the shares that are served.
- **More KV never hurts.** More GPU memory raises what fits and the share that is served, and lowers
  `load_over_capacity` and `batch_over_limit`.

What is guaranteed of a model with these signs: of two vectors that differ in signed features only, each in
its direction, the second is not answered better (or not worse). Of two *workloads* it follows as far as the
fluid estimate moves its features so. Some it may move the other way: where slots bind, more load can leave
the batch emptier; with more KV it counts more active adapters and longer waits for slots. Nothing is promised
of an adapter added or taken away: it moves means and spreads in either direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from capplan.models.learning.grids import Task
from capplan.models.surrogates.features import FEATURES

STARVATION_SIGNS: Final[Mapping[str, int]] = MappingProxyType(
    {
        # The load itself. Spread and largest rate scale with it; at a given sum they say little else.
        "rate_sum_rps": 1,
        "rate_std_rps": 1,
        "rate_max_rps": 1,
        "offered_tok_s": 1,
        # Against what the engine can carry: a batch that is full, a queue that grows.
        "load_over_capacity": 1,
        "batch_over_limit": 1,
        # What the estimate says is served of it: by the engine, by the slots, by slots with a full front end.
        "expected_share": -1,
        "slots_share": -1,
        "full_queue_share": -1,
        # Adapters compete for slots: how many ask at a time, and how long one waits.
        "active_adapters": 1,
        "active_adapters_over_slots": 1,
        "slot_wait_s": 1,
        # Memory: more requests at a time, fewer preemptions.
        "kv_tokens": -1,
        "kv_requests_over_seqs": -1,
        "batch_limit": -1,
    }
)
"""Signs of the probability of starvation."""

SERVED_SHARE_SIGNS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "load_over_capacity": -1,
        "batch_over_limit": -1,
        "expected_share": 1,
        "slots_share": 1,
        "full_queue_share": 1,
        "kv_tokens": 1,
        "kv_requests_over_seqs": 1,
        "batch_limit": 1,
    }
)
"""Signs of throughput over the *offered* load. Throughput itself may fall with load: queues cost time."""

EXPECTED_RATIO_SIGNS: Final[Mapping[str, int]] = MappingProxyType(
    {"kv_tokens": 1, "kv_requests_over_seqs": 1, "batch_limit": 1}
)
"""Signs of throughput over the *expected* throughput: of memory only.

It has no others: far above capacity the ratio rises again, since the batch is always full there. So here
more KV never hurts at the same expectation; what the expectation itself does is the estimate's affair.
"""


def signs(task: Task, columns: Sequence[str] = FEATURES, baseline: str = "expected") -> tuple[int, ...]:
    """Return -1, 0 or 1 for every column: the answer must not rise, is free, or must not fall with it.

    Parameters
    ----------
    task
        ``starvation``: the probability of it. ``throughput``: its ratio to the baseline.
    columns
        Names of features.
    baseline
        Of throughput: ``expected`` or ``offered``.
    """
    ratio = SERVED_SHARE_SIGNS if baseline == "offered" else EXPECTED_RATIO_SIGNS
    known = STARVATION_SIGNS if task == "starvation" else ratio
    return tuple(known.get(name, 0) for name in columns)
