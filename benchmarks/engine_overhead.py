"""Time of an engine step without the model: `python -m benchmarks.engine_overhead`.

A steady batch of decoding requests over several adapters. The phases of a step are those of the engine's
records; the rest is from the time of the whole call. The model is tiny; its time is left out, but it fills
the processor's caches as a model does.
"""

from __future__ import annotations

import json
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from benchmarks.common import command_line
from capplan.engine import Engine, SamplingParams

PHASES = ("schedule", "load", "prepare", "sample", "commit")


def measure(requests: int, adapters: int, steps: int, rules: str, temperature: float) -> dict[str, float]:
    """Return the median milliseconds per phase of a decode-only step, ``other`` and ``total``."""
    names = {f"a{i}": 8 for i in range(adapters)}
    sizes = {
        "max_num_seqs": requests,
        "num_kv_blocks": 40 * requests,
        "max_num_batched_tokens": 64 * requests,
    }
    params = SamplingParams(max_tokens=10 * steps, temperature=temperature, ignore_eos=True)
    with Engine("tiny-llama", names, max_loras=max(1, adapters), rules=rules, **sizes) as engine:
        for i in range(requests):
            name = f"a{i % adapters}" if adapters else None
            engine.submit(engine.new_request([i % 7, 1, 2 + i % 100] * 10, name, params))
        while sum(len(request.output) > 0 for request in engine.core.requests.values()) < requests:
            if engine.step() is None:
                engine.wait_for_adapter()
        engine.records.clear()
        totals_ms = []
        for _ in range(steps):
            begin_ns = time.perf_counter_ns()
            engine.step()
            totals_ms.append((time.perf_counter_ns() - begin_ns) * 1e-6)
        records = engine.records
    assert {record.decode_requests for record in records} == {requests}
    beside = [total - record.forward_ms for total, record in zip(totals_ms, records, strict=True)]
    result = {
        phase: statistics.median(getattr(record, f"{phase}_ms") for record in records) for phase in PHASES
    }
    named = [sum(getattr(record, f"{phase}_ms") for phase in PHASES) for record in records]
    result["other"] = statistics.median(b - n for b, n in zip(beside, named, strict=True))
    result["total"] = statistics.median(beside)
    return result


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rules", default="capplan")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    result = measure(given.requests, given.adapters, given.steps, given.rules, given.temperature)
    if given.json:
        print(json.dumps(result))
        return
    print(f"{given.requests} decoding requests, {given.adapters} adapters, rules {given.rules}: ms per step")
    for phase, value_ms in result.items():
        print(f"  {phase:<10}{value_ms:8.3f}")


if __name__ == "__main__":
    main()
