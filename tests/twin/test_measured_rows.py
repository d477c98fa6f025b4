"""Rows of measured data are read with every field that decides, and refused if one is not understood."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.measured import request_logs, silicon_vllm
from benchmarks.measured.case import RefusedCase
from capplan import InputError, load_profile

PROFILE = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")


def write_log(folder: Path, **settings: Any) -> None:
    own = folder / request_logs.FOLDER / "H100_Llama"
    own.mkdir(parents=True)
    kwargs = {"tensor_parallel_size": 1, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    kwargs |= {"max_model_len": 4096, "dtype": "bfloat16"} | settings
    meta = {
        "model": "meta-llama/Llama-3.1-8B",
        "vllm_version": "0.20.0",
        "engine_kwargs": kwargs,
        "started_at": "2026-01-01T00:00:00Z",
        "hardware": {"device_name": "NVIDIA H100 80GB HBM3"},
        "kv_cache": {"num_gpu_blocks": 101, "num_kv_tokens": 1616, "enable_prefix_caching": False},
    }
    (own / "vllm_meta.json").write_text(json.dumps(meta))
    times = {"arrival_time": 0.0, "queued_ts": 1.0, "first_token_ts": 2.0, "last_token_ts": 3.0}
    (own / "vllm_requests.jsonl").write_text(json.dumps({"input_toks": 10, "output_toks": 11} | times))
    pd.DataFrame({"t": [0.0], "running": [1], "waiting": [0], "kv_cache_pct": [1.0]}).to_csv(
        own / "vllm_timeseries.csv"
    )


def test_a_log_has_the_gpu_parallelism_version_and_cache_that_it_names(tmp_path: Path) -> None:
    write_log(tmp_path, tensor_parallel_size=2, quantization="fp8")
    (log,) = request_logs.read(tmp_path)
    assert isinstance(log, request_logs.RequestLog)
    at = log.deployment
    assert (at.gpu, at.tp, at.version, at.dtype) == ("h100-80g", 2, "0.20.0", "fp8")
    assert (log.num_blocks, log.engine.prefix_caching) == (100, False)
    assert log.measured["tpot_ms"] == pytest.approx(100.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"quantization": "awq"},
        {"kv_cache_dtype": "fp8"},
        {"speculative_config": {"method": "ngram"}},
    ],
    ids=str,
)
def test_a_log_with_a_setting_that_no_simulation_has_is_refused_by_its_name(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    write_log(tmp_path, **settings)
    (log,) = request_logs.read(tmp_path)
    assert isinstance(log, RefusedCase)
    with pytest.raises(InputError, match=next(iter(settings))):
        log.predict(PROFILE)


@pytest.mark.parametrize("field", ["pp_size", "attention_dp_size"])
def test_rows_of_other_parallelism_or_precision_are_refused(field: str, tmp_path: Path) -> None:
    row = {"backend": "vllm", "backend_version": "0.19.0", "model_path": "Qwen/Qwen3-32B", "mode": "agg"}
    row |= {"system": "h200_sxm", "isl": 1024, "osl": 128, "batch_size": 8, "tp_size": 2}
    row |= {"silicon_ttft_ms": 100.0, "silicon_tpot_ms": 10.0, "pp_size": 1, "attention_dp_size": None}
    rows = [row | {"precision": None}, row | {field: 2}, row | {"precision": "int4_wo"}]
    empty = {"gemm_quant_mode": None, "precision": None}
    pd.DataFrame([empty | each for each in rows]).to_csv(tmp_path / silicon_vllm.FILE)
    plain, parallel, other = silicon_vllm.read(tmp_path)
    assert isinstance(plain, silicon_vllm.ClosedLoopRun)
    assert (plain.deployment.gpu, plain.deployment.tp) == ("h200", 2)
    for refused, name in ((parallel, field), (other, "precision")):
        assert isinstance(refused, RefusedCase)
        with pytest.raises(InputError, match=name):
            refused.predict(PROFILE)
