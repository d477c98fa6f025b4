"""dLoRA's merged batches: the core decides as the reference does, and what always holds."""

from collections import Counter
from dataclasses import replace

import pytest

from capplan import Adapter, InputError, Workload, plan, simulate
from capplan.engine import Engine
from capplan.serving.pooled._state import FIFO, NO_PREFETCH, RESIDENT
from capplan.spec import Cache, Lengths, Merging, Scheduler
from tests.oracle import merging
from tests.serving.pooled_worlds import MS, Arrival, PooledWorld, Replay, make_pooled_world, replay
from tests.serving.test_chameleon_batch import world_of
from tests.serving.worlds import seeded

pytestmark = pytest.mark.long

SEEDS = range(200)
TIMES = {"merged_ns": 15 * MS, "unmerged_ns": 27 * MS, "switch_ns": 20 * MS}
SWITCHES = {"order": FIFO, "loading": RESIDENT, "prefetch": NO_PREFETCH, **TIMES}


def make_merging_world(seed: int) -> PooledWorld:
    """Return a world whose requests are of few adapters, so that one often has most of them."""
    choose = seeded(seed)
    world = make_pooled_world(choose, **SWITCHES)
    adapters = len(world.pages) - 1
    shares = [(1, 1, 1, choose(0, adapters))[choose(0, 3)] for _ in world.arrivals]
    arrivals = tuple(
        arrival._replace(adapter=adapter) for arrival, adapter in zip(world.arrivals, shares, strict=True)
    )
    return replace(world, arrivals=arrivals)


def replay_all() -> tuple[list[Replay], Counter[str]]:
    """Replay random worlds in both forms, and count what happened."""
    runs, events = [], Counter[str]()
    for seed in SEEDS:
        world = make_merging_world(seed)
        before = None
        for seen in replay(world):
            run = seen.replay
            merged = run.reference.merging.adapter
            own = run.state.pooled.merging
            assert own.adapter == (-1 if merged is None else merged)
            assert own.switches == run.reference.merging.switches
            assert (own.high, own.low) == (run.reference.merging.high, run.reference.merging.low)
            if merged is not None:
                adapter_of = [world.arrivals[number].adapter for number, _ in seen.step.tokens]
                assert set(adapter_of) <= {merged}
                events["merged steps"] += bool(adapter_of)
                paused = [r for r in run.reference.running if r.output and r.adapter != merged]
                events["paused rows"] += bool(paused)
            events["merges"] += before is None and merged is not None
            events["other merges"] += None not in (before, merged) and before != merged
            events["ends"] += before is not None and merged is None
            events["higher"] += own.high > 1.0
            events["lower"] += own.high < 1.0
            events["out of memory"] += bool(seen.step.preempted)
            before = merged
        runs.append(run)
    return runs, events


@pytest.fixture(scope="module")
def replayed() -> tuple[list[Replay], Counter[str]]:
    return replay_all()


def test_the_core_merges_as_the_reference_does(replayed: tuple[list[Replay], Counter[str]]) -> None:
    names = ("merged steps", "paused rows", "merges", "other merges", "ends", "higher", "lower")
    assert [name for name in names if replayed[1][name] < 3] == []


def test_every_request_ends_once(replayed: tuple[list[Replay], Counter[str]]) -> None:
    for run in replayed[0]:
        assert sorted(run.finished + run.aborted) == run.accepted


def test_the_comparison_detects_a_fixed_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging.Merging, "_move", lambda *_: None)
    with pytest.raises(AssertionError):
        replay_all()


def test_a_lone_request_is_merged_until_another_adapter_has_a_request() -> None:
    """The second request ends the merge at once: half of the batch is less than 15 to 27."""
    arrivals = [Arrival(0, 1, 2, 12, 12), Arrival(45 * MS, 2, 2, 4, 4)]
    world = replace(world_of(arrivals, [200], [], **SWITCHES), pages=(0, 0, 0, 0))
    steps = [(seen.replay.state.pooled.merging.adapter, len(seen.step.tokens)) for seen in replay(world)]
    assert steps[0] == (1, 1)
    assert (-1, 2) in steps
    assert steps[-2] == (1, 1)


def test_only_the_twin_merges() -> None:
    profile = "h100-64g/llama-3.1-8b/vllm-0.8.5"
    load = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        profile=profile,
        adapters=[Adapter(name="a", rank=8, rate_rps=0.1)],
        prompt_tokens=Lengths(mean=20),
        output_tokens=Lengths(mean=5),
        scheduler=Scheduler(policy="fifo", merging=Merging()),
        cache=Cache(policy="none", loading="resident"),
    )
    assert simulate(load, profile, a_max=1, s_max=8, duration_s=100.0).completed > 0
    with pytest.raises(InputError, match="merging: must be absent from what is planned"):
        plan(load, gpus=1)
    with pytest.raises(InputError, match="merging: must be absent in an engine"):
        Engine("tiny-llama", {"a": 8}, scheduler=load.scheduler, cache=load.cache)
    loads = load.model_copy(update={"cache": Cache(policy="none")})
    with pytest.raises(InputError, match="loading: must be resident or cached under"):
        simulate(loads, profile, a_max=1, s_max=8)
