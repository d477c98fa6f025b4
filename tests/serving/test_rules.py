"""Rule sets: versions, differences between them, and engines."""

import re
from dataclasses import fields
from itertools import pairwise

import pytest

from capplan import InputError
from capplan.serving import (
    RELEASES,
    RULES,
    ServingRules,
    commit,
    new_state,
    release_of,
    rules_of_engine,
    rules_of_version,
    schedule,
    serving_rules,
    submit,
)
from capplan.spec import EngineArgs, version_numbers
from capplan.testing._integrity import waiting_rows

ARGS = EngineArgs(
    max_loras=1,
    max_lora_rank=8,
    max_num_seqs=8,
    max_num_batched_tokens=8,
    gpu_memory_utilization=0.9,
    max_model_len=64,
)
SWITCHES = {
    "vllm-0.8": {"prefix_caching", "lora_extra_vocab"},
    "vllm-0.11": {"prefix_caching", "lora_extra_vocab", "reverse_skipped"},
    "vllm-0.12": {"prefix_caching", "reverse_skipped"},
    "vllm-0.14": {"prefix_caching"},
    "vllm-0.20": {"prefix_caching", "reserve_full_sequence"},
    "vllm-0.32": {
        *("prefix_caching", "reserve_full_sequence"),
        *("unhashed_to_front", "lone_prefill_exempt"),
    },
    "vllm-0.33": {
        "prefix_caching",
        "reserve_full_sequence",
        "unhashed_to_front",
        "lone_prefill_exempt",
        "hold_ending",
    },
    "capplan": {
        *("prefix_caching", "reserve_full_sequence"),
        *("unhashed_to_front", "lone_prefill_exempt", "load_beside"),
    },
    "slora": {"policy"},
    "chameleon": {"policy", "load_beside"},
}
VLLM = pytest.mark.parametrize(
    "rules", [rules for rules in RULES if rules.engine == "vllm"], ids=lambda rules: rules.name
)
NAMING = {"name", "engine", "releases", "is_default"}


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: rules.name)
def test_rule_sets_differ_in_nothing_but_the_documented_switches(rules: ServingRules) -> None:
    on = {field.name for field in fields(rules) if field.name not in NAMING and getattr(rules, field.name)}
    expected = SWITCHES[rules.short_name]
    assert on == (expected | {"async_scheduling"} if rules.name.endswith("-async") else expected)


def test_releases_follow_each_other_and_keep_the_flags_and_rules_of_one_name() -> None:
    rules: dict[str, ServingRules] = {}
    for before, release in pairwise((None, *RELEASES)):
        first, last = (version_numbers(each) for each in (release.first, release.last))
        assert first <= last
        if before is not None:
            assert version_numbers(before.last) < first
            assert before.flags <= release.flags
        assert rules.setdefault(release.rules.name, release.rules) == release.rules
        assert release_of(release.first) == release_of(release.last) == release


@pytest.mark.parametrize(
    ("versions", "name"),
    [
        ("0.8 0.8.5 0.8.5.post1", "vllm-0.8"),
        ("0.9.2 0.10.1.1 0.11.0 0.11.2", "vllm-0.11"),
        ("0.12.0 0.13.0rc1", "vllm-0.12-sync"),
        ("0.14.0 0.16 0.18.1", "vllm-0.14-async"),
        ("0.19.0 0.20.0 0.23.0", "vllm-0.20-async"),
        ("0.27.1 0.32.0 0.32.0+cpu", "vllm-0.32-async"),
        ("0.33.0 0.33.1rc1", "vllm-0.33-async"),
    ],
)
def test_a_version_has_the_default_rules_of_its_releases(versions: str, name: str) -> None:
    for version in versions.split():
        assert rules_of_version(version).name == name
        assert rules_of_engine(version, None) == (serving_rules(name), version)


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.7.3", ["0.8.5 (vllm-0.8)"]),
        ("0.9.1", ["0.8.5 (vllm-0.8)", "0.9.2 to 0.11 (vllm-0.11)"]),
        ("0.25.0", ["0.19.0 to 0.23 (vllm-0.20-async)", "0.27.0 to 0.32 (vllm-0.32-async)"]),
        ("0.34.0", ["0.33.0 (vllm-0.33-async)"]),
        ("latest", ["such as 0.11.0"]),
    ],
)
def test_other_versions_are_refused_with_the_nearest_releases(version: str, nearest: list[str]) -> None:
    with pytest.raises(InputError, match="engine_version") as refused:
        rules_of_version(version)
    for name in nearest:
        assert name in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rules_may_be_named_for_a_version_without_known_ones_but_not_against_known_ones() -> None:
    assert rules_of_engine("0.34.0", "vllm-0.33") == (serving_rules("vllm-0.33-async"), "0.34.0")
    assert rules_of_engine("0.32.0", "vllm-0.32-sync")[0].name == "vllm-0.32-sync"
    with pytest.raises(InputError, match=r"must be vllm-0.11 for vLLM 0.11.0 \(got 'vllm-0.8'\)"):
        rules_of_engine("0.11.0", "vllm-0.8")


