import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capplan import InputError
from capplan.profiling.load import (
    BenchResult,
    LoadSettings,
    RequestFile,
    Target,
    bench,
    read_result,
    write_vllm_bench,
)
from tests.profiling.load import servers
from tests.profiling.load.test_requests import workload

# What vLLM 0.32 writes for `vllm bench serve --save-result --save-detailed`.
KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times"),
    *("queue_times", "generated_texts", "errors"),
    *(f"{s}_{metric}_ms" for s in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl")),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchResult, Path]:
    path = tmp_path_factory.mktemp("bench") / "vllm.json"
    with servers.server(servers.paced) as url, RequestFile(path.with_suffix(".parquet")) as file:
        result = bench(workload(4.0), Target(url), LoadSettings(duration_s=0.5), file=file)
        write_vllm_bench(path, result, file.finished())
    return result, path


def test_a_written_file_has_the_keys_of_vllm(run: tuple[BenchResult, Path]) -> None:
    document = json.loads(run[1].read_text())
    assert set(document) >= KEYS
    lists = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors")
    assert {len(document[key]) for key in lists} == {document["num_prompts"]}
    assert 0 < document["num_prompts"] <= run[0].overall.submitted  # all that went out in time
    for ttft, itl, latency in zip(document["ttfts"], document["itls"], document["latencies"], strict=True):
        assert ttft + sum(itl) == pytest.approx(latency, abs=1e-4)


def test_a_written_file_reads_back(run: tuple[BenchResult, Path]) -> None:
    result, path = run
    read = read_result(path)
    assert read.source == "vllm bench serve"
    document = json.loads(path.read_text())
    overall = read.overall
    assert overall.completed == document["completed"]
    assert overall.throughput_tok_s == pytest.approx(document["total_token_throughput"])
    for metric, stats in (("tpot", overall.tpot_ms), ("itl", overall.itl_ms)):
        assert stats.mean == pytest.approx(document[f"mean_{metric}_ms"])
        assert stats.p99 == pytest.approx(document[f"p99_{metric}_ms"])
    assert overall.ttft_sent_s.p50 == pytest.approx(document["median_ttft_ms"] / 1e3)
    assert overall.submitted == document["num_prompts"] <= result.overall.submitted


def test_a_file_without_details_gives_its_own_statistics(
    run: tuple[BenchResult, Path], tmp_path: Path
) -> None:
    document = json.loads(run[1].read_text())
    short = {key: value for key, value in document.items() if not isinstance(value, list)}
    (tmp_path / "short.json").write_text(json.dumps(short))
    overall = read_result(tmp_path / "short.json").overall
    assert overall.itl_ms.mean == document["mean_itl_ms"]
    assert overall.ttft_sent_s.p99 == pytest.approx(document["p99_ttft_ms"] / 1e3)


def test_failed_requests_are_left_out_of_latencies(run: tuple[BenchResult, Path], tmp_path: Path) -> None:
    document = json.loads(run[1].read_text())
    document["errors"][0], document["ttfts"][0] = "boom", 1e9
    (tmp_path / "x.json").write_text(json.dumps(document))
    assert np.isfinite(read_result(tmp_path / "x.json").overall.ttft_sent_s.mean or np.nan)
    assert (read_result(tmp_path / "x.json").overall.ttft_sent_s.mean or 0.0) < 1e6


@pytest.mark.parametrize(
    "document", [[], {}, {"duration": 0, "completed": 1, "total_input_tokens": 1, "total_output_tokens": 1}]
)
def test_another_file_is_refused(tmp_path: Path, document: Any) -> None:
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(InputError):
        read_result(tmp_path / "x.json")
