import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.serving import Limits
from capplan.serving.state import SLORA, VLLM
from capplan.twin import Scenario
from capplan.twin.instance import _core as pauses
from capplan.twin.instance import _trace as t
from capplan.twin.instance import run
from capplan.twin.instance._scenario import NS_PER_MS
from tests.conftest import output_of_python
from tests.oracle import run_reference, slora
from tests.oracle.memory import ReferenceAdapters
from tests.serving.worlds import seeded
from tests.twin.comparison import assert_forms_agree, assert_same, differs
from tests.twin.many import main
from tests.twin.scenarios import make_scenario, scenarios, seeded_scenario

SEEDS = range(400)


@settings(max_examples=150)
@given(scenarios())
def test_fast_forward_stepping_and_the_reference_leave_the_same_trace(scenario: Scenario) -> None:
    assert_forms_agree(scenario)


@pytest.mark.long
@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 12), st.integers(1, 12))
def test_long_queues_of_adapters_without_a_slot_are_reversed_as_in_the_reference(
    seed: int, max_loras: int, max_num_seqs: int, arrivals_per_ms: int
) -> None:
    """Every step reverses the requests that it skipped: all that wait, or those before the last one tried."""
    scenario = make_scenario(seeded(seed), max_requests=300)
    requests, adapters = scenario.requests, scenario.adapters
    limits = scenario.limits._replace(
        reverse_skipped=1,
        policy=VLLM,
        load_beside=0,
        max_loras=max_loras,
        max_cpu_loras=max(adapters, max_loras),
        max_num_seqs=max_num_seqs,
    )
    arrival_ns = np.arange(requests.arrival_ns.size) // arrivals_per_ms * NS_PER_MS
    crowded = scenario._replace(
        limits=limits,
        costs=scenario.costs._replace(a_max=max_loras, pages=np.zeros_like(scenario.costs.pages)),
        requests=requests._replace(arrival_ns=arrival_ns),
        max_in_flight=1000,
        horizon_ns=2000 * NS_PER_MS,
    )
    assert_forms_agree(crowded)


@pytest.mark.long
def test_the_comparison_of_many_scenarios_detects_a_broken_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(40) == 0
    assert capsys.readouterr().out.endswith("\n0 differences\n")
    monkeypatch.setattr(ReferenceAdapters, "is_resident", lambda self, adapter: False)
    assert main(40) == 1
    assert "beside): " in capsys.readouterr().out


@given(scenarios(), st.integers(1, 200))
def test_an_interrupt_that_returns_changes_nothing(scenario: Scenario, pause_ms: int) -> None:
    """Simulations are paused for their deadline, also in the middle of repeated decode steps."""
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_FIRST_PAUSE_NS", "MAX_PAUSE_NS"):
            patch.setattr(pauses, name, pause_ms * NS_PER_MS)
        assert_same(run(scenario, interrupt=lambda: calls.append(1)), run(scenario))
    assert len(calls) >= scenario.horizon_ns // (pause_ms * NS_PER_MS)


def test_an_exception_of_the_interrupt_ends_the_simulation() -> None:
    scenario = seeded_scenario(0)._replace(horizon_ns=10 * pauses.MAX_PAUSE_NS)
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(scenario, interrupt=stop)
    assert len(calls) == 3


@given(scenarios())
def test_every_request_is_finished_running_waiting_rejected_or_yet_to_come(scenario: Scenario) -> None:
    trace = run(scenario)
    finished = trace.finish_ns != t.NEVER
    running = trace.status == t.STATUS_RUNNING
    assert not np.any(finished & running)
    seen = int(trace.counts.next_request)
    assert not np.any((finished | running)[seen:])
    waiting = seen - int(finished.sum()) - int(running.sum()) - int(trace.counts.rejected)
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
    if not np.any(trace.status == t.STATUS_RUNNING) and not np.any((trace.first_ns != t.NEVER) & ~finished):
        assert trace.gaps.sum() == (generated[finished] - 1).sum()


