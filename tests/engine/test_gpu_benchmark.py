"""GPU benchmark, run on a CPU."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton (extra `engine`)")

from benchmarks.engine_gpu import floor_bytes, main
from capplan.engine.models import model_config

HERE = ["--device", "cpu", "--model", "tiny-llama", "--rank", "4", "--context", "9", "--steps", "6"]
SMALL = [*HERE, "--batches", "1", "3", "--adapters", "0", "2"]


def test_the_benchmark_reports_kernels_and_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--repeats", "1", "--kernels", "mbgmv", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["adapters"]) for row in report["kernels"]] == [(1, 1), (3, 2)]
    assert [(row["batch"], row["adapters"]) for row in report["decode"]] == [(1, 0), (3, 0), (1, 2), (3, 2)]
    assert all(row["forward_ms"] > 0 and row["floor_ms"] > 0 for row in report["decode"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_minimum_bytes_of_llama_3_8b() -> None:
    """8.03 billion parameters less 0.53 of the input embedding, two bytes each; 128 KiB of KV a token."""
    config = model_config("meta-llama/Llama-3.1-8B-Instruct")
    alone = floor_bytes(config, torch.bfloat16, batch=1, adapters=0, rank=16, context=1)
    assert alone == pytest.approx(2 * 7.505e9, rel=1e-3)
    longer = floor_bytes(config, torch.bfloat16, batch=2, adapters=0, rank=16, context=500)
    assert longer - alone == (2 * 500 - 1) * 128 * 1024
