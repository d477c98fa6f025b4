"""Published traces and results of load tests, in small files of their layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from capplan import InputError
from tests.observe.logs import observed


def lines(records: list[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(each) + "\n" for each in records)


N = 40
AZURE_2023 = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{15 + i // 60:02d}:{i % 60:02d}.6805900,{100 + i},{10 + i}\n" for i in range(N)
)
AZURE_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2024-05-10 00:00:{i % 60:02d}.009930+00:00,{100 + i},{10 + i}\n" for i in range(N)
)
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{i},{'GPT-4' if i % 4 == 0 else 'ChatGPT'},{100 + i},{10 + i},{110 + 2 * i},Conversation log\n"
    for i in range(N)
)
MOONCAKE = lines(
    [
        {"timestamp": 1000 * i, "input_length": 100 + i, "output_length": 10 + i, "hash_ids": [0, i + 1]}
        for i in range(N)
    ]
)
BAILIAN = lines(
    [
        {
            **{"chat_id": i, "parent_chat_id": -1, "timestamp": i + 0.072, "input_length": 100 + i},
            **{"output_length": 10 + i, "type": "text", "turn": 1, "hash_ids": [0, i + 1]},
        }
        for i in range(N)
    ]
)
RAGPULSE = lines(
    [
        {
            **{"timestamp": i, "input_length": 100 + i, "output_length": 10 + i, "session_id": i},
            "hash_ids": {"sys_prompt": [0], "passages_ids": [7, 8], "history": [], "user_input": [i + 9]},
        }
        for i in range(N)
    ]
)
SERVEGEN = lines(  # requests that its generator draws; its published batches have no times
    [
        {"request_id": i, "timestamp": i + 0.5, "data": {"input_tokens": 100 + i, "output_tokens": 10 + i}}
        for i in range(N)
    ]
)
VLLM = json.dumps(
    {
        **{
            "date": "20260510-101112",
            "backend": "vllm",
            "completed": N,
            "total_input_tokens": 1,
            "duration": 40.0,
        },
        "start_times": [5000.5 + i for i in range(N)],
        "input_lens": [100 + i for i in range(N)],
        "output_lens": [10 + i for i in range(N)],
        "errors": [""] * N,
        "itls": [[0.01]] * N,
    }
)
GUIDELLM = json.dumps(
    {
        "metadata": {"version": 1},
        "benchmarks": [
            {
                "config": {"strategy": {"type_": "poisson"}},
                "requests": {
                    "successful": [
                        {
                            **{"request_id": str(i), "prompt_tokens": 100 + i, "output_tokens": 10 + i},
                            "request_start_time": 1_778_371_200.25 + i,
                            "request_end_time": 1_778_371_201.25 + i,
                        }
                        for i in range(N)
                    ],
                    "errored": [],
                },
            }
        ],
    }
)
INFERENCE_PERF = json.dumps(
    [
        {
            **{
                "start_time": 1_778_371_200.5 + i,
                "end_time": 1_778_371_203.5 + i,
                "request": "{}",
                "error": None,
            },
            "info": {"input_tokens": 100 + i, "output_tokens": 10 + i, "output_token_times": [1.0, 2.0]},
        }
        for i in range(N)
    ]
)
AIPERF = lines(
    [
        {
            "metadata": {
                **{
                    "session_num": i,
                    "x_request_id": str(i),
                    "worker_id": "w",
                    "benchmark_phase": "profiling",
                },
                "request_start_ns": 1_778_371_200_000_000_000 + i * 1_000_000_000,
                "request_end_ns": 1_778_371_203_000_000_000 + i * 1_000_000_000,
            },
            "metrics": {
                "input_sequence_length": {"value": 100 + i, "unit": "tokens"},
                "output_sequence_length": {"value": 10 + i, "unit": "tokens"},
                "request_latency": {"value": 3000.0, "unit": "ms"},
            },
            "error": None,
        }
        for i in range(N)
    ]
)


@pytest.mark.parametrize(
    ("name", "text", "adapters", "hits"),
    [
        ("azure-2023.csv", AZURE_2023, 0, None),
        ("azure-2024.csv", AZURE_2024, 0, None),
        ("burstgpt.csv", BURSTGPT, 2, None),
        ("mooncake.jsonl", MOONCAKE, 0, 0.49),
        ("bailian.jsonl", BAILIAN, 0, 0.49),
        ("ragpulse.jsonl", RAGPULSE, 0, 0.73),
        ("servegen.jsonl", SERVEGEN, 0, None),
        ("vllm.json", VLLM, 0, None),
        ("guidellm.json", GUIDELLM, 0, None),
        ("inference-perf.json", INFERENCE_PERF, 0, None),
        ("aiperf.jsonl", AIPERF, 0, None),
    ],
)
def test_every_published_layout_is_read_without_options(
    tmp_path: Path, name: str, text: str, adapters: int, hits: float | None
) -> None:
    (tmp_path / name).write_text(text)
    found = observed(tmp_path / name)
    assert (found.requests, found.rows, len(found.adapters)) == (N, N, adapters)
    assert found.duration_s == pytest.approx(N - 1)
    assert sorted(found.prompts.tolist()) == [100 + i for i in range(N)]
    assert sorted(found.outputs.tolist()) == [10 + i for i in range(N)]
    if hits is None:
        assert found.prefix_hit_share is None
    else:
        assert found.prefix_hit_share == pytest.approx(hits, abs=0.01)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (
            [{"request_id": 0, "type": "text", "input_length": 61, "output_length": 2370, "duration": 14000}]
            * 2,
            "timestamp",
        ),
        ([{"pool": "m-large", "client": 1, "t": 600, "requests": 12}] * 2, "prompt_tokens"),
    ],
    ids=["offline batches of ServeGen", "rates of ServeGen"],
)
def test_traces_without_requests_in_time_are_refused_with_their_columns(
    tmp_path: Path, records: list[Mapping[str, Any]], words: str
) -> None:
    (tmp_path / "trace.jsonl").write_text(lines(records))
    with pytest.raises(
        InputError, match=rf"{words}: no column of that name among .*: name it by --map {words}=COLUMN"
    ):
        observed(tmp_path / "trace.jsonl")


def test_runs_of_vllm_bench_without_start_times_or_several_are_refused(tmp_path: Path) -> None:
    run = json.loads(VLLM)
    (tmp_path / "two.json").write_text(VLLM + "\n" + VLLM + "\n")
    with pytest.raises(InputError, match="must be one run, but holds several"):
        observed(tmp_path / "two.json")
    del run["start_times"]
    (tmp_path / "old.json").write_text(json.dumps(run))
    with pytest.raises(InputError, match=r"vLLM 0\.15 or later"):
        observed(tmp_path / "old.json")
