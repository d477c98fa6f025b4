"""Traces in the formats that people publish them in, and requests dealt out to adapters."""

import gzip
import io
import json
import lzma
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError, load_workload
from capplan.spec import TimeUnit, Trace, TraceFormat, WorkloadFile
from capplan.workload import read_length_pairs, read_trace

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


def test_a_stated_format_wins_over_the_columns(tmp_path):
    path = write(tmp_path, "requests.log", MOONCAKE.replace('"hash_ids"', '"turn"'))
    trace = read_trace(path, trace_format=TraceFormat.MOONCAKE, deal=dealt_evenly)
    assert trace.arrival_ns[-1] == 4_000_000_000
    with pytest.raises(InputError, match=r"requests\.log: ContextTokens: column is missing; columns found: "):
        read_trace(path, trace_format=TraceFormat.AZURE, deal=dealt_evenly)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("azure.csv", "ContextTokens", "Context", "azure.csv: ContextTokens: column is missing"),
        ("azure.csv", "18:15:50", "18:15:47", "TIMESTAMP: must be sorted by arrival (row 3)"),
        (
            "azure.csv",
            "2023-11-16 18:15:48.1805900",
            "soon",
            "must be a time such as 2023-11-16 18:15:46.6805900, or all numbers (row 2)",
        ),
        ("azure.csv", "2023-11-16 18:15:48.1805900", "", "TIMESTAMP: must be a time such as"),
        (
            "azure.csv",
            ",3\n",
            ",-1\n",
            "GeneratedTokens: must be whole numbers of tokens from 0 to 16777216 (row 3)",
        ),
        ("trace.jsonl", "1500", "5000", "timestamp: must be sorted by arrival (row 3)"),
        (
            "trace.jsonl",
            '"timestamp": 0',
            '"timestamp": -1',
            "timestamp: must be a finite number >= 0 (row 1)",
        ),
        ("trace.jsonl", "1500", "NaN", "timestamp: must be a finite number >= 0 (row 2)"),
        ("trace.jsonl", "1500", '"x"', "timestamp: must be a number (row 2) (got 'x')"),
        ("trace.jsonl", '"input_length": 20', '"input": 20', "trace.jsonl:2: input_length: is required"),
        ("trace.jsonl", '"output_length": 2,', '"output_length": 2', "trace.jsonl:2: must be JSON: "),
        (
            "trace.jsonl",
            '"output_length": 2',
            '"output_length": 0.5',
            "output_length: must be whole numbers of tokens",
        ),
        (
            "trace.jsonl",
            '{"timestamp": 0',
            '[{"timestamp": 0',
            "trace.jsonl:2: must be JSON: expecting ',' or ']'",
        ),
        (
            "result.json",
            "start_times",
            "starts",
            "start_times: is missing: vllm bench serve writes it since vLLM 0.15",
        ),
        ("result.json", "[107.5, ", "[", "input_lens: must be a list as long as start_times"),
        ("result.json", "107.5", "null", "start_times: must be a number (row 1) (got None)"),
        ("result.json", "107.5", "NaN", "start_times: must be"),
        (
            "result.json",
            "[30, 10",
            "[0, 10",
            "input_lens: must be whole numbers of tokens from 1 to 16777216 (row 1)",
        ),
        ("result.json", "}", "", "result.json:1: must be JSON: "),
        ("named.json", '"a", "b"', '"a"', "lora_modules: must be a list as long as start_times"),
        ("named.json", '"a", "b"', '"a", ""', "lora_modules: must name an adapter (row 1) (got None)"),
        ("requests.csv", "1.5", "5", "arrival_s: must be sorted by arrival (row 3) (got 4)"),
        ("requests.csv", "1.5", "-1", "arrival_s: must be a finite number >= 0 (row 2) (got -1)"),
        ("requests.csv", "1.5", "", "arrival_s: must be a finite number >= 0 (row 2) (got nan)"),
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
            "trace.format: must be 'table', 'azure', 'burstgpt', 'ragpulse', 'bailian', 'mooncake' or 'vllm'",
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


