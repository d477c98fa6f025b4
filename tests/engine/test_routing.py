"""The running router decides as the cluster twin does, from the states that instances report."""

import asyncio
import json
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import InputError
from capplan.fleet import RoutingSettings
from capplan.fleet._routing import Choice, InstanceRouter
from capplan.serving.routers import (
    ACTIVE,
    AWAITED,
    RESIDENT,
    ROUTERS,
    LeastWorkLeft,
    RoutingRule,
    Toppings,
    report_time_ns,
)
from capplan.spec import ROUTER_NAMES
from capplan.twin.cluster import Candidate, RoutedRequest
from capplan.twin.cluster._routers import plain_rule
from capplan.twin.instance._clock import NEVER_NS
from tests.engine.fake_instances import idle_state
from tests.engine.test_router import running
from tests.oracle.routers import (
    LeastAddedWork,
    RankAware,
    SmoothShares,
    reference_router,
)
from tests.serving.worlds import seeded
from tests.twin.cluster.scenarios import make_performance, make_work_model

HELD = ({"x": 0.5, "y": 1.0}, {"x": 0.25, "y": 0.0}, {"x": 0.25})
RANK = {"x": 8, "y": 16}
NAMES = (None, "x", "y")
MAX_AGE_S = 0.5


@dataclass
class KnownStates:
    """Mirror of what the router knows, as candidates of reference routers."""

    states: list[dict[str, Any]]
    seen_ns: list[int | None] = field(default_factory=lambda: [None] * 3)
    sent: list[list[tuple[int, str | None, int]]] = field(default_factory=lambda: [[], [], []])

    def candidates(self, adapter: str | None, now_ns: int, up: Collection[int] = range(3)) -> list[Candidate]:
        shares = {i: HELD[i].get(adapter or "", 1.0) for i in up if adapter is None or adapter in HELD[i]}
        if not any(shares.values()):
            shares = dict.fromkeys(shares, 1.0)
        total = sum(shares.values())
        return [self._candidate(i, adapter, share / total, now_ns) for i, share in shares.items()]

    def _candidate(self, i: int, adapter: str | None, share: float, now_ns: int) -> Candidate:
        state, seen_ns = self.states[i], self.seen_ns[i]
        running, queued, prompts = [], [], []
        for rank, (present, waiting, tokens) in state["by_rank"].items():
            running += [int(rank)] * (present - waiting)
            queued += [int(rank)] * waiting
            prompts += [tokens, *[0] * (waiting - 1)][:waiting]
        bits = dict(state["adapters"])
        queued_adapters = state["queued_adapters"]
        fetching = [
            (name, part)
            for name, (requests, tokens) in state.get("awaiting", {}).items()
            for part in [tokens, *[0] * (requests - 1)]
        ]
        for name, tokens in [*((name, tokens) for _, name, tokens in self.sent[i]), *fetching]:
            queued.append(RANK.get(name or "", 0))
            prompts.append(tokens)
            if name is not None:
                queued_adapters += not bits.get(name, 0) & (ACTIVE | AWAITED)
                bits[name] = bits.get(name, 0) | AWAITED
        own = bits.get(adapter or "", 0)
        return Candidate(
            instance=i,
            share=share,
            running=tuple(running),
            queued=tuple(queued),
            queued_tokens=sum(prompts),
            queued_prompts=tuple(prompts),
            free_tokens=state["free_blocks"] * state["block_size"],
            kv_tokens=state["blocks"] * state["block_size"],
            max_num_seqs=state["max_num_seqs"],
            max_loras=state["max_loras"],
            active_adapters=state["active_adapters"],
            queued_adapters=queued_adapters,
            is_active=bool(own & ACTIVE),
            is_queued=bool(own & AWAITED),
            is_resident=bool(own & RESIDENT),
            running_tokens=state["running_tokens"],
            partial_tokens=state["partial_tokens"],
            age_ns=NEVER_NS if seen_ns is None else now_ns - seen_ns,
        )


