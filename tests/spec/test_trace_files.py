"""Traces in the formats that people publish them in, and requests dealt out to adapters."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from capplan import InputError, load_workload
from capplan.spec import TraceFormat, read_length_pairs, read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"

TABLE = "arrival_s,prompt_tokens,output_tokens\n0,10,1\n1.5,20,2\n4,30,3\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,10,1\n2023-11-16 18:15:48.1805900,20,2\n2023-11-16 18:15:50.6805900,30,3\n"
)
MOONCAKE = "".join(
    json.dumps({"timestamp": ms, "input_length": 10 * i, "output_length": i, "hash_ids": [1, 2]}) + "\n"
    for i, ms in ((1, 0), (2, 1500), (3, 4000))
)
RESULT = {
    "date": "20260101-000000",
    "completed": 3,
    "start_times": [107.5, 103.5, 105.0, 106.0],
    "input_lens": [30, 10, 20, 99],
    "output_lens": [3, 1, 2, 0],
    "ttfts": [0.1, 0.1, 0.1, 0.0],
    "itls": [[0.1, 0.1], [], [0.1], []],
    "errors": ["", "", "", "timeout"],
}
FILES = {
    "requests.csv": TABLE,
    "azure.csv": AZURE,
    "trace.jsonl": MOONCAKE,
    "result.json": json.dumps(RESULT),
    "named.json": json.dumps(RESULT | {"lora_modules": list("abcd")}),
}


def dealt_evenly(requests):
    return [f"a{i % 2}" for i in range(requests)]


def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", FILES)
def test_every_format_holds_the_same_requests(tmp_path, name):
    trace = read_trace(write(tmp_path, name, FILES[name]), deal=dealt_evenly)
    assert trace.arrival_ns.tolist() == [0, 1_500_000_000, 4_000_000_000]
    assert trace.prompt_tokens.tolist() == [10, 20, 30]
    assert trace.output_tokens.tolist() == [1, 2, 3]
    names = [trace.names[position] for position in trace.adapter]
    assert names == (["b", "c", "a"] if name == "named.json" else ["a0", "a1", "a0"])


def test_the_format_can_be_told(tmp_path):
    path = write(tmp_path, "requests.log", MOONCAKE)
    assert len(read_trace(path, trace_format=TraceFormat.MOONCAKE, deal=dealt_evenly)) == 3
    with pytest.raises(InputError, match=r"requests\.log: "):
        read_trace(path, deal=dealt_evenly)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("azure.csv", "ContextTokens", "Context", "azure.csv: ContextTokens: column is missing"),
        ("azure.csv", "18:15:50", "18:15:47", "TIMESTAMP: must be sorted by arrival (row 3)"),
        (
            "azure.csv",
            "2023-11-16 18:15:48.1805900",
            "soon",
            "must be a time such as 2023-11-16 18:15:46.6805900 (row 2)",
        ),
        ("azure.csv", "2023-11-16 18:15:48.1805900", "", "TIMESTAMP: must be a time such as"),
        (
            "azure.csv",
            ",3\n",
            ",0\n",
            "GeneratedTokens: must be whole numbers of tokens from 1 to 16777216 (row 3)",
        ),
        ("trace.jsonl", "1500", "5000", "timestamp: must be sorted by arrival (row 3)"),
        (
            "trace.jsonl",
            '"timestamp": 0',
            '"timestamp": -1',
            "timestamp: must be finite seconds >= 0 (row 1)",
        ),
        ("trace.jsonl", "1500", "NaN", "timestamp: must be finite seconds >= 0 (row 2)"),
        ("trace.jsonl", "1500", '"x"', "trace.jsonl:2: timestamp: must be a number (got 'x')"),
        ("trace.jsonl", '"input_length": 20', '"input": 20', "trace.jsonl:2: input_length: is required"),
        ("trace.jsonl", '"output_length": 2,', '"output_length": 2', "trace.jsonl:2: must be JSON: "),
        (
            "trace.jsonl",
            '"output_length": 2',
            '"output_length": 0',
            "output_length: must be whole numbers of tokens",
        ),
        ("trace.jsonl", '{"timestamp": 0', '[{"timestamp": 0', "trace.jsonl:1: must be JSON"),
        (
            "result.json",
            "start_times",
            "starts",
            "start_times: is required: run vllm bench serve with --save-",
        ),
        ("result.json", "[107.5, ", "[", "input_lens: must be a list as long as start_times"),
        ("result.json", "107.5", "null", "start_times: must be a number (row 1) (got None)"),
        ("result.json", "107.5", "NaN", "start_times: must be"),
        (
            "result.json",
            '"timeout"',
            '""',
            "output_lens: must be whole numbers of tokens from 1 to 16777216 (row 3)",
        ),
        ("result.json", "}", "", "result.json: must be JSON: "),
        ("named.json", '"a", "b"', '"a"', "lora_modules: must be a list as long as start_times"),
        ("named.json", '"a", "b"', '"a", ""', "lora_modules: must name an adapter (row 1) (got '')"),
        ("requests.csv", "1.5", "5", "arrival_s: must be sorted by arrival (row 3) (got 4.0)"),
        ("requests.csv", "1.5", "-1", "arrival_s: must be finite seconds >= 0 (row 2) (got -1.0)"),
        ("requests.csv", "1.5", "", "arrival_s: must be finite seconds >= 0 (row 2) (got nan)"),
    ],
)
def test_a_mistake_is_reported_with_file_column_and_row(tmp_path, name, old, new, message):
    assert old in FILES[name]
    path = write(tmp_path, name, FILES[name].replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        read_trace(path, deal=dealt_evenly)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["gone.csv", "gone.parquet", "gone.jsonl", "gone.json"])
def test_a_missing_file_is_reported(tmp_path, name):
    with pytest.raises(InputError, match=f"{name}: cannot be read: "):
        read_trace(tmp_path / name, deal=dealt_evenly)


def test_a_trace_without_adapters_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"requests\.csv: adapter: column is missing; give adapters beside"):
        read_trace(write(tmp_path, "requests.csv", TABLE))


def test_times_are_scaled_to_a_rate(tmp_path):
    path = write(tmp_path, "requests.csv", TABLE)
    trace = read_trace(path, 6.0, rate_rps=1.0, deal=dealt_evenly)
    assert trace.duration_s == 3.0
    assert trace.arrival_ns.tolist() == [0, 750_000_000, 2_000_000_000]


@pytest.mark.parametrize("name", FILES)
def test_length_pairs_come_from_every_format(tmp_path, name):
    pairs = read_length_pairs(write(tmp_path, name, FILES[name]))
    rows = set(zip(pairs.prompt_tokens.tolist(), pairs.output_tokens.tolist(), strict=True))
    assert rows == {(10, 1), (20, 2), (30, 3)}


def test_length_pairs_need_no_arrivals(tmp_path):
    path = write(tmp_path, "pairs.csv", "prompt_tokens,output_tokens\n5,6\n")
    assert read_length_pairs(path).output_tokens.tolist() == [6]
    with pytest.raises(InputError, match=r"pairs\.csv: prompt_tokens: must hold at least one request"):
        read_length_pairs(write(tmp_path, "pairs.csv", "prompt_tokens,output_tokens\n"))


WORKLOAD = """\
base_model: m
profile: p
%s
adapters:
  - {name: a, rank: 8, rate_rps: 3}
  - {name: b, rank: 16, rate_rps: 1}