LAYOUTS = {
    TraceFormat.TABLE: ("arrival_s", "prompt_tokens", "output_tokens"),
    TraceFormat.AZURE: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    TraceFormat.BURSTGPT: ("Timestamp", "Request tokens", "Response tokens"),
    TraceFormat.BAILIAN: ("timestamp", "input_length", "output_length"),
    TraceFormat.MOONCAKE: ("timestamp", "input_length", "output_length"),
}
PER_S = {TimeUnit.S: 1, TimeUnit.MS: 10**3, TimeUnit.US: 10**6, TimeUnit.NS: 10**9}


def as_csv(frame, separator, decimal):
    return frame.to_csv(index=False, sep=separator, decimal=decimal).encode("utf-8-sig")


def as_lines(frame):
    return frame.to_json(orient="records", lines=True, double_precision=15).encode()


def as_array(frame):
    return frame.to_json(orient="records", indent=1, double_precision=15).encode()


def as_parquet(frame):
    buffer = io.BytesIO()
    frame.to_parquet(buffer)
    return buffer.getvalue()


WRITERS = {
    "comma": partial(as_csv, separator=",", decimal="."),
    "semicolon": partial(as_csv, separator=";", decimal=","),
    "tab": partial(as_csv, separator="\t", decimal=","),
    "lines": as_lines,
    "array": as_array,
    "parquet": as_parquet,
    "gzip": lambda frame: gzip.compress(as_lines(frame)),
    "xz": lambda frame: lzma.compress(as_csv(frame, "|", ".")),
}


@given(
    gaps_ms=st.lists(st.integers(0, 100_000), min_size=1, max_size=30),
    unit=st.sampled_from(TimeUnit),
    kind=st.sampled_from(list(LAYOUTS)),
    writer=st.sampled_from(list(WRITERS)),
    habits=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    data=st.data(),
)
def test_requests_are_the_same_in_every_format_and_stated_unit(
    tmp_path_factory, gaps_ms, unit, kind, writer, habits, data
):
    renamed, dated, failed = habits
    rows = len(gaps_ms)
    lengths = st.lists(st.integers(1, 9999), min_size=rows, max_size=rows)
    prompts, outputs = data.draw(lengths), data.draw(lengths)
    since_ms = 1_700_000_000_000 if dated and unit is not TimeUnit.S else 500
    times_ms = since_ms + np.cumsum([0, *gaps_ms[1:]])
    times = times_ms / 1000 if unit is TimeUnit.S else times_ms * (PER_S[unit] // 1000)
    names = ("when", "in", "out") if renamed else LAYOUTS[kind]
    frame = pd.DataFrame(dict(zip(names, (times, prompts, outputs), strict=True)))
    if failed:
        frame = pd.concat([frame, frame.tail(1).assign(**{names[2]: 0})], ignore_index=True)
    path = tmp_path_factory.mktemp("trace") / "requests.parquet"  # no format has this ending but one
    path.write_bytes(WRITERS[writer](frame))
    columns = dict(zip(("arrival_s", "prompt_tokens", "output_tokens"), names, strict=True))
    trace = read_trace(
        path, 1e7, kind, deal=dealt_evenly, time_unit=unit, columns=columns if renamed else None
    )
    arrivals_s = (times_ms - (since_ms if since_ms > 500 else 0)) / 1000
    assert trace == Trace.from_arrays(arrivals_s, dealt_evenly(rows), prompts, outputs, 1e7)
    assert any("1 of" in note for note in trace.notes) is failed


def test_a_unit_that_the_values_contradict_is_refused_or_said(tmp_path):
    def lines(times):
        return "".join(MOONCAKE.splitlines()[0].replace(": 0,", f": {time},") + "\n" for time in times)

    path = write(tmp_path, "whole.jsonl", lines(range(60)))
    with pytest.raises(
        InputError, match=r"1 requests per second in seconds or 1e\+03 requests per second in mil"
    ):
        read_trace(path, deal=dealt_evenly)
    assert read_trace(path, deal=dealt_evenly, time_unit=TimeUnit.S).duration_s == 59
    path = write(tmp_path, "dates.jsonl", lines(range(1_700_000_000_000_000, 1_700_000_059_000_000, 10**6)))
    trace = read_trace(path, deal=dealt_evenly)
    assert trace.duration_s == 58
    assert "times are read as microseconds, since they are dates by their size" in trace.notes[0]
    path = write(tmp_path, "mixed.jsonl", lines([1_700_000_000, 1_700_000_001_000]))
    with pytest.raises(InputError, match="must not mix units"):
        read_trace(path, deal=dealt_evenly)
    dates_ms = "arrival_s,prompt_tokens,output_tokens\n1700000000000,1,1\n1700000001000,1,1\n"
    path = write(tmp_path, "named.csv", dates_ms)
    with pytest.raises(InputError, match=r"arrival_s: unit is not clear, .* state trace\.time_unit"):
        read_trace(path, deal=dealt_evenly)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            TABLE.replace("arrival_s", "arrival_ms"),
            "arrival_s: column is missing; columns found: arrival_ms, pro",
        ),
        ("arrival_s;prompt_tokens;output_tokens\n0;1,000;2\n", "prompt_tokens: commas may be decimal"),
        ("arrival_s;prompt_tokens;output_tokens\n0,5;1.000;2\n", "prompt_tokens: must have decimal commas"),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,5,100,20\n",
            ":2: must have as many cells as the header, 3",
        ),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,5,1\n0,5,1,7,8\n",
            ":3: must have as many cells as the header",
        ),
        ("arrival_s,prompt_tokens,output_tokens\n2026-01-01,5,1\n2026-01-02Z,5,1\n", "time zone in all rows"),
        ("arrival_s,prompt_tokens,output_tokens\n9999-01-01,5,1\n", "must be times from 1678 to 2262"),
        ("arrival_s,prompt_tokens,output_tokens\n1,5,0\n", "output_tokens: must be above 0 for at least one"),
        ("arrival_s,prompt_tokens,output_tokens\r1,5,1\r", "must have lines that end with a line feed"),
        ("[]", "must hold at least one request"),
        (
            '{"timestamp": 1}\n{',
            "input_length: column is missing; columns found: timestamp; formats are table, ",
        ),
    ],
)
def test_a_table_that_cannot_be_read_whole_is_refused(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    with pytest.raises(InputError) as caught:
        read_trace(path, deal=dealt_evenly)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["t.csv.gz", "t.jsonl.gz"])
