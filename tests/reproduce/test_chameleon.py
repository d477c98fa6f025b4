"""Setting, systems and cases of Chameleon's figures."""

import pytest

from capplan.reproduce.chameleon import EXPERIMENTS
from capplan.reproduce.chameleon._figures import Case
from capplan.reproduce.chameleon._setting import (
    A40,
    Platform,
    load_ms,
    load_share,
    medium_ktokens,
    prefill_ms,
    recipe,
    setting,
    system,
)
from capplan.spec import cache_of, completed, scheduler_of


def test_every_figure_has_an_experiment():
    assert list(EXPERIMENTS) == [figure.id for figure in recipe().figures]


@pytest.mark.parametrize("name", recipe().systems)
def test_every_system_is_a_scheduler_and_a_cache(name):
    chosen = system(name)
    assert completed(scheduler_of(dict(chosen.scheduler)), cache_of(dict(chosen.cache))) is not None


def test_every_scheduler_with_queues_says_who_pays_for_adapters():
    for name in recipe().systems:
        if system(name).scheduler["policy"] in ("chameleon", "static"):
            assert "adapter_charge" in system(name).scheduler["queues"]


def test_what_the_recipe_calls_free_is_in_its_setting():
    named = {name: each.value for name, each in recipe().free.items() if each.value != "follows"}
    assert named == {name: getattr(setting(), name) for name in named}


def test_a_medium_prompt_has_the_shares_of_figure_2():
    load = load_ms(A40, 128)
    prompt, base = (prefill_ms(A40, 1e3 * medium_ktokens(), rank) for rank in (128, 0))
    assert load / (load + prompt) == pytest.approx(0.175, abs=0.01)
    assert 1 - base / (load + prompt) == pytest.approx(0.60, abs=0.03)


def test_a_larger_gpu_has_a_larger_pool():
    by_memory = [Platform("a100-80g", memory_gib=gib).pool() for gib in (24.0, 48.0, 80.0)]
    assert A40.pool() < by_memory[0]
    assert by_memory == sorted(by_memory)


def test_loading_takes_a_larger_share_at_higher_rank_and_with_more_gpus():
    def share(rank, tp):
        return load_share(Platform("a100-80g", "llama-3.1-70b", tp), rank)

    assert share(8, 4) < share(32, 4) < share(128, 4)
    assert share(32, 2) < share(32, 4) < share(32, 8)


def test_a_case_of_another_folder_is_the_same_case():
    one, other = (Case("slora", 0, 8.0, traces=folder) for folder in ("a", "b"))
    assert repr(one) == repr(other)
    assert repr(one) != repr(one.at(9.0))
