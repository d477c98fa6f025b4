"""Conservation under random loads and loading policies: ``python -m benchmarks.loading_invariants``.

Every case is a random engine with one pool, a loading policy in turn, and its requests. The compiled twin and
the readable reference leave the same record, times of assisted batches included. The link carries every load
once. Pauses of a request's decoding are between none and the time from its first token to its last. In
assisted batches, the cores' tasks fit into the layers: with more cores no batch takes longer, and with one
task per core none waits for another.
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from benchmarks.common import play_cases
from capplan.twin import Scenario

_FIRST_SEED = 100_000
"""Beyond the seeds of the tests."""


def play(seed: int) -> Counter[str]:
    """Check one case; return how often each event occurred."""
    from capplan.serving.pooled import ASSISTED, ASYNCHRONOUS, ON_DEMAND, RESIDENT
    from capplan.twin.instance import NEVER, run
    from tests.oracle import run_reference
    from tests.twin.comparison import assert_same
    from tests.twin.pooled import seeded_pooled

    scenario = seeded_pooled(_FIRST_SEED + seed)._replace(buckets=1)
    trace = run(scenario)
    assert_same(run_reference(scenario), trace, but=("stalled_ns",))
    loads = trace.adapters.loads.astype(np.int64)
    assert int(loads.sum()) == trace.counts.adapter_loads
    assert int(trace.pool.link_ns) == int(loads @ scenario.costs.load_ns), "a copy was lost or made twice"
    finished = trace.finish_ns != NEVER
    passed_ns = (trace.finish_ns - trace.first_ns)[finished]
    assert np.all(trace.interruptions[finished] >= 0)
    assert np.all((trace.interrupted_ns[finished] >= 0) & (trace.interrupted_ns[finished] <= passed_ns))
    names = {ASYNCHRONOUS: "strawman", ON_DEMAND: "on-demand", ASSISTED: "assisted", RESIDENT: "resident"}
    kind = names[scenario.limits.loading]
    if kind == "resident":
        assert trace.counts.adapter_loads == 0
    if kind == "assisted":
        _check_cores(scenario, seed)
    return Counter({kind: 1, f"loads, {kind}": int(loads.sum()), "requests": int(finished.sum())})


def _check_cores(scenario: Scenario, seed: int) -> None:
    """Check the durations of one batch of prompts with 1, 2, ... cores."""
    from tests.oracle.assist import assisted_ns
    from tests.oracle.host_link import ReferenceCopier

    rng = np.random.default_rng(seed)
    assist, load_ns = scenario.costs.assist, scenario.costs.load_ns.tolist()
    adapters = range(1, 1 + min(3, scenario.adapters))
    prompts = [(adapter, int(rng.integers(1, 30))) for adapter in adapters]
    copier, step_ns = ReferenceCopier(), int(rng.integers(1, 20_000_000))
    for adapter, _ in prompts:
        copier.begin(adapter, 0, load_ns[adapter], announce=True)
    tasks = sum(int(assist.modules[a]) * -(-n // assist.tokens_per_task) for a, n in prompts)
    longest = max(
        assist.base_ns + round(min(n, assist.tokens_per_task) * float(assist.token_ns[a])) for a, n in prompts
    )
    most_ns = assist.layers * (max(step_ns // assist.layers + 1, longest) + assist.signal_ns)
    with_many = assist._replace(workers=tasks)
    found = assisted_ns(with_many, copier, prompts, load_ns, 0, step_ns)
    assert step_ns <= found <= most_ns, "a task waited for another one, or layers took no time"
    for workers in (1, 2, 3):
        fewer = assisted_ns(assist._replace(workers=workers), copier, prompts, load_ns, 0, step_ns)
        work_ns = assist.layers * (step_ns // assist.layers + 1 + -(-tasks // workers) * longest)
        assert step_ns <= fewer <= work_ns + assist.layers * assist.signal_ns


def main() -> int:
    return play_cases(__doc__, play, 2_000)


if __name__ == "__main__":
    sys.exit(main())