def busy_state(choose: Any) -> dict[str, Any]:
    """Return a random state whose counts fit each other."""
    by_rank = {}
    for rank in (0, 8, 16):
        present = choose(0, 4)
        waiting = choose(0, present)
        by_rank[str(rank)] = [present, waiting, waiting * choose(1, 9)]
    running_tokens = choose(0, 100)
    return {
        **idle_state(),
        "running": sum(present - waiting for present, waiting, _ in by_rank.values()),
        "queued": sum(waiting for _, waiting, _ in by_rank.values()),
        "free_blocks": choose(0, 4),
        "active_adapters": choose(0, 2),
        "queued_adapters": choose(0, 2),
        "running_tokens": running_tokens,
        "partial_tokens": choose(0, running_tokens),
        "by_rank": by_rank,
        "adapters": {name: choose(0, 7) for name in RANK},
        "awaiting": {name: [choose(1, 3), choose(1, 50)] for name in RANK if choose(0, 1)},
    }


def rule_and_reference(name: str, seed: int) -> tuple[RoutingRule, Any]:
    """Return a compiled rule with random models, and its reference."""
    models = [make_performance(seeded(seed + i)) for i in range(3)]
    work = [make_work_model(seeded(seed + i)) for i in range(3)]
    parameters = LeastWorkLeft(off_plan=2.0, rank_raise=1.5, max_age_s=MAX_AGE_S, turn_s=0.05)
    rule = plain_rule(parameters if name == "least-work-left" else name, 100.0)
    if name.startswith("toppings"):
        rule = plain_rule(Toppings(rank_aware=name == "toppings"), 100.0)
        rule = rule._replace(models=np.array([model.row for model in models]), slo_ms=20.0)
    if name == "least-work-left":
        rule = rule._replace(models=np.array([model.row for model in work]))
    rank_aware = RankAware("bgmv" if name == "toppings" else "blind", models, 20.0)
    by_shares = SmoothShares(first_credits())
    if name == "smooth-shares":
        return rule, by_shares
    return rule, reference_router(name, 3, rank_aware, LeastAddedWork(work, parameters, by_shares))


def first_credits() -> dict[tuple[int, int], float]:
    """Return the credits before the first request, with all instances up."""
    known, credit = KnownStates([idle_state()] * 3), {}
    for adapter, name in enumerate(NAMES):
        candidates = known.candidates(name, 0)
        for at, each in enumerate(candidates):
            part = (at - adapter) % len(candidates) / len(candidates)
            credit[adapter, each.instance] = each.share * part
    return credit


@pytest.mark.parametrize("name", ROUTER_NAMES)
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_the_running_router_decides_as_the_twins_reference(name: str, seed: int) -> None:
    choose = seeded(seed)
    rule, reference = rule_and_reference(name, seed)
    router = InstanceRouter(HELD, None, RoutingSettings(rule, RANK), seed=7)
    known = KnownStates([{**idle_state(), "blocks": 1, "block_size": 1, "free_blocks": 0}] * 3)
    known.states = [{**s, "max_num_seqs": 0, "max_loras": 0} for s in known.states]
    draw = np.random.default_rng(7).random
    now_ns, asked_ns, is_up = 0, [0, 0, 0], [True] * 3
    for number in range(20):
        now_ns += choose(1, 200) * 10**6
        i = choose(0, 2)
        if choose(0, 2) == 0:  # the requests sent since the question are not in the answer
            state, asked_ns[i] = busy_state(choose), choose(asked_ns[i], now_ns)
            router.report(i, json.dumps(state).encode(), asked_ns[i])
            known.states[i], known.seen_ns[i] = state, asked_ns[i]
            known.sent[i] = [each for each in known.sent[i] if each[0] >= asked_ns[i]]
        adapter = choose(0, 2)
        prompt_tokens = choose(1, 50)
        if choose(0, 3) == 0:  # an instance goes or comes back
            is_up[i] = not is_up[i]
            router.set_available(i, is_up[i])
        excluded = [j for j in range(3) if choose(0, 9) == 0]
        candidates = known.candidates(
            NAMES[adapter], now_ns, [j for j in range(3) if is_up[j] and j not in excluded]
        )
        if not candidates:
            assert router.choose(NAMES[adapter], prompt_tokens, excluded, now_ns) is None
            continue
        request = RoutedRequest(
            number, 0.0, adapter, RANK.get(NAMES[adapter] or "", 0), prompt_tokens, draw(), 100.0
        )
        chosen = candidates[reference(request, candidates)]
        at_ns = now_ns
        if isinstance(reference, LeastAddedWork):
            at_ns = reference.sent_ns(request, chosen, now_ns)
        expected = Choice(chosen.instance, at_ns)
        assert router.decide(NAMES[adapter], prompt_tokens, excluded, now_ns) == expected
        known.sent[chosen.instance].append((at_ns, NAMES[adapter], prompt_tokens))


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_the_plans_router_chooses_as_smooth_shares_while_instances_go_and_come_back(seed: int) -> None:
    choose, router, reference = seeded(seed), InstanceRouter(HELD), SmoothShares(first_credits())
    known, is_up = KnownStates([idle_state()] * 3), [True] * 3
    for number in range(40):
        i, adapter = choose(0, 2), choose(0, 2)
        if choose(0, 3) == 0:
            is_up[i] = not is_up[i]
            router.set_available(i, is_up[i])
        candidates = known.candidates(NAMES[adapter], 0, [j for j in range(3) if is_up[j]])
        expected = None
        if candidates:
            request = RoutedRequest(number, 0.0, adapter, 0, 1, 0.0, 100.0)
            expected = candidates[reference(request, candidates)].instance
        assert router.choose(NAMES[adapter]) == expected