"""


def loaded(folder, text):
    return load_workload(write(folder, "workload.yaml", text))


def refusal(folder, text):
    with pytest.raises(InputError) as caught:
        loaded(folder, text)
    return str(caught.value)


def test_requests_are_dealt_out_by_rates_and_the_same_way_for_a_seed(tmp_path):
    table = pd.DataFrame({"arrival_s": np.arange(4000.0), "prompt_tokens": 5, "output_tokens": 6})
    table.to_parquet(tmp_path / "requests.parquet")
    text = WORKLOAD % "trace: {file: requests.parquet, duration_s: 4000, rate_rps: 8, seed: %d}"
    w = loaded(tmp_path, text % 0)
    a, b = w.adapters
    assert w.total_rate_rps == pytest.approx(8)
    assert a.rate_rps == pytest.approx(6, abs=0.3)
    assert (a.rank, b.rank) == (8, 16)
    assert w.trace.duration_s == 500
    assert loaded(tmp_path, text % 0).trace == w.trace
    assert loaded(tmp_path, text % 1).trace != w.trace


def test_adapters_beside_a_trace_that_names_them_give_the_ranks(tmp_path):
    write(tmp_path, "t.csv", "arrival_s,adapter,prompt_tokens,output_tokens\n0,b,1,1\n10,b,1,1\n")
    w = loaded(tmp_path, WORKLOAD % "trace: {file: t.csv}")
    assert [(x.name, x.rank, x.rate_rps) for x in w.adapters] == [("a", 8, 0.0), ("b", 16, 0.2)]


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("trace: {file: t.csv, ranks: r.csv}", "must give adapters or trace, one of the two"),
        (
            "trace: {file: t.csv, format: excel}",
            "trace.format: must be 'table', 'azure', 'mooncake' or 'vllm'",
        ),
        ("trace: {file: t.csv, rate_rps: 0}", "trace.rate_rps: must be a finite number > 0 (got 0"),
        ("trace: {file: t.csv, rate_rps: 1e-12}", "t.csv: rate_rps: makes the recording too long"),
        ("trace: {file: t.csv}", "t.csv: adapter: must be the name of one of adapters (got 'z')"),
        (
            "trace: {file: t.csv}\nrequests: {arrivals: deterministic}",
            "requests.arrivals: does not go with trace",
        ),
        (
            "trace: {file: t.csv}\nrequests: {lengths_from: t.csv}",
            "requests.lengths_from: does not go with trace",
        ),
    ],
)
def test_a_mistake_in_the_workload_file_is_reported(tmp_path, trace, message):
    write(tmp_path, "t.csv", "arrival_s,adapter,prompt_tokens,output_tokens\n0,b,1,1\n10,z,1,1\n")
    assert message in refusal(tmp_path, WORKLOAD % trace)


def test_rates_of_zero_and_own_lengths_do_not_go_with_dealing(tmp_path):
    write(tmp_path, "t.csv", TABLE)
    text = WORKLOAD.replace("rate_rps: 3", "rate_rps: 0").replace("rate_rps: 1", "rate_rps: 0")
    assert "adapters: must have a rate above 0" in refusal(tmp_path, text % "trace: {file: t.csv}")
    text = WORKLOAD.replace("rate_rps: 1", "rate_rps: 1, prompt_tokens: {mean: 3}") % "trace: {file: t.csv}"
    assert "workload.yaml:6: adapters[1].prompt_tokens: does not go with trace" in refusal(tmp_path, text)
    text = "base_model: m\nprofile: p\ntrace: {file: t.csv}\n"
    assert "workload.yaml:3: trace.ranks: is required, unless adapters are given" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (
            "{lengths_from: p.csv, length_correlation: 0.5}",
            "length_correlation: does not go with lengths_from",
        ),
        ("{lengths_from: p.csv, prompt_tokens: {mean: 3}}", "prompt_tokens: does not go with lengths_from"),
        (
            "{lengths_from: {file: p.csv, fromat: azure}}",
            "lengths_from.fromat: unknown key; did you mean 'format'?",
        ),
        (
            "{lengths_from: {file: p.csv, scale: 0}}",
            "lengths_from.scale: must be a finite number > 0 (got 0)",
        ),
        (
            "{lengths_from: {file: p.csv, scale: 1.0e+12}}",
            "lengths_from.scale: must be whole numbers of tokens",
        ),
        ("{lengths_from: 3}", "lengths_from: must be a mapping"),
        ("{lengths_from: gone.csv}", "gone.csv: cannot be read: No such file"),
        ("{prompt_tokens: {mean: 3}}", "requests.output_tokens: is required"),
    ],
)
def test_a_mistake_in_lengths_from_is_reported(tmp_path, requests, message):
    write(tmp_path, "p.csv", "prompt_tokens,output_tokens\n5,6\n")
    assert message in refusal(tmp_path, WORKLOAD % f"requests: {requests}")


def test_scaled_pairs_stay_pairs_of_at_least_one_token(tmp_path):
    write(tmp_path, "p.csv", "prompt_tokens,output_tokens\n5,6\n100,1\n")
    pairs = loaded(tmp_path, WORKLOAD % "requests: {lengths_from: {file: p.csv, scale: 0.25}}").length_pairs
    assert (pairs.prompt_tokens.tolist(), pairs.output_tokens.tolist()) == ([1, 25], [2, 1])


@pytest.mark.parametrize("name", ["azure_llm_2023_conv", "azure_llm_2023_code", "mooncake_conversation"])
def test_public_traces_are_read(name):
    path = TRACES / f"{name}.parquet"
    if not path.is_file():
        pytest.skip("no ../shared/traces beside the checkout: public traces are not at hand")
    trace = read_trace(path, deal=dealt_evenly)
    assert len(trace) == len(pd.read_parquet(path))
