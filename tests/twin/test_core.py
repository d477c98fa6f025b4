import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from capplan.serving import Limits
from capplan.twin import Scenario
from capplan.twin import trace as t
from capplan.twin.core import run
from capplan.twin.reference import run_reference
from tests.twin.scenarios import scenarios, seeded_scenario

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(400)
# The compiled twin's notes for itself; the readable one remembers every token instead.
COMPARED = [field for field in t.Trace._fields if field != "stalled_ns"]


def assert_same(ours: t.Trace, theirs: t.Trace) -> None:
    for field in COMPARED:
        np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field), err_msg=field)


def differs(ours: t.Trace, theirs: t.Trace) -> bool:
    return any(not np.array_equal(getattr(ours, field), getattr(theirs, field)) for field in COMPARED)


@settings(max_examples=200)
@given(scenarios())
def test_the_compiled_twin_equals_the_readable_one(scenario: Scenario) -> None:
    assert_same(run(scenario), run_reference(scenario))


@given(scenarios())
def test_every_request_is_finished_running_waiting_rejected_or_yet_to_come(scenario: Scenario) -> None:
    trace = run(scenario)
    finished = trace.finish_ns != t.NEVER
    running = trace.running_at_end != 0
    assert not np.any(finished & running)
    seen = int(trace.counts[t.NEXT_REQUEST])
    assert not np.any((finished | running)[seen:])
    waiting = seen - int(finished.sum()) - int(running.sum()) - int(trace.counts[t.REJECTED])
    assert 0 <= waiting <= scenario.max_in_flight - int(running.sum())


@given(scenarios())
def test_time_runs_forward_for_every_request(scenario: Scenario) -> None:
    trace = run(scenario)
    finished = trace.finish_ns != t.NEVER
    assert np.all(trace.first_ns[finished] > scenario.requests.arrival_ns[finished])
    assert np.all(trace.finish_ns[finished] >= trace.first_ns[finished])
    single = scenario.requests.output_tokens == 1
    assert np.all((trace.finish_ns == trace.first_ns)[finished & single])


@given(scenarios())
def test_every_token_after_the_first_leaves_one_gap(scenario: Scenario) -> None:
    trace = run(scenario)
    room = scenario.limits.max_model_len - scenario.requests.prompt_tokens
    generated = np.minimum(scenario.requests.output_tokens, room)
    finished = trace.finish_ns != t.NEVER
    if not np.any(trace.running_at_end) and not np.any((trace.first_ns != t.NEVER) & ~finished):
        assert trace.gaps.sum() == (generated[finished] - 1).sum()


def relax(**limits: int) -> Callable[[Scenario], Scenario]:
    def relaxed(scenario: Scenario) -> Scenario:
        return scenario._replace(limits=scenario.limits._replace(**limits))

    return relaxed


@pytest.mark.parametrize(
    "relaxed",
    [
        pytest.param(relax(max_loras=6, max_cpu_loras=6), id="slots"),
        pytest.param(relax(max_cpu_loras=7), id="host cache"),
        pytest.param(relax(max_num_seqs=1000), id="max_num_seqs"),
        pytest.param(relax(max_num_batched_tokens=1000), id="token budget"),
        pytest.param(relax(watermark_blocks=0), id="watermark"),
        pytest.param(relax(long_prefill_tokens=0), id="long prefill"),
        pytest.param(relax(reserve_full_sequence=0), id="whole sequence must fit"),
        pytest.param(relax(max_model_len=1000), id="max_model_len"),
        pytest.param(lambda scenario: scenario._replace(num_blocks=1000), id="blocks"),
        pytest.param(lambda scenario: scenario._replace(max_in_flight=1000), id="in-flight cap"),
    ],
)
def test_every_limit_binds_in_some_of_the_scenarios(relaxed: Callable[[Scenario], Scenario]) -> None:
    """Else the comparison of both forms would say nothing of the rule."""
    scenarios = [seeded_scenario(seed) for seed in SEEDS]
    # A request that never fits would be preempted for ever; give it the blocks.
    changed = []
    for scenario in scenarios:
        other = relaxed(scenario)
        if other.limits.max_model_len > scenario.limits.max_model_len:
            other = other._replace(num_blocks=1000)
            scenario = scenario._replace(num_blocks=1000)
        changed.append(differs(run(scenario), run(other)))
    assert sum(changed) >= 5


def test_every_event_happens_in_some_of_the_scenarios() -> None:
    seen = dict.fromkeys(
        ("preempted", "rejected", "from disk", "left out", "chunked", "cut off", "too long"), 0
    )
    for seed in SEEDS:
        scenario = seeded_scenario(seed)
        limits: Limits = scenario.limits
        trace = run(scenario)
        counts = trace.counts
        done = trace.finish_ns != t.NEVER
        prompts = scenario.requests.prompt_tokens
        seen["preempted"] += bool(counts[t.PREEMPTIONS])
        seen["rejected"] += bool(counts[t.REJECTED])
        seen["from disk"] += bool(counts[t.DISK_LOADS])
        # With blocks in plenty nobody is preempted: who then stalls was left out of a step.
        seen["left out"] += bool(np.any(run(scenario._replace(num_blocks=1000)).stalled_ns > 0))
        seen["chunked"] += bool(np.any(prompts[done] > limits.max_num_batched_tokens))
        seen["cut off"] += bool(np.any(trace.running_at_end))
        seen["too long"] += bool(np.any(prompts >= limits.max_model_len))
    assert all(count >= 5 for count in seen.values()), seen


_PROGRAM = """
from tests.twin.test_core import digest
print(digest())
"""


def digest() -> str:
    """Return a digest of the traces of many scenarios."""
    hashed = hashlib.sha256()
    for seed in SEEDS:
        for column in run(seeded_scenario(seed)):
            hashed.update(column.tobytes())
    return hashed.hexdigest()


def test_the_same_seed_gives_the_same_result_in_another_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.strip() == digest()
