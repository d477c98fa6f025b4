"""Compile the entries that tests call, into the cache on disk: ``python -m tests.compile [PART ...]``.

Otherwise each process of the tests compiles what it calls first, and most time of the tests is compilation.
Rules for slots and rules for one pool share no compiled code, so the two parts may run side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Final

from capplan import Adapter, Lengths, Workload, load_profile, load_surrogate, plan, simulate
from capplan.engine import Engine
from capplan.engine._core_process import warm_up
from capplan.serving import Limits, commit, finish, new_state, schedule, submit
from capplan.twin.cluster import Instance, simulate_cluster
from capplan.twin.cluster._python_loop import run_with
from capplan.twin.cluster._routers import build_rule
from capplan.twin.cluster._run import run_cluster
from capplan.twin.instance import run
from tests.engine.engines import TINY_MODEL
from tests.oracle.routers import reference_router
from tests.serving.pooled_worlds import last_of, make_pooled_world
from tests.serving.worlds import seeded
from tests.twin.cluster.movable import seeded_movable
from tests.twin.pooled import seeded_pooled

PROFILE: Final = "h100-64g/llama-3.1-8b/vllm-0.8.5"
SEEDS: Final = 12
"""Seeds of each kind of scenario: every entry is called by one of them."""
SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {"num_kv_blocks": 60, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 40}
    | {"max_model_len": 64, "max_lora_rank": 8}
)


def main(parts: list[str]) -> None:
    for part in parts or PARTS:
        PARTS[part]()


def compile_slots() -> None:
    """Compile for instances with adapter slots."""
    profile = load_profile(PROFILE)
    workload = Workload(
        base_model=profile.model.hf_ids[0],
        adapters=[Adapter(name=f"a{i}", rank=8, rate_rps=1.0) for i in range(2)],
        prompt_tokens=Lengths(mean=20, std=10),
        output_tokens=Lengths(mean=10, std=5),
    )
    simulate_cluster(workload, [Instance(profile, 2, 8)] * 2, router="least-loaded", duration_s=5.0)
    simulate(workload, profile, a_max=2, s_max=8, duration_s=5.0)
    load_surrogate(profile).predict(workload, a_max=2, s_max=8)
    plan(workload, profile=PROFILE, gpus=1, seeds=1)
    compile_cluster(is_pooled=False)
    limits = Limits(8, 64, 64, 2, 4, 4, 0, 0, 0)
    state = new_state(8, 4, 64, limits)
    row = submit(state, limits, 0, 0, 8, 2, 0, 0)
    schedule(state, limits)
    commit(state, limits)
    finish(state, limits, row)
    with Engine(TINY_MODEL, {"a": 8}, rules="capplan", max_loras=2, max_cpu_loras=3, **SIZES) as engine:
        warm_up(engine)


def compile_pool() -> None:
    """Compile for instances with one pool of memory for requests and adapters."""
    compile_cluster(is_pooled=True)
    for seed in range(SEEDS):
        run(seeded_pooled(seed))
        last_of(make_pooled_world(seeded(seed)))
    with Engine(TINY_MODEL, {"a": 8}, scheduler="chameleon", cache="chameleon", **SIZES) as engine:
        warm_up(engine)


def compile_cluster(is_pooled: bool) -> None:
    """Compile the loop of the cluster, and what its readable reference calls."""
    of_one_kind = (
        world
        for world in map(seeded_movable, range(1000))
        if (world[0].engines[0].pool is not None) == is_pooled
    )
    for seed, (scenario, rebalancing) in enumerate(islice(of_one_kind, SEEDS)):
        run_cluster(scenario, build_rule("plan-shares", scenario), seed, rebalancing=rebalancing)
        run_with(scenario, reference_router("plan-shares", scenario.instances), seed, 0.0, rebalancing)


PARTS: Final[Mapping[str, Callable[[], None]]] = MappingProxyType(
    {"slots": compile_slots, "pool": compile_pool}
)

if __name__ == "__main__":
    main(sys.argv[1:])