def relax(**limits: int) -> Callable[[Scenario], Scenario]:
    def relaxed(scenario: Scenario) -> Scenario:
        return scenario._replace(limits=scenario.limits._replace(**limits))

    return relaxed


def without_pages(scenario: Scenario) -> Scenario:
    costs = scenario.costs
    return scenario._replace(costs=costs._replace(pages=np.zeros_like(costs.pages)))


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
        pytest.param(relax(reverse_skipped=0), id="reversed order"),
        pytest.param(relax(async_scheduling=0), id="async scheduling"),
        pytest.param(relax(prefix_caching=0), id="prefix caching"),
        pytest.param(relax(hold_ending=0), id="slots of ending requests"),
        pytest.param(relax(unhashed_to_front=0), id="unhashed blocks first"),
        pytest.param(relax(lone_prefill_exempt=0), id="lone prefill"),
        pytest.param(relax(load_beside=0), id="loads beside the batch"),
        pytest.param(relax(policy=VLLM), id="S-LoRA"),
        pytest.param(without_pages, id="pages of adapters"),
        pytest.param(lambda scenario: scenario._replace(num_blocks=1000), id="blocks"),
        pytest.param(lambda scenario: scenario._replace(max_in_flight=1000), id="in-flight cap"),
    ],
)
def test_every_limit_binds_in_some_of_the_scenarios(relaxed: Callable[[Scenario], Scenario]) -> None:
    """Otherwise the comparison with the reference would not cover the rule."""
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


def test_fetching_ahead_matters_in_some_of_the_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [s for s in map(seeded_scenario, SEEDS) if s.limits.policy == SLORA]
    monkeypatch.setattr(slora.ReferenceSlora, "_fetch_ahead", lambda self: [])
    assert sum(differs(run(scenario), run_reference(scenario)) for scenario in chosen) >= 5


def test_every_asynchronous_load_completes_and_its_requests_finish() -> None:
    """Nothing runs when the first request arrives: its load starts without a step."""
    served = 0
    for scenario in map(seeded_scenario, SEEDS):
        if scenario.limits.load_beside or scenario.limits.policy == SLORA:
            trace = run(scenario._replace(horizon_ns=10**13))
            assert np.all((trace.finish_ns != t.NEVER) | (trace.status == t.STATUS_REJECTED))
            served += 1
    assert served >= 50


def test_every_event_happens_in_some_of_the_scenarios() -> None:
    seen = dict.fromkeys(
        (
            "preempted",
            "rejected",
            "from disk",
            "left out",
            "chunked",
            "cut off",
            "too long",
            "skipped for a load",
        ),
        0,
    )
    for seed in SEEDS:
        scenario = seeded_scenario(seed)
        limits: Limits = scenario.limits
        trace = run(scenario)
        counts = trace.counts
        done = trace.finish_ns != t.NEVER
        prompts = scenario.requests.prompt_tokens
        seen["preempted"] += bool(counts.preemptions)
        seen["rejected"] += bool(counts.rejected)
        seen["from disk"] += bool(counts.disk_loads)
        # With enough blocks no request is preempted: stalls are due to the token budget.
        seen["left out"] += bool(np.any(run(scenario._replace(num_blocks=1000)).stalled_ns > 0))
        seen["chunked"] += bool(np.any(prompts[done] > limits.max_num_batched_tokens))
        seen["skipped for a load"] += bool(trace.skipped_ns.sum())
        seen["cut off"] += bool(np.any(trace.status == t.STATUS_RUNNING))
        seen["too long"] += bool(np.any(prompts >= limits.max_model_len))
    assert all(count >= 5 for count in seen.values()), seen


def digest() -> str:
    """Return a digest of the traces of many scenarios."""
    hashed = hashlib.sha256()
    for seed in SEEDS:
        for column in run(seeded_scenario(seed)):
            hashed.update(column.tobytes())
    return hashed.hexdigest()


def test_the_same_seed_gives_the_same_result_in_another_process() -> None:
    program = "from tests.twin.test_core import digest; print(digest())"
    assert output_of_python("-c", program, PYTHONHASHSEED="1").strip() == digest()
