"""GPU benchmark, run on a CPU."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton (extra `engine`)")

from benchmarks.engine_gpu import main

HERE = ["--device", "cpu", "--model", "tiny-llama", "--rank", "4"]
SMALL = [*HERE, "--batches", "1", "3", "--adapters", "2"]


def test_the_benchmark_reports_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--repeats", "1", "--kernels", "mbgmv", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["adapters"]) for row in report["kernels"]] == [(1, 1), (3, 2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
