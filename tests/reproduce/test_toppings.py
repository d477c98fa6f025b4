"""Toppings' engine restates what the paper prints; rows and placements are what their names say."""

import numpy as np
import pytest

from capplan.reproduce.toppings._figures import Served, placed
from capplan.reproduce.toppings._setting import (
    cpu_lora,
    function_shares,
    functions_workload,
    line,
    profile,
    setting,
    systems,
)
from capplan.spec import Kernel


@pytest.mark.parametrize("kernel", [Kernel.BGMV, Kernel.MBGMV])
def test_iterations_take_the_printed_times(kernel):
    for point in setting().decode:
        printed_ms = point.bgmv_ms if kernel is Kernel.BGMV else point.mbgmv_ms
        model = profile(kernel).step_latency
        work = point.requests * point.rank / 1e3
        found_ms = (
            model.value("base_ms")
            + model.value("ms_per_ktoken") * point.requests / 1e3
            + model.value("ms_per_decode_krank") * work
            + model.value("ms_for_several")
        )
        assert found_ms == pytest.approx(printed_ms, abs=0.1)


def test_prompts_take_the_printed_times():
    base_ms, ms_per_ktoken = line(setting().prefill)
    for point in setting().prefill:
        assert base_ms + ms_per_ktoken * point.tokens / 1e3 == pytest.approx(point.ms)


def test_prefills_on_cpu_alone_take_the_printed_times():
    cores, given, arch = cpu_lora(), setting().cpu, setting().small.model
    task_ms = cores.ms_per_mmac * cores.tokens_per_task * given.rank * 2 * arch.hidden_size / 1e6
    for point in given.prefill:
        tasks = len(setting().modules) * -(-point.tokens // cores.tokens_per_task)
        layer_ms = -(-tasks // cores.workers) * task_ms + cores.signal_ms
        assert arch.layers * layer_ms == pytest.approx(point.ms)


def test_only_dlora_and_cached_load_nothing():
    loads = {name: system.cache().loads for name, system in systems().items()}
    assert {name for name, does in loads.items() if not does} == {"cached", "dlora"}


def test_a_seed_is_a_group_of_functions():
    first, again, other = (function_shares(512, seed) for seed in (0, 0, 1))
    assert first.sum() == pytest.approx(1.0)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_dlora_s_placement_holds_every_adapter_and_spends_one_copy_less_than_it_has():
    load = functions_workload(300, 40.0, (8, 64), 1.0, seed=0)
    held = [instance.adapters for instance in placed(load, 8, profile())]
    assert set().union(*held) == {adapter.name for adapter in load.adapters}
    assert sum(map(len, held)) <= len(load.adapters) + 8 - 1


def test_rows_are_increases_over_cached_ratios_of_systems_and_memory():
    found = Served(
        {
            ("512", "cached"): [{"ttft": 1.0}, {"ttft": 2.0}],
            ("512", "s-lora"): [{"ttft": 1.5}, {"ttft": 2.5}],
            ("512", "dlora"): [None, None],
        }
    )
    assert found.value("512.s-lora.ttft") == pytest.approx([50.0, 25.0])
    assert found.value("512.s-lora/cached.ttft") == pytest.approx([1.5, 1.25])
    assert found.value("512.dlora.memory") == [1.0, 1.0]
    assert found.ordered("512", ("cached", "s-lora"), ("ttft",)) == [1.0, 1.0]
    assert found.ordered("512", ("s-lora", "cached"), ("ttft",)) == [0.0, 0.0]