def test_a_packed_file_that_is_cut_is_refused(tmp_path, name):
    text = TABLE + "5,1,1\n" * 9999 if "csv" in name else MOONCAKE + MOONCAKE.splitlines()[2] * 9999
    (tmp_path / name).write_bytes(gzip.compress(text.encode())[:-20])
    with pytest.raises(InputError, match="cannot be read: Compressed file ended"):
        read_trace(tmp_path / name, deal=dealt_evenly)


def test_a_table_of_a_spreadsheet_is_read(tmp_path):
    text = "sep=;\r\n Arrival_S ;PROMPT_TOKENS;output_tokens;;\r\n0,5; 10;1;;\r\n;;;;\r\n1,25;20 ;2;;\r\n"
    trace = read_trace(write(tmp_path, "t.csv", text), deal=dealt_evenly)
    assert trace.arrival_ns.tolist() == [500_000_000, 1_250_000_000]
    assert trace.prompt_tokens.tolist() == [10, 20]


def test_keys_of_a_trace_are_checked(tmp_path):
    write(tmp_path, "t.csv", "when_ms,in,out\n0,1,1\n1500,2,2\n")
    mapping = "columns: {arrival_s: when_ms, prompt_tokens: in, output_tokens: out}"
    w = loaded(tmp_path, WORKLOAD % f"trace: {{file: t.csv, {mapping}}}")
    assert w.trace.duration_s == 1.5
    text = WORKLOAD % "trace: {file: t.csv, time_unti: ms}"
    assert "trace.time_unti: unknown key; did you mean 'time_unit'?" in refusal(tmp_path, text)
    text = WORKLOAD % "trace: {file: t.csv, columns: {arival_s: when_ms}}"
    assert "trace.columns.arival_s: unknown key; did you mean 'arrival_s'?" in refusal(tmp_path, text)
    text = WORKLOAD % "trace: {file: t.csv, time_unit: h}"
    assert "trace.time_unit: must be 's', 'ms', 'us' or 'ns'" in refusal(tmp_path, text)
    pairs = f"requests: {{lengths_from: {{file: t.csv, {mapping}}}}}"
    assert loaded(tmp_path, WORKLOAD % pairs).length_pairs.output_tokens.tolist() == [1, 2]
    keys = WorkloadFile.model_json_schema()["$defs"]["TraceEntry"]["properties"]
    assert {"time_unit", "columns"} <= set(keys)