@pytest.mark.parametrize("name", ROUTER_NAMES)
def test_a_request_goes_to_a_holder_that_is_up(name: str) -> None:
    router = InstanceRouter(HELD, None, RoutingSettings(rule_and_reference(name, 0)[0], RANK))
    for up in ((0,), (1, 2), (2,), ()):
        for i in range(3):
            router.set_available(i, i in up)
        holders = {i for i in up if "y" in HELD[i]}
        chosen = {router.choose("y") for _ in range(8)}
        assert chosen <= holders if holders else chosen == {None}


def test_adapters_of_an_instance_that_has_ended_are_forgotten() -> None:
    router = InstanceRouter(HELD, None, settings_of("lora-affinity"))
    for i in range(3):
        state = {**idle_state(), "adapters": {"x": ACTIVE} if i == 1 else {}}
        router.report(i, json.dumps(state).encode(), time.monotonic_ns())
    assert {router.choose("x") for _ in range(6)} == {1}
    router.forget(1)
    assert {router.choose("x") for _ in range(6)} != {1}


def test_requests_of_an_adapter_that_an_instance_fetches_without_holding_it_are_its_load() -> None:
    router = InstanceRouter(HELD, None, settings_of("least-loaded"))
    for i in range(3):
        awaiting = {"y": [4, 40], "not in the plan": [1, 9]} if i == 2 else {}
        state = {**idle_state(), "awaiting": awaiting}
        router.report(i, json.dumps(state).encode(), time.monotonic_ns())
    assert {router.choose("x") for _ in range(8)} == {0, 1}
    router.report(2, json.dumps(idle_state()).encode(), time.monotonic_ns())
    assert {router.choose("x") for _ in range(4)} == {2}


def test_workloads_may_name_every_router() -> None:
    assert set(ROUTER_NAMES) == set(ROUTERS)


def settings_of(name: str) -> RoutingSettings:
    return RoutingSettings(rule_and_reference(name, 0)[0], {"a": 8, "b": 4, "shared": 16}, 0.01)


async def test_requests_go_to_the_instance_that_reports_fewer() -> None:
    async with running(routing=settings_of("least-loaded")) as r:
        r.launcher["g1-1"].reported |= {"running": 5, "by_rank": {"16": [5, 0, 0]}}
        await r.until(lambda: int(r.state.fleet.router._fleet.instances.running[1]) == 5)
        assert {(await r.post("shared"))[1]["instance"] for _ in range(3)} == {"g0-1"}
        text = await (await r.client.get("/metrics")).text()
        assert 'capplan:router_state_age_seconds{group="g0",instance="g0-1"} 0.' in text
        r.launcher["g1-1"].reported = idle_state()
        r.launcher["g0-1"].reported |= {"queued": 9}
        await r.until(lambda: int(r.state.fleet.router._fleet.instances.queued[0]) >= 9)
        assert (await r.post("shared"))[1]["instance"] == "g1-1"


async def test_states_are_read_once_per_period() -> None:
    async with running(routing=replace(settings_of("least-loaded"), state_period_s=0.05)) as r:
        instance, router = r.launcher["g0-1"], r.state.fleet.router
        await r.until(partial(lambda first: instance.reports > first, instance.reports))  # none is on its way
        before, began_s, ages = instance.reports, time.monotonic(), []
        for _ in range(100):
            await asyncio.sleep(0.01)
            ages.append(router.age_s(0))
        assert 2 <= instance.reports - before <= (time.monotonic() - began_s) / 0.05 + 1
        assert sorted(ages)[50] < 0.5


