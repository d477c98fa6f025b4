"""The decisions of vLLM 0.32.0's own scheduler, step by step."""

import json
from pathlib import Path
from typing import Any

import pytest

from capplan.serving import NONE, Limits, commit, new_state, schedule, submit
from capplan.serving import state as s
from capplan.testing.integrity import check_integrity
from tests.serving.worlds import scheduled

UNSUPPORTED = ("prefix_caching", "async_sched")
NAMES = ("sync_plain", "tight_no_reserve", "long_prefill", "one_slot")


@pytest.fixture(scope="module")
def cases(reference_dir: Path) -> dict[str, Any]:
    path = reference_dir / "vllm_scheduler" / "golden.json"
    if not path.is_file():
        pytest.skip("no recording of vLLM's scheduler beside the checkout")
    recorded = json.loads(path.read_text())["cases"]
    return {
        case["name"]: case
        for case in recorded
        if not any(case["config"].get(switch) for switch in UNSUPPORTED)
    }


def test_these_are_all_the_cases_without_prefix_caching_and_async(cases: dict[str, Any]) -> None:
    assert set(cases) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_the_one_that_vllm_took(cases: dict[str, Any], name: str) -> None:
    case = cases[name]
    config, workload = case["config"], case["workload"]
    blocks = config["num_blocks"] - 1  # block 0 is never used
    limits = Limits(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        max_loras=config["max_loras"],
        max_cpu_loras=64,
        block_size=config["block_size"],
        watermark_blocks=0,
        long_prefill_tokens=config["long_prefill"],
        reserve_full_sequence=int(config["reserve_full_isl"]),
    )
    state = new_state(len(workload), max(each[3] for each in workload), blocks, limits)
    c = state.counters
    arrivals = sorted(range(len(workload)), key=lambda i: (workload[i][0], i))
    assert case["steps"]
    for step, tokens, preempted, free_blocks in case["steps"]:
        while arrivals and workload[arrivals[0]][0] <= step:
            request = arrivals.pop(0)
            _, prompt, output, adapter, *_ = workload[request]
            assert submit(state, limits, request, adapter, prompt, output) != NONE
        # vLLM 0.32 applies the prefill limit only when there is more than one request.
        alone = c[s.N_RUNNING] + c[s.N_WAITING] <= 1
        bounds = limits._replace(long_prefill_tokens=0) if alone else limits
        schedule(state, bounds)
        victims = [int(state.request[row]) for row in state.preempted[: c[s.N_PREEMPTED]]]
        ours = (scheduled(state), victims, int(c[s.FREE_BLOCKS]))
        theirs = ([(int(r), n) for r, n in tokens.items()], [int(r) for r in preempted], free_blocks)
        assert ours == theirs, f"step {step}"
        commit(state, bounds)
        check_integrity(state, limits, blocks)
    assert c[s.N_RUNNING] + c[s.N_WAITING] == 0
    assert not arrivals
