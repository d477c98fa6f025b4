import json

import pytest
from hypothesis import given

from capplan.testing import check_integrity
from capplan.testing._integrity import running_rows, waiting_rows
from tests.conftest import output_of_python
from tests.serving.worlds import World, make_world, play, seeded, worlds

pytestmark = pytest.mark.long


@given(worlds())
def test_the_state_is_valid_after_every_step(world: World) -> None:
    for state, _ in play(world):
        check_integrity(state, world.limits, world.num_blocks)


@given(worlds())
def test_every_request_that_fits_ends_exactly_once(world: World) -> None:
    finished = [request for _, decision in play(world) for request in decision.finished]
    fitting = [i for i, r in enumerate(world.requests) if world.fits(r)]
    assert sorted(finished) == fitting


@given(worlds())
def test_a_request_computes_its_tokens_once_and_again_only_after_a_preemption(world: World) -> None:
    computed = dict.fromkeys(range(len(world.requests)), 0)
    for _, decision in play(world):
        for request in decision.preempted:
            computed[request] = 0
        for request, tokens in decision.tokens:
            computed[request] += tokens
        for request in decision.finished:
            asked = world.requests[request]
            output = min(asked.output, world.limits.max_model_len - asked.prompt)
            # The last token is sampled, never computed; what the prefix cache holds need not be.
            everything = asked.prompt + output - 1
            assert computed[request] == everything or (
                world.limits.prefix_caching and computed[request] < everything
            )


@given(worlds())
def test_every_request_emits_its_first_token_once(world: World) -> None:
    first = [request for _, decision in play(world) for request in decision.first]
    assert len(first) == len(set(first))
    assert set(first) == {request for _, decision in play(world) for request in decision.finished}


def test_the_counted_blocks_and_rows_are_checked() -> None:
    world, state = next(
        (world, state)
        for world in (make_world(seeded(seed)) for seed in range(100))
        for state, _ in play(world)
        if running_rows(state) and waiting_rows(state)
    )
    check_integrity(state, world.limits, world.num_blocks)
    for name in (
        "free_blocks",
        "kv_tokens",
        "n_running",
        "n_waiting",
        "n_decoding",
        "n_active",
        "n_resident",
        "n_on_host",
        "n_claimed",
        "adapter_pages",
    ):
        state.counters[name] += 1
        with pytest.raises(AssertionError):
            check_integrity(state, world.limits, world.num_blocks)
        state.counters[name] -= 1
    check_integrity(state, world.limits, world.num_blocks)


_PROGRAM = """
import json
from capplan.testing._integrity import check_integrity
from tests.serving.worlds import make_world, play, seeded

decisions = []
for seed in range(40):
    world = make_world(seeded(seed))
    for state, decision in play(world):
        check_integrity(state, world.limits, world.num_blocks)
        decisions.append(decision)
print(json.dumps(decisions))
"""


def test_interpreted_and_compiled_rules_decide_alike() -> None:
    answers = [
        json.loads(output_of_python("-c", _PROGRAM, NUMBA_DISABLE_JIT=disabled)) for disabled in ("0", "1")
    ]
    assert len(answers[0]) > 1000
    assert answers[0] == answers[1]
