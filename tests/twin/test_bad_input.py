"""Invalid input of `simulate` raises an `InputError` located at the argument before any work."""

import math
from typing import Any

import numpy as np
import pytest

from capplan import errors, simulate, simulate_detailed
from capplan.spec import Trace
from tests.oracle import simulate_with_reference
from tests.twin.examples import profile, workload

SETTINGS: dict[str, Any] = {"a_max": 4, "s_max": 8, "duration_s": 20.0, "max_model_len": 512}

WRONG: list[tuple[str, Any]] = [
    *((name, 0) for name in ("a_max", "max_num_seqs", "max_num_batched_tokens", "max_model_len")),
    *((name, "8") for name in ("a_max", "s_max", "max_num_seqs", "max_cpu_loras", "max_in_flight")),
    *((name, 2.5) for name in ("a_max", "s_max", "max_model_len", "max_cpu_loras", "seed")),
    *((name, None) for name in ("a_max", "duration_s", "seed", "gpu_memory_utilization")),
    *((name, True) for name in ("a_max", "duration_s", "seed")),
    *((name, math.nan) for name in ("a_max", "duration_s", "seed", "gpu_memory_utilization")),
    ("a_max", 2**31),
    ("s_max", 4),
    ("max_cpu_loras", 3),
    ("duration_s", 0.0),
    ("duration_s", -1.0),
    ("duration_s", math.inf),
    ("duration_s", "60"),
    ("duration_s", [60.0]),
    ("gpu_memory_utilization", 0.0),
    ("gpu_memory_utilization", 1.1),
    ("gpu_memory_utilization", "0.9"),
    ("max_in_flight", 0),
    ("seed", -1),
    ("seed", "0"),
    ("rules", "vllm-9"),
    ("rules", 8),
    ("prefix_caching", 1),
    ("prefix_caching", "on"),
]


@pytest.mark.parametrize("run", [simulate, simulate_detailed])
@pytest.mark.parametrize(("name", "value"), WRONG, ids=repr)
def test_an_invalid_setting_is_named_with_its_value(run: Any, name: str, value: Any) -> None:
    with pytest.raises(errors.InputError) as caught:
        run(workload(), profile(), **(SETTINGS | {name: value}))
    assert name in caught.value.location
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workload", "workload.yaml"),
        *((name, value) for name in ("workload", "profile") for value in (None, {}, 3)),
    ],
)
def test_a_wrong_type_of_workload_or_profile_is_named(name: str, value: Any) -> None:
    given: dict[str, Any] = {"workload": workload(), "profile": profile(), name: value}
    with pytest.raises(errors.InputError, match=rf"^{name}: must be a "):
        simulate(given["workload"], given["profile"], **SETTINGS)


def test_a_profile_by_an_unknown_name_is_named() -> None:
    with pytest.raises(errors.InputError, match="no-such-profile"):
        simulate(workload(), "no-such-profile", **SETTINGS)


def test_numpy_numbers_are_accepted() -> None:
    as_numpy = {"a_max": np.int64(4), "s_max": np.int32(8), "duration_s": np.float32(20), "seed": np.uint8(1)}
    ours = simulate(workload(), profile(), **(SETTINGS | as_numpy))
    plain = simulate(workload(), profile(), **(SETTINGS | {"seed": 1}))
    assert (ours.completed, ours.e2e_s_p99) == (plain.completed, plain.e2e_s_p99)


@pytest.mark.parametrize("simulated", [simulate, simulate_with_reference])
def test_recorded_prompts_that_leave_no_room_are_rejected_and_counted(simulated: Any) -> None:
    """As the engine does: a prompt of max_model_len tokens leaves no room for an answer."""
    trace = Trace.from_arrays([0.0, 0.5, 1.0, 1.5], ["a0", "a1", "a0", "a3"], [64, 511, 512, 700], [4] * 4)
    result = simulated(workload().replace(trace=trace), profile(), **SETTINGS)
    assert (result.submitted, result.completed, result.rejected) == (4, 2, 2)
    # The prompt of 511 tokens is answered by the one token that max_model_len leaves.
    assert result.output_tok_s == pytest.approx((4 + 1) / 20.0)
    answerable = 64 + 4 + 511 + 1 + 512 + 1 + 700 + 1
    assert result.served_fraction == pytest.approx((64 + 4 + 511 + 1) / answerable)


def test_slora_keeps_every_adapter_on_the_host() -> None:
    with pytest.raises(errors.InputError, match="max_cpu_loras"):
        simulate(workload(), profile(), **{**SETTINGS, "a_max": 1}, max_cpu_loras=1, rules="slora")


def test_max_model_len_is_within_the_positions_of_the_model() -> None:
    base = profile()
    short = base.replace(model=base.model.replace(max_positions=256))
    with pytest.raises(errors.InputError, match="max_model_len: must be at most 256, the positions of"):
        simulate(workload(), short, **SETTINGS)
    assert short.model.default_max_model_len == 256
    by_default = {**SETTINGS, "max_model_len": None}
    longest = simulate(workload(), short, **{**SETTINGS, "max_model_len": 256})
    assert simulate(workload(), short, **by_default).throughput_tok_s == longest.throughput_tok_s


def test_steps_that_take_no_time_are_refused() -> None:
    with pytest.raises(errors.InputError, match="profile: step_latency: must give steps a time above 0 ms"):
        simulate(workload(), profile(step_ms=0.0), **SETTINGS)
