"""Decode steps against the bytes that they must move."""

import pytest
import torch

from capplan.engine.models import model_config
from capplan.profiling.engine._checks import DecodeGrid, decode_rows, least_bytes


def test_the_least_bytes_of_llama_3_8b() -> None:
    """8.03 billion parameters less 0.53 of the input embedding, two bytes each; 128 KiB of KV a token."""
    config, dtype = model_config("meta-llama/Llama-3.1-8B-Instruct"), torch.bfloat16
    alone = least_bytes(config, dtype, DecodeGrid(context=1, steps=1), 1, 0)
    assert alone == pytest.approx(2 * 7.505e9, rel=1e-3)
    longer = least_bytes(config, dtype, DecodeGrid(context=500, steps=1), 2, 0)
    assert longer - alone == (2 * 500 - 1) * 128 * 1024
    shared = least_bytes(config, dtype, DecodeGrid(context=1, steps=1, tensor_parallel_size=2), 1, 0)
    assert 2 * shared == alone


def test_adapters_of_a_batch_are_read_once_each() -> None:
    config, grid = model_config("tiny-llama"), DecodeGrid(rank=4)
    read = [least_bytes(config, torch.float32, grid, 4, adapters) for adapters in (0, 2, 4, 8)]
    assert read[2] - read[0] == 2 * (read[1] - read[0]) > 0
    assert read[3] == read[2]


def test_measured_points_are_left_out() -> None:
    grid = DecodeGrid((1, 3), (0, 2), rank=4, context=9, steps=6)
    rows = list(decode_rows("tiny-llama", "cpu", grid, 1e9, {(0, 1), (2, 3)}, 60.0))
    assert [(row["adapters"], row["batch"]) for row in rows] == [(0, 3), (2, 1)]
    assert all(row["step_ms"] >= row["forward_ms"] > 0 for row in rows)
    for row in rows:
        assert row["step_over_least"] == pytest.approx(row["forward_ms"] / (row["least_bytes"] / 1e9 * 1e3))
    assert list(decode_rows("tiny-llama", "cpu", grid, 1e9, set(grid.points()), 60.0)) == []