@pytest.mark.parametrize("name", ["slora", "chameleon", "capplan"])
def test_a_version_of_vllm_does_not_go_with_the_rules_of_another_engine(name: str) -> None:
    """A profile would otherwise read "s-lora 0.11.0"."""
    rules = serving_rules(name)
    with pytest.raises(InputError) as refused:
        rules_of_engine("0.11.0", name)
    assert str(refused.value) == (
        f"engine_version: is that of vLLM and does not go with rules {name}, which are those of "
        f"{rules.engine} {rules.version} (got '0.11.0')"
    )
    assert rules_of_engine(rules.version, name) == (rules, rules.version)


def test_rules_name_their_engine_and_its_last_version() -> None:
    named = {rules.name: (rules.engine, rules.version) for rules in RULES}
    assert named["slora"] == ("s-lora", "c1ddf48")
    assert named["vllm-0.14-sync"] == ("vllm", "0.18.1")
    assert named["capplan"][0] == "capplan"
    assert rules_of_engine(None, None, "vllm-0.8")[1] == "0.8.5"


def test_a_name_without_the_kind_of_scheduling_is_the_default() -> None:
    assert serving_rules("vllm-0.12").name == "vllm-0.12-sync"
    assert serving_rules("vllm-0.20").name == "vllm-0.20-async"
    with pytest.raises(InputError, match=r"vllm-0.12-sync, vllm-0.12-async, vllm-0.14-sync"):
        serving_rules("vllm")


@VLLM
def test_skipped_requests_return_reversed_from_0_9_2_to_0_13(rules: ServingRules) -> None:
    limits = rules.limits(ARGS, adapters=3, block_size=4, num_blocks=32)
    state = new_state(8, 3, 32, limits)
    for request, adapter in enumerate([1, 2, 3]):
        submit(state, limits, request, adapter, 4, 9)
    schedule(state, limits)
    commit(state, limits)
    order = [int(state.rows.request[row]) for row in waiting_rows(state)]
    assert order == ([2, 1] if rules.short_name in ("vllm-0.11", "vllm-0.12") else [1, 2])


@VLLM
def test_a_prompt_longer_than_the_free_blocks_waits_since_0_20(rules: ServingRules) -> None:
    limits = rules.limits(ARGS, adapters=1, block_size=4, num_blocks=6)
    state = new_state(8, 1, 6, limits)
    submit(state, limits, 0, 1, 4, 9)
    submit(state, limits, 1, 1, 24, 9)
    admitted = schedule(state, limits)
    assert admitted == (4 if rules.short_name in ("vllm-0.20", "vllm-0.32", "vllm-0.33") else 8)


@VLLM
def test_a_slot_is_free_when_the_last_token_is_sent_and_since_0_33_when_it_has_arrived(
    rules: ServingRules,
) -> None:
    """One slot; adapter 1 ends with its first token, then adapter 2 is due."""
    limits = rules.limits(ARGS, adapters=2, block_size=4, num_blocks=32)
    state = new_state(8, 2, 32, limits)
    for request, adapter in enumerate([1, 2]):
        submit(state, limits, request, adapter, 4, 1)
    steps = []
    for _ in range(3):
        steps.append(int(schedule(state, limits)))
        commit(state, limits)
    assert steps == ([4, 0, 4] if rules.name == "vllm-0.33-async" else [4, 4, 0])


@pytest.mark.parametrize("version", ["0.15.1rc0", "0.11.0+cu128", "0.19.1.dev123+gabc.d20261101", "0.10.1.1"])
def test_a_version_may_have_suffixes(version: str) -> None:
    plain = re.split(r"rc|\+|\.dev", version)[0]
    assert rules_of_version(version) is rules_of_version(plain)


@pytest.mark.parametrize("version", ["0.32-sync", "0.32-async", "0.11x", "0.11.", "0"])
def test_a_name_of_rules_is_no_version(version: str) -> None:
    """Versions that end in the name of a mode had the rules of the other mode."""
    with pytest.raises(InputError, match="must be a version such as"):
        rules_of_version(version)
