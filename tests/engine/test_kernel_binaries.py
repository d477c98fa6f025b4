"""GPU kernels compiled without a GPU: resources of their binaries, and the bytes that they move."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton (extra `engine`)")

import torch

from benchmarks.kernel_launches import (
    LoraBatch,
    attention_launches,
    kernels_per_layer,
    lora_launches,
    prompts_launch,
)
from tests.engine.engines import TINY_MODEL

pytestmark = pytest.mark.long

KERNELS = {
    "shrink_tokens",
    "expand_tokens",
    "expand_pairs_tokens",
    "find_tiles",
    "shrink_tiles",
    "expand_tiles",
    "expand_pairs_tiles",
    "attend_pages",
    "merge_splits",
    "attend_prompts",
    "share_rows",
    "norm_rows",
    "gate_rows",
    "rotate_heads",
}
WIDE = TINY_MODEL.replace(hidden_size=256, intermediate_size=64, head_dim=32, dtype="bfloat16")


def test_every_kernel_compiles_for_every_architecture_without_spilling() -> None:
    """A process of its own, because the interpreter replaces the compiler for a whole process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.kernel_binaries", "--quick", "--json"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    rows = json.loads(subprocess.run(command, cwd=root, env=env, check=True, capture_output=True).stdout)
    assert {(row["kernel"], row["arch"]) for row in rows} == {(k, a) for k in KERNELS for a in (80, 90, 100)}
    assert {row["spilled_bytes"] for row in rows} == {0}
    assert min(row["occupancy"] for row in rows) >= 0.25
    least = {"find_tiles": -1.0, "expand_pairs_tiles": 0.1, "expand_pairs_tokens": 0.3}
    assert all(row["wide_loads"] > least.get(row["kernel"], 0.4) for row in rows)  # unaligned: none


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and no interpreter")
class TestTraffic:
    """Bytes of launches whose loads and stores are known."""

    def test_a_shrink_reads_weights_activations_and_indices_once(self) -> None:
        launches = lora_launches(WIDE, LoraBatch("mbgmv", adapters=2, rank=8), torch.device("cpu"))
        launch = next(launch for half, site, launch in launches if (half, site) == ("shrink", "gate, up"))
        traffic = self.traffic(launch)
        splits = launch.config["SPLITS"]
        weights, activations = 2 * 2 * 8 * 256 * 2, 2 * 256 * 2
        programs = 2 * 2 * splits
        assert traffic.loaded == weights + 2 * activations + programs * (4 + 4 + 8 * 8)  # two modules
        assert traffic.stored == 4 * 8 * programs
        assert traffic.least == weights + activations + traffic.stored

    def test_attention_reads_keys_and_values_once(self) -> None:
        [launch] = attention_launches(WIDE, 3, 40, torch.device("cpu"), splits=1)
        traffic = self.traffic(launch)
        keys_and_values, queries = 3 * 2 * 40 * 32 * 2, 3 * 2 * 32 * 2
        assert traffic.loaded == keys_and_values + queries + 3 * (8 + 40 * 8)
        assert traffic.stored == queries
        assert traffic.least == keys_and_values + 2 * queries

    def test_prompts_read_keys_once_per_tile(self) -> None:
        launch = prompts_launch(WIDE, 2, 48, torch.device("cpu"))  # tiles of 32 and 16 tokens, two queries
        traffic = self.traffic(launch)
        per_key_head = 2 * (32 + 48) * (2 * 32 * 2 + 8) + 2 * 48 * 2 * 32 * 2 + 2 * 2 * 16
        assert traffic.loaded == WIDE.kv_heads * per_key_head
        assert traffic.stored == 2 * 48 * WIDE.heads * 32 * 2

    @staticmethod
    def traffic(launch):  # type: ignore[no-untyped-def]
        from benchmarks.kernel_traffic import counted

        with counted() as traffic:
            launch.run()
        return traffic


def test_kernels_per_layer_of_a_decode_step() -> None:
    assert kernels_per_layer(WIDE, 300, None) == 9
    assert kernels_per_layer(WIDE, 1, None) == 10  # contexts are split
    assert kernels_per_layer(WIDE, 300, "sgmv") == 15


def test_occupancy_is_that_of_the_scarcest_resource() -> None:
    """Values of NVIDIA's occupancy calculator for compute capability 9.0."""
    from benchmarks.kernel_binaries import ARCHITECTURES, occupancy

    hopper = ARCHITECTURES[90]
    assert occupancy(hopper, registers=32, shared_bytes=0, warps=4) == (1.0, "warps")
    assert occupancy(hopper, registers=64, shared_bytes=0, warps=4) == (0.5, "registers")
    assert occupancy(hopper, registers=32, shared_bytes=100 * 1024, warps=4) == (0.125, "shared memory")
    assert occupancy(hopper, registers=32, shared_bytes=0, warps=1) == (0.5, "blocks")
