"""Defaults that a profile provides for the engine and the requests."""

import numpy as np
import pytest

from capplan import EngineConfig, Lengths, Profile, Workload, errors
from capplan.spec import LengthPairs, Trace
from capplan.twin import Scenario, build_scenario
from capplan.twin.instance import chosen_rules
from tests.twin.examples import profile, workload

CORRELATED = profile().replace(length_correlation=-0.6)
SPREAD = {"prompt_tokens": Lengths(mean=60, std=60), "output_tokens": Lengths(mean=50, std=50)}


def measured_with(prefix_caching: bool | None) -> Profile:
    engine = profile().engine.replace(prefix_caching=prefix_caching)
    return profile().replace(engine=engine)


def test_prefix_caching_is_as_set_or_as_measured_or_by_the_rules() -> None:
    assert chosen_rules(measured_with(None), None, None).prefix_caching
    assert not chosen_rules(measured_with(False), None, None).prefix_caching
    assert chosen_rules(measured_with(False), None, True).prefix_caching
    assert not chosen_rules(measured_with(True), None, False).prefix_caching


def test_rules_without_prefix_caching_refuse_it_only_if_set() -> None:
    assert not chosen_rules(measured_with(True), "slora", None).prefix_caching
    with pytest.raises(errors.InputError, match="prefix_caching"):
        chosen_rules(measured_with(None), "slora", True)


def drawn(asked: Workload, of: Profile) -> Scenario:
    args = EngineConfig(max_loras=4, max_lora_rank=8, max_model_len=4096).complete()
    return build_scenario(asked, of, args, duration_s=600.0, seed=0)


def same_lengths(one: Scenario, other: Scenario) -> bool:
    return all(
        np.array_equal(getattr(one.requests, name), getattr(other.requests, name))
        for name in ("prompt_tokens", "output_tokens")
    )


def test_the_length_correlation_is_the_workloads_or_else_the_profiles() -> None:
    silent = workload().replace(**SPREAD)
    ours = drawn(silent, CORRELATED)
    assert same_lengths(ours, drawn(silent.replace(length_correlation=-0.6), profile()))
    assert np.corrcoef(ours.requests.prompt_tokens, ours.requests.output_tokens)[0, 1] < -0.2
    independent = drawn(silent.replace(length_correlation=0.0), CORRELATED)
    assert same_lengths(independent, drawn(silent, profile()))
    assert not same_lengths(independent, ours)


def test_recorded_lengths_are_not_changed() -> None:
    pairs = LengthPairs.from_arrays([10, 200, 30], [100, 5, 60])
    in_pairs = workload().replace(length_pairs=pairs)
    assert same_lengths(drawn(in_pairs, CORRELATED), drawn(in_pairs, profile()))
    trace = Trace.from_arrays(np.array([0.0, 1.0]), ["a0", "a1"], [10, 200], [100, 5])
    replayed = workload().replace(trace=trace)
    assert same_lengths(drawn(replayed, CORRELATED), drawn(replayed, profile()))


def test_zero_length_correlation_differs_from_none() -> None:
    silent = workload()
    assert silent.length_correlation is None
    assert silent.digest() != silent.replace(length_correlation=0.0).digest()