async def test_the_instances_report_in_turn() -> None:
    async with running(routing=replace(settings_of("least-loaded"), state_period_s=0.4)) as r:
        asked: list[str] = []
        for name in ("g0-1", "g1-1"):
            r.launcher[name].on_state = partial(asked.append, name)
        await r.until(lambda: len(asked) >= 8)
        assert all(one != other for one, other in pairwise(asked)), "evenly spread over the period"


@given(st.integers(1, 300), st.integers(1, 10**10), st.integers(0, 10**4))
def test_reports_are_spread_evenly_over_the_period(instances: int, period_ns: int, number: int) -> None:
    times = [report_time_ns(number + i, instances, period_ns) for i in range(instances + 1)]
    assert times[-1] - times[0] == period_ns, "an instance reports once per period"
    gaps = np.diff(times)
    assert abs(gaps - period_ns / instances).max() <= 1


async def test_a_request_is_forwarded_at_the_time_of_its_turn() -> None:
    async with running(routing=settings_of("least-work-left")) as r:
        router, held_s = r.state.fleet.router, 0.3
        router.decide = lambda *_, **__: Choice(0, time.monotonic_ns() + round(held_s * 1e9))
        began_s = time.monotonic()
        status, body, _ = await r.post("shared")
        assert (status, body["instance"]) == (200, "g0-1")
        assert time.monotonic() - began_s >= held_s


def test_a_held_request_counts_at_its_instance_until_it_is_sent() -> None:
    parameters = LeastWorkLeft(models=make_work_model(seeded(0)), turn_s=2.0)
    model = replace(make_work_model(seeded(0)), decode_ms=9.0, padded=True)
    rule = plain_rule(parameters, 100.0)._replace(models=np.array([model.row]))
    router = InstanceRouter([{"x": 1.0, "y": 1.0}], None, RoutingSettings(rule, RANK))
    busy = {**idle_state(), "running": 9, "by_rank": {"8": [9, 0, 0]}, "running_tokens": 90}
    router.report(0, json.dumps(busy).encode(), 1)
    second = 10**9
    assert router.decide("x", 4, now_ns=2) == Choice(0, 2), "most requests have its rank"
    assert router.decide("y", 4, now_ns=3) == Choice(0, 2 * second + 16)
    for asked_ns, waiting in ((second, 1), (2 * second + 17, 0)):
        router.report(0, json.dumps(busy).encode(), asked_ns)
        assert router._fleet.by_rank[0, 1, 16] == waiting
    idle = {**idle_state(), "by_rank": {"8": [1, 0, 0]}}
    router.report(0, json.dumps(idle).encode(), 3 * second)
    assert router.decide("y", 4, now_ns=3 * second) == Choice(0, 3 * second), "the work left ends sooner"


async def test_states_that_are_none_and_instances_that_end_lose_no_request() -> None:
    async with running(routing=settings_of("least-work-left")) as r:
        r.launcher["g0-1"].reported = {"running": -1}
        r.launcher.may_start.clear()
        await r.launcher["g1-1"].crash()
        answers = [await r.post("shared") for _ in range(6)]
        assert {(status, body["instance"]) for status, body, _ in answers} == {(200, "g0-1")}
        assert np.isnan(r.state.fleet.router.age_s(1))
        r.launcher.may_start.set()
        await r.until(lambda: not np.isnan(r.state.fleet.router.age_s(1)))


async def test_a_defect_in_reading_states_ends_the_router_and_is_raised() -> None:
    def report(*_: Any) -> None:
        raise ZeroDivisionError

    async def ended() -> None:
        async with running(routing=settings_of("least-loaded")) as r:
            r.state.fleet.router.report = report
            await r.until(r.serving.done)
            assert r.state.fleet.failed.is_set()

    with pytest.raises(ZeroDivisionError):
        await ended()


@pytest.mark.parametrize("field_", ["off_plan", "rank_raise", "max_age_s", "turn_s"])
def test_parameters_are_checked(field_: str) -> None:
    with pytest.raises(InputError, match=f"LeastWorkLeft.{field_}: must be"):
        replace(LeastWorkLeft(), **{field_: float("nan")})
