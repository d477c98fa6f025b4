"""Work of the scheduler per step of the engine: `python -m benchmarks.scheduler_cost`.

A saturated engine: about 200 requests run, and 1,000 wait, because every request that ends is replaced.
Memory is what binds in one pool, so that every step looks for requests that still fit; under rules with slots
it is the number of requests. The time of a step is that of the scheduler's calls from the engine: `submit` of
the requests that arrived since the step before, refresh of the queues, `schedule`, the list of the step's
requests, and `commit`; the column `submit` is per request. Model and sampling run in between, and fill the
processor's caches, but do not count. Outputs are predicted by classes with an accuracy of 0.8, so that
requests outgrow their predictions.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np

from benchmarks.common import command_line, records_table
from capplan.engine import Engine, ModelConfig, SamplingParams
from capplan.engine import _engine_core as engine_core

BAR_US: Final = 200.0
_CALLS: Final = ("refresh", "schedule", "scheduler_output", "commit")
_SUBMIT: Final = "submit"
_MODEL: Final = ModelConfig(
    name="tiny",
    layers=1,
    hidden_size=64,
    heads=8,
    kv_heads=8,
    head_dim=8,
    intermediate_size=64,
    vocab_size=256,
    max_positions=256,
)
_RANKS: Final = (1, 2, 4, 8, 16)
"""Of the adapters in turn; a rank takes the memory of 7 tokens."""
_ADAPTERS: Final = 100
_BLOCK: Final = 16
_BLOCKS_PER_REQUEST: Final = 8
"""Of the memory: 6.5 for a mean request, the rest for adapters."""
_PROMPT, _OUTPUT = (4, 60), (8, 120)
"""Bounds of uniform lengths; the mean request ends with 96 tokens."""

_PREDICTOR: Final = MappingProxyType({"kind": "classes", "accuracy": 0.8})
SYSTEMS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "chameleon": {"scheduler": {"policy": "chameleon", "predictor": _PREDICTOR}, "cache": "chameleon"},
        "chameleon, chunked": {
            "scheduler": {"policy": "chameleon", "predictor": _PREDICTOR, "chunked": True},
            "cache": "chameleon",
        },
        "sjf": {"scheduler": {"policy": "sjf", "predictor": _PREDICTOR}, "cache": "lru"},
        "fifo": {"scheduler": "fifo", "cache": "lru"},
        "slora": {"rules": "slora"},
        "capplan": {"rules": "capplan", "enable_prefix_caching": False},
        "vllm-0.32-sync": {"rules": "vllm-0.32-sync", "enable_prefix_caching": False},
    }
)


@contextmanager
def scheduler_time(laps_ns: Counter[str]) -> Iterator[None]:
    """Add up the durations of the scheduler's calls from the engine, by name."""

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin_ns = time.perf_counter_ns()
            result = call(*arguments)
            laps_ns[name] += time.perf_counter_ns() - begin_ns
            return result

        return run

    originals = {name: getattr(engine_core, name) for name in (*_CALLS, _SUBMIT)}
    for name, call in originals.items():
        setattr(engine_core, name, timed(name, call))
    try:
        yield
    finally:
        for name, call in originals.items():
            setattr(engine_core, name, call)


def measure(settings: Mapping[str, Any], running: int, waiting: int, steps: int) -> dict[str, object]:
    """Return median and 99th percentile of the scheduler's time per step in microseconds."""
    rng = np.random.default_rng(0)
    adapters = {f"a{i}": _RANKS[i % len(_RANKS)] for i in range(_ADAPTERS)}
    has_slots = settings.get("rules", "slora") != "slora"
    sizes = {
        "max_num_seqs": running if has_slots else 2 * running,
        "max_num_batched_tokens": 2048,
        "max_loras": _ADAPTERS,
        "block_size": _BLOCK,
        "num_kv_blocks": _BLOCKS_PER_REQUEST * running,
        "max_in_flight": 2 * (running + waiting),
    }
    with Engine(_MODEL, adapters, **sizes, **settings) as engine:

        def submit() -> None:
            prompt = rng.integers(0, 200, rng.integers(*_PROMPT)).tolist()
            name = f"a{int(_ADAPTERS * rng.random() ** 2)}"
            params = SamplingParams(max_tokens=int(rng.integers(*_OUTPUT)), ignore_eos=True)
            laps_ns.clear()
            engine.submit(engine.new_request(prompt, name, params))
            submits_us.append(laps_ns[_SUBMIT] * 1e-3)

        laps_ns: Counter[str] = Counter()
        submits_us: list[float] = []
        steps_us: list[dict[str, float]] = []
        counts: list[tuple[int, int]] = []
        with scheduler_time(laps_ns):
            for step in range(-steps // 2, steps):
                submits_before = len(submits_us)
                while engine.core.state.counters.n_waiting < waiting:
                    submit()
                laps_ns.clear()
                if engine.step() is None:
                    engine.wait_for_adapter()
                    continue
                if step >= 0:
                    own_us = {name: laps_ns[name] * 1e-3 for name in _CALLS}
                    steps_us.append({**own_us, _SUBMIT: sum(submits_us[submits_before:])})
                    counts.append((engine.records[-1].requests, engine.records[-1].waiting))
        run, wait = (statistics.mean(each) for each in zip(*counts, strict=True))
    totals_us = [sum(step.values()) for step in steps_us]
    return {
        "running": round(run),
        "waiting": round(wait),
        **{name: round(statistics.median(step[name] for step in steps_us)) for name in _CALLS},
        "submit": round(statistics.median(submits_us)),
        "step: median, us": round(statistics.median(totals_us)),
        "step: p99, us": round(float(np.percentile(totals_us, 99))),
        "holds": "yes" if statistics.median(totals_us) < BAR_US else "NO",
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--running", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    given = parser.parse_args()
    rows: list[dict[str, object]] = [
        {"system": name, **measure(SYSTEMS[name], given.running, given.waiting, given.steps)}
        for name in given.systems
    ]
    print(records_table(rows))
    return 0 if all(row["holds"] == "yes" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
