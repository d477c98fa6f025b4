"""Extrapolations: exactly the values that leave a fitted range are named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.step_tables import tabulated
from capplan import Adapter, Lengths, Profile, Workload, load_profile, plan, simulate
from capplan.spec import Fit, ProvenanceKind
from capplan.twin.instance import MODELS, SLACK, engine_args, extrapolations, merged, values_of
from capplan.twin.instance._extrapolation import QUANTITIES

LLAMA = "h100-64g/llama-3.1-8b/vllm-0.8.5"
FIT = Fit(source="made up", samples=9, error_formula="none", error=0.0)
QUANTITY = st.sampled_from(sorted(QUANTITIES))


def fitted(**ranges: tuple[float, float]) -> Profile:
    """Return the Llama profile with these ranges in its step model, and none elsewhere."""
    profile = load_profile(LLAMA)
    parts = {name: getattr(profile, name).replace(fitted_range={}, fit=FIT) for name in MODELS}
    parts["step_latency"] = parts["step_latency"].replace(fitted_range=ranges)
    return profile.replace(**parts)


def traffic(rank: int = 8, prompt: float = 223, rate_rps: float = 0.2, count: int = 8) -> Workload:
    return Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        profile=LLAMA,
        gpus={"count": 1},
        adapters=[Adapter(name=f"a{i}", rank=rank, rate_rps=rate_rps) for i in range(count)],
        prompt_tokens=Lengths(mean=prompt),
        output_tokens=Lengths(mean=60),
    )


@given(
    name=QUANTITY,
    low=st.floats(1, 1e4),
    span=st.floats(0, 1e4),
    below=st.floats(0, 2e4),
    above=st.floats(0, 2e4),
)
def test_a_record_is_made_if_and_only_if_a_value_leaves_the_range(
    name: str, low: float, span: float, below: float, above: float
) -> None:
    ends = (low, low + span)
    values = (min(below, above), max(below, above))
    outside = values[1] > ends[1] * (1 + SLACK)
    if not QUANTITIES[name].upper_only:
        outside = outside or values[0] < ends[0] * (1 - SLACK)
    found = extrapolations(fitted(**{name: ends}), {name: values})
    assert [each.quantity for each in found] == [name] * outside
    assert extrapolations(fitted(), {name: values}) == ()


@pytest.mark.parametrize("kind", [ProvenanceKind.MEASURED, ProvenanceKind.COMPOSED])
def test_steps_beyond_the_axes_of_tables_are_named(kind: ProvenanceKind) -> None:
    """Also for a profile of which nothing was measured as a whole."""
    plain = tabulated(fitted())
    profile = plain.replace(provenance=plain.provenance.replace(kind=kind))
    axes = {axis.name: axis for table in profile.step_latency.tables.values() for axis in table.axes}
    for name, axis in axes.items():
        end = axis.points[-1]
        assert not [each for each in extrapolations(profile, {name: (0.0, end)}) if each.tables]
        beyond = (
            (f"group-{at}", each) for at in (1, 2) for each in extrapolations(profile, {name: (1, at + end)})
        )
        found = [each for each in merged(beyond) if each.tables]
        assert [(each.quantity, each.high, each.groups) for each in found] == [
            (name, end + 2, ("group-1", "group-2"))
        ]
        value = f"{QUANTITIES[name].label} {end + 2:,.0f}"
        assert found[0].note == f"{value}, step_latency tables of {profile.name} end at {end:,.0f}"


def test_slots_of_a_rank_that_was_not_measured_are_named_once() -> None:
    """The shipped profile was fitted at ranks up to 32 and said nothing about 64."""
    profile, workload = load_profile(LLAMA), traffic(rank=64)
    args = engine_args(workload, {"a_max": 8})
    result = simulate(workload, profile, a_max=8, duration_s=60)
    found = {each.quantity: each for each in extrapolations(profile, values_of(workload, args, 1, [result]))}
    assert found.keys() == {"s_max", "rank"}
    assert found["s_max"].high == 64
    assert found["s_max"].fitted_high == 32
    assert "slots of rank 64" in found["s_max"].note


def test_the_values_are_those_that_the_twin_reached() -> None:
    """A large token budget is no extrapolation of the step model while no step uses it."""
    profile, workload = load_profile(LLAMA), traffic()
    result = simulate(workload, profile, a_max=8, duration_s=60, max_num_batched_tokens=16_384)
    args = engine_args(workload, {"a_max": 8, "max_num_batched_tokens": 16_384})
    values = values_of(workload, args, 1, [result])
    assert values["tokens"][1] == result.step_tokens_max < 2048
    assert values["requests"] == (result.running_mean, result.running_max)
    assert result.kv_tokens_mean < values["kv_tokens"][1] == result.kv_tokens_max <= result.kv_tokens
    found = extrapolations(profile, values)
    assert [(each.quantity, each.models) for each in found] == [("max_num_batched_tokens", ("memory",))]


def test_a_budget_that_steps_use_is_an_extrapolation_of_the_step_model() -> None:
    profile, workload = load_profile(LLAMA), traffic(prompt=900, rate_rps=4.0)
    settings = {"a_max": 8, "max_num_batched_tokens": 8192}
    result = simulate(workload, profile, duration_s=60, **settings)
    found = extrapolations(profile, values_of(workload, engine_args(workload, settings), 1, [result]))
    assert "tokens" in {each.quantity for each in found}


@pytest.mark.parametrize("kind", [ProvenanceKind.ROOFLINE, ProvenanceKind.COMPOSED, ProvenanceKind.CARRIED])
def test_a_profile_that_was_not_measured_says_so_instead_of_a_range(kind: ProvenanceKind) -> None:
    profile = fitted(rank=(8, 16))
    origin = profile.provenance.replace(kind=kind)
    (found,) = extrapolations(profile.replace(provenance=origin), {"rank": (64.0, 64.0)})
    assert found.quantity is None
    assert "not measured" in found.note


def test_models_without_a_fit_are_named() -> None:
    profile = fitted()
    assumed = profile.memory.replace(fit=FIT.replace(samples=0))
    (found,) = extrapolations(profile.replace(memory=assumed), {})
    assert found.models == ("memory",)


def test_equal_extrapolations_of_several_groups_are_one_record() -> None:
    (one,) = extrapolations(fitted(rank=(8, 16)), {"rank": (8.0, 64.0)})
    far = replace(one, high=128.0)
    (found,) = merged([("g0", one), ("g1", far)])
    assert found.groups == ("g0", "g1")
    assert (found.low, found.high) == (8.0, 128.0)
    assert "rank 128" in found.note


def test_groups_that_are_all_outside_are_named_with_the_range_of_their_values() -> None:
    groups = [
        (f"g{slots}", extrapolations(fitted(a_max=(8, 352)), {"a_max": (slots, slots)})[0])
        for slots in (0, 4)
    ]
    (found,) = merged(groups)
    assert "adapter slots 0 to 4" in found.note


def test_plans_list_their_extrapolations_and_none_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan(traffic(rank=64), verify=False).to_json(path)
    records = json.loads(path.read_text())["provenance"]["extrapolations"]
    assert {record["quantity"] for record in records} == {"s_max", "rank"}
    assert all(record["groups"] == ["gpu-0"] for record in records)
    assert plan(traffic(), verify=False).provenance["extrapolations"] == []
