"""Setting and table of the benchmark of Chameleon's figures."""

import pytest

from benchmarks.papers.chameleon.loading import load_share
from benchmarks.papers.chameleon.rows import Row
from benchmarks.papers.chameleon.runs import highest
from benchmarks.papers.chameleon.setting import A40, Platform, medium_ktokens, physics_of, profile
from benchmarks.papers.chameleon.systems import SYSTEMS
from capplan.models import gpu_load_ms
from capplan.spec import cache_of, completed, scheduler_of


def test_every_system_is_a_scheduler_and_a_cache():
    for system in SYSTEMS.values():
        assert completed(scheduler_of(dict(system.scheduler)), cache_of(dict(system.cache))) is not None


def test_the_profile_has_the_published_times():
    """An adapter of rank 128 loads in 30 ms (Fig. 14); a medium prompt has 256 to 1,024 tokens (Fig. 2)."""
    assert gpu_load_ms(profile().loading, 128, 128) == pytest.approx(30.0)
    assert 256 <= 1e3 * medium_ktokens(physics_of(A40)) <= 1024


def test_the_memory_of_a_gpu_is_for_weights_kv_and_adapters():
    assert A40.pool() == pytest.approx(57_000, rel=0.02)
    by_memory = [Platform("a100-80g", memory_gib=gib).pool() for gib in (24.0, 48.0, 80.0)]
    assert by_memory == sorted(by_memory)


def test_loading_takes_a_larger_share_at_higher_rank_and_with_more_gpus():
    assert load_share(8, 4) < load_share(32, 4) < load_share(128, 4)
    assert load_share(32, 2) < load_share(32, 4) < load_share(32, 8)


@pytest.mark.parametrize("limit", [0.3, 1.0, 8.7, 40.0])
def test_the_highest_rate_is_within_one_percent(limit):
    found = highest(lambda rate: rate <= limit, 8.6)
    assert limit / 1.0101 <= found <= limit


def test_no_rate_holds():
    assert highest(lambda rate: False, 8.6) == 0.0


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        (Row("f", "1.5", [1.0, 2.0], (1.25, 1.8)), ["f", "1.5", "1.5 (1 to 2)", "1.25 to 1.8", "yes"]),
        (Row("f", "1.5", [1.0, 1.0], (1.25, 1.8), " x", "b"), ["f", "1.5", "1 x", "b", "no"]),
        (Row("f", "–", [3.0]), ["f", "–", "3", "–", "–"]),
        (Row("f", "yes", (), band_text="yes", holds=False), ["f", "yes", "no", "yes", "no"]),
    ],
)
def test_a_row_says_whether_its_mean_is_inside(row, cells):
    assert row.cells() == cells
