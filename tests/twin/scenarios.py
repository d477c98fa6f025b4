"""Small random scenarios for both forms of the twin: tight limits, and clocks that often coincide."""

from math import prod

import numpy as np
from hypothesis import strategies as st

from capplan.models import ADDITIVE, TABLE, uses_decode_ranks, uses_ranks
from capplan.models._step_latency import FORMS, pack_tables
from capplan.spec import TABLE_AXES, StepTable
from capplan.twin import Scenario
from capplan.twin.instance._scenario import NS_PER_MS, Costs
from capplan.workload import Requests
from tests.serving.worlds import Choose, make_world, seeded

_CACHE = {"ms_per_kv_ktoken_beyond_cache": 2.0, "cache_kv_ktokens": 0.02}
"""A cache that small batches exceed."""
_ATTENTION = {"ms_per_prefill_mpair": 1000.0}
"""Tenths of a millisecond for the prompts of a small scenario."""


def make_scenario(choose: Choose, max_requests: int = 40) -> Scenario:
    """Return a scenario. Times are small multiples of 1 ms, so arrivals often meet the end of a step."""
    world = make_world(choose, max_requests)
    form = FORMS[choose(0, len(FORMS) - 1)]
    names = form.names if choose(0, 1) or form is TABLE else form.coefficients
    given = _CACHE | (_ATTENTION if form is ADDITIVE else {})
    coefficients = np.array([given[n] if n in given else choose(0, 3) / choose(1, 3) for n in names])
    always = {"base_ms", "k7", "k7_base", "decode_beta", "prefill_beta"} & {*names} or {*names}
    for name in sorted(always):  # no step takes no time
        coefficients[names.index(name)] = choose(1, 4)
    if form is TABLE:
        coefficients = np.concatenate(
            [coefficients, pack_tables(*make_tables(choose).values(), coefficients.size)]
        )
    if "k5" in names and not any(coefficients[names.index(name)] for name in ("k1", "k4", "k5")):
        coefficients[names.index("k5")] = 1  # what k7 is multiplied with
    load_ns = np.array([0, *(choose(0, 6) * NS_PER_MS for _ in range(world.adapters))], np.int64)
    disk_ns = np.array([0, *(choose(0, 20) * NS_PER_MS for _ in range(world.adapters))], np.int64)
    requests = Requests(
        arrival_ns=np.array([r.step * NS_PER_MS * choose(1, 2) for r in world.requests], np.int64).cumsum()
        // 2,
        adapter=np.array([r.adapter for r in world.requests], np.int32),
        prompt_tokens=np.array([r.prompt for r in world.requests], np.int32),
        output_tokens=np.array([r.output for r in world.requests], np.int32),
    )
    return Scenario(
        requests=requests,
        limits=world.limits,
        num_blocks=world.num_blocks,
        costs=Costs(
            form=form.code,
            coefficients=coefficients,
            a_max=world.limits.max_loras,
            s_max=choose(8, 32),
            slots_per_adapter=min(1.0, world.limits.max_loras / world.adapters),
            adapters_served=world.adapters,
            load_ns=load_ns,
            disk_ns=disk_ns,
            rank=np.array([0, *(choose(1, 32) for _ in range(world.adapters))], np.int64),
            uses_ranks=uses_ranks(form.code, coefficients),
            uses_decode_ranks=uses_decode_ranks(form.code, coefficients),
            pages=np.array([0, *(world.pages or [0] * world.adapters)], np.int64),
        ),
        horizon_ns=choose(1, 400) * (choose(1, 5) if choose(0, 1) else 100) * NS_PER_MS,
        max_in_flight=choose(1, 30) if choose(0, 1) else 1000,
        shared_prefix_tokens=max(0, choose(-20, 20)),
        buckets=max(0, choose(-20, 20)),
    )


def make_tables(choose: Choose) -> dict[str, StepTable]:
    """Return step tables with points and values at multiples of a third."""

    def grid() -> list[float]:
        return np.cumsum([choose(0, 3), *(choose(1, 20) / 3 for _ in range(choose(1, 5)))]).tolist()

    def table(*names: str) -> StepTable:
        axes = {name: grid() for name in names}
        milliseconds = np.array([choose(0, 2) / 3 for _ in range(prod(map(len, axes.values())))])
        milliseconds = milliseconds.reshape([len(points) for points in axes.values()])
        for axis in range(milliseconds.ndim):
            milliseconds = milliseconds.cumsum(axis)
        return StepTable.of(axes, milliseconds)

    return {name: table(*axes) for name, axes in TABLE_AXES.items()}


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Return a strategy of scenarios."""
    return make_scenario(lambda low, high: draw(st.integers(low, high)))


def seeded_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    return make_scenario(seeded(seed))
