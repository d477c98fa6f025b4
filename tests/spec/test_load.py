"""Workload files: what they may say, and how each mistake is reported."""

from pathlib import Path

import pandas as pd
import pytest

from capplan import InputError, Lengths, load_workload

WORKLOAD = """\
version: 1
base_model: meta-llama/Llama-3.1-8B-Instruct
engine: {max_num_seqs: 256, max_model_len: 8192}
requests:
  prompt_tokens: {mean: 223, std: 245}
  output_tokens: {mean: 194, std: 206}
slo: {ttft_p99_s: 5.0, tpot_p99_ms: 150}
adapters:
  - {name: "support-{i}", count: 64, rank: 8, rate_rps: 0.05, path: "s3://b/{i}"}
  - name: legal
    rank: 32
    rate_rps: 0.8
    pool: big
  - {name: medical, rank: 16, rate_rps: 0.4, apart_from: [legal], together_with: [support-0]}
pools:
  - {name: big, profile: h100-64g/llama-3.1-8b/vllm-0.8.5, count: 2, usd_per_hour: 4.1}
  - {name: small, profile: ./mine.json, count: 8, usd_per_hour: 1.2}
previous_plan: yesterday.json
"""

SMALL = """\
base_model: m
profile: p
requests: {prompt_tokens: {mean: 10}, output_tokens: {mean: 5}}
adapters: %s
"""

TRACED = "base_model: m\nprofile: p\ntrace: {file: requests.csv, ranks: ranks.csv, duration_s: 10}\n"


def write(folder: Path, text: str, name: str = "workload.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    """The message, with the folder cut off."""
    with pytest.raises(InputError) as caught:
        load_workload(path)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{path.parent}/", "")


def test_the_documented_file_becomes_a_workload(tmp_path):
    w = load_workload(write(tmp_path, WORKLOAD))
    assert len(w.adapters) == 66
    assert (w.adapters[63].name, w.adapters[63].path) == ("support-63", "s3://b/63")
    assert w.adapters[65].together_with == ("support-0",)
    assert w.total_rate_rps == pytest.approx(64 * 0.05 + 1.2)
    assert w.pools[0].profile == "h100-64g/llama-3.1-8b/vllm-0.8.5"
    assert w.engine.max_num_seqs == 256
    assert w.engine.max_loras is None


def test_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    write(tmp_path, WORKLOAD)
    w = load_workload(tmp_path / "workload.yaml")
    assert w.pools[1].profile == str(tmp_path / "mine.json")
    assert w.previous_plan == str(tmp_path / "yesterday.json")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, WORKLOAD.replace("./mine.json", "./folder/mine"))
    assert load_workload("workload.yaml").pools[1].profile == "./folder/mine"


def test_the_digest_does_not_depend_on_the_folder(tmp_path):
    (tmp_path / "other").mkdir()
    here, there = write(tmp_path, WORKLOAD), write(tmp_path / "other", WORKLOAD)
    assert load_workload(here).digest() == load_workload(there).digest()


MISTAKES = {
    "rate_rps: 0.8": {
        "rate_rps: -3": "12: adapters[1].rate_rps: must be a finite number >= 0 (got -3)",
        "rate_rps: 1e999": "12: adapters[1].rate_rps: must be a finite number >= 0 (got inf)",
        "rate_rsp: 1": "12: adapters[1].rate_rsp: unknown key; did you mean 'rate_rps'?",
        "max_replicas: 1": "10: adapters[1].rate_rps: is required",
    },
    "rank: 32": {"rank: 32.5": "11: adapters[1].rank: must be a whole number from 1 to 512 (got 32.5)"},
    "pool: big": {"pool: bag": "13: adapters[1].pool: must be the name of a pool (got 'bag')"},
    "[legal]": {"[lawful]": "14: adapters[2].apart_from[0]: must name another adapter"},
    "name: legal": {
        "name: support-7": "10: adapters[1].name: must be unique (got 'support-7')",
        "name: 12": "10: adapters[1].name: must be a name of 1 to 256 characters that begins",
    },
    '"support-{i}"': {
        "support": "9: adapters[0].name: must contain {i}, so that names differ (got 'support')"
    },
    "count: 64, ": {"": "9: adapters[0].name: goes with count, which is absent (got 'support-{i}')"},
    "version: 1": {
        "version: 2": "1: version: must be 1 (got 2)",
        "{": "3: must be YAML: ",
        "zebra: 1": "1: zebra: unknown key; valid keys are base_model, ",
        "profile: x": "15: pools: replaces profile and gpus: give one or the other",
        "engine: {}": "3: duplicate key 'engine'",
        "trace: {file: a, ranks: b}": "1: must give adapters or trace, one of the two",
        "? [a]\n: b": "1: a key must be text",
        "version: !!int 1": "1: must not carry the tag",
    },
    "base_model:": {"base_modle:": "2: base_modle: unknown key; did you mean 'base_model'?"},
    "mean: 223": {
        "mean: on": "5: requests.prompt_tokens.mean: must be a number of tokens",
        "file: x": "5: requests.prompt_tokens.std: unknown key; valid keys are file, column",
    },
    "  prompt_tokens: {mean: 223, std: 245}\n": {"": "4: requests.prompt_tokens: is required"},
    "{max_num_seqs: 256": {
        "{max_lora_rank: 16": "11: adapters[1].rank: must not exceed engine.max_lora_rank, which is 16"
    },
    "usd_per_hour: 4.1": {
        "usd_per_hours: 4.1": "16: pools[0].usd_per_hours: unknown key; did you mean 'usd_per_hour'?"
    },
    "slo: {": {"slo: {ttft_p97_s: 1, ": "7: slo.ttft_p97_s: unknown key; did you mean 'ttft_p9"},
}
"""Texts of the file, others in their place, and the messages behind the name of the file."""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [(old, new, message) for old, others in MISTAKES.items() for new, message in others.items()],
)
def test_a_mistake_is_reported_with_line_key_rule_and_value(tmp_path, old, new, message):
    assert old in WORKLOAD
    assert refusal(write(tmp_path, WORKLOAD.replace(old, new, 1))).startswith(f"workload.yaml:{message}")


def test_numbers_are_read_as_yaml_1_2_reads_them(tmp_path):
    """YAML 1.1 would read 1e-3 as text, 010 as eight, 12:30 as 750 and on as true."""
    text = SMALL % "[{name: on, rank: 010, rate_rps: 1e-3}, {name: 12:30, rank: 8, rate_rps: .5}]"
    first, second = load_workload(write(tmp_path, text)).adapters
    assert (first.name, first.rank, first.rate_rps) == ("on", 10, 1e-3)
    assert (second.name, second.rate_rps) == ("12:30", 0.5)


def test_aliases_share_values(tmp_path):
    text = SMALL % "[{name: a, rank: 8, rate_rps: 1, prompt_tokens: &p {mean: 9}, output_tokens: *p}]"
    assert load_workload(write(tmp_path, text)).adapters[0].output_tokens == Lengths(mean=9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "workload.yaml: must be a mapping of keys to values"),
        (b"- 3", "workload.yaml:1: must be a mapping of keys to values"),
        (b"a: 1\nb: \xff", "workload.yaml:2: must be UTF-8 text"),
        (b"a: \x00", "workload.yaml: must be YAML: "),
        (b"[" * 100_000, "workload.yaml:1: must not be nested more than"),
        (b"a: &a [*a]", "workload.yaml:1: alias *a has no anchor before it"),
        (b"a: 1\n---\nb: 2\n", "workload.yaml:2: must be a single YAML document"),
        (b"x" * (64 * 2**20 + 1), "workload.yaml: must not be larger than 64 MiB"),
    ],
)
def test_a_file_that_is_no_workload_is_refused_on_one_line(tmp_path, content, message):
    path = tmp_path / "workload.yaml"
    path.write_bytes(content)
    assert refusal(path).startswith(message)


def test_aliases_cannot_exhaust_memory(tmp_path):
    lines = ["a0: &a0 [" + "x," * 50 + "]"]
    lines += [f"a{i}: &a{i} [" + f"*a{i - 1}," * 50 + "]" for i in range(1, 9)]
    assert "aliases included" in refusal(write(tmp_path, "\n".join(lines)))


def test_a_missing_file_and_a_folder_are_refused_on_one_line(tmp_path):
    assert refusal(tmp_path / "nowhere.yaml") == "nowhere.yaml: cannot be read: No such file or directory"
    assert "must be a regular file, not a directory" in refusal(tmp_path)


def test_adapters_come_from_a_csv_file(tmp_path):
    write(tmp_path, "name,rank,rate_rps,path\na,8,1e-2,s3://x\n12,16,0,\n", "adapters.csv")
    a, b = load_workload(write(tmp_path, SMALL % "adapters.csv")).adapters
    assert (a.name, a.rank, a.rate_rps, a.path) == ("a", 8, 0.01, "s3://x")
    assert (b.name, b.rank, b.rate_rps, b.path) == ("12", 16, 0.0, None)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("name,rank\na,8\n", "adapters.csv: rate_rps: column is missing"),
        ("name,rank,rate_rps,rnak\na,8,1,1\n", "adapters.csv:1: rnak: unknown column; did you mean 'rank'?"),
        ("name,rank,rate_rps,rank\na,8,1,1\n", "adapters.csv: rank: column must not repeat"),
        (
            "name,rank,rate_rps\na,8,1\nb,8,nan\n",
            "adapters.csv:3: rate_rps: must be a finite number >= 0 (got 'nan')",
        ),
        ("name,rank,rate_rps\na,8,1\na,8,1\n", "adapters.csv:3: name: must be unique (got 'a')"),
        ("name,rank,rate_rps\na,8\n", "adapters.csv:2: rate_rps: must be a finite number >= 0"),
        ("name,rank,rate_rps\na,8,1,1\n", "adapters.csv:2: must have as many cells as the header, 3"),
        ("name,rank,rate_rps\n,8,1\n", "adapters.csv:2: name: must be a name"),
        ('name,rank,rate_rps\n"a,8,1\n', "adapters.csv: must be CSV: "),
        ("name,rank,rate_rps\n", "adapters.csv: must hold at least one adapter"),
        ("", "adapters.csv: must not be empty: it has no header"),
    ],
)
def test_a_mistake_in_the_csv_file_is_reported_there(tmp_path, table, message):
    write(tmp_path, table, "adapters.csv")
    assert refusal(write(tmp_path, SMALL % "adapters.csv")).startswith(message)


def test_a_missing_csv_file_is_reported(tmp_path):
    assert (
        refusal(write(tmp_path, SMALL % "gone.csv")) == "gone.csv: cannot be read: No such file or directory"
    )


REQUESTS = "arrival_s,adapter,prompt_tokens,output_tokens\n0.5,a,10,1\n1,7,20,2\n4.25,a,30,3\n"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_trace_gives_adapters_rates_and_lengths(tmp_path, suffix):
    path = write(tmp_path, REQUESTS, "requests.csv")
    if suffix == "parquet":
        pd.read_csv(path, dtype={"adapter": str}).to_parquet(tmp_path / "requests.parquet")
    write(tmp_path, "name,rank\n7,16\na,8\nidle,4\n", "ranks.csv")
    w = load_workload(write(tmp_path, TRACED.replace("requests.csv", f"requests.{suffix}")))
    assert [(a.name, a.rank, a.rate_rps) for a in w.adapters] == [
        ("7", 16, 0.1),
        ("a", 8, 0.2),
        ("idle", 4, 0.0),
    ]
    assert w.trace.arrival_ns.tolist() == [500_000_000, 1_000_000_000, 4_250_000_000]
    assert w.prompt_tokens == Lengths(values=(10, 20, 30), counts=(1, 1, 1))
    assert w.adapters[1].output_tokens == Lengths(values=(1, 3), counts=(1, 1))


RANKS = "name,rank\na,8\n7,8\n"


@pytest.mark.parametrize(
    ("requests", "ranks", "message"),
    [
        (REQUESTS.replace("arrival_s", "time"), RANKS, "requests.csv: arrival_s: column is missing"),
        (REQUESTS, "name,rank\na,8\n", "ranks.csv: name: must give a rank for every adapter of the trace"),
        (REQUESTS, "name\na\n", "ranks.csv: rank: column is missing"),
        (REQUESTS.replace("30", "0"), RANKS, "requests.csv: prompt_tokens: must be whole numbers"),
        (REQUESTS.replace("30", ""), RANKS, "requests.csv: prompt_tokens: must be whole numbers"),
        (REQUESTS.replace("4.25", "x"), RANKS, "requests.csv: arrival_s: must be a number (row 3) (got 'x')"),
        (REQUESTS.replace("4.25", "40"), RANKS, "requests.csv: duration_s: must be above 0 and not end"),
        ("", RANKS, "requests.csv: must not be empty: it has no header"),
    ],
)
def test_a_mistake_in_a_trace_is_reported_there(tmp_path, requests, ranks, message):
    write(tmp_path, requests, "requests.csv")
    write(tmp_path, ranks, "ranks.csv")
    assert refusal(write(tmp_path, TRACED)).startswith(message)


def test_a_trace_and_lengths_do_not_go_together(tmp_path):
    text = TRACED + "requests: {prompt_tokens: {mean: 3}}\n"
    assert refusal(write(tmp_path, text)).startswith(
        "workload.yaml:4: requests.prompt_tokens: does not go with trace"
    )


def test_a_parquet_file_that_is_none_is_reported(tmp_path):
    write(tmp_path, "no parquet", "requests.parquet")
    text = TRACED.replace("requests.csv", "requests.parquet")
    assert refusal(write(tmp_path, text)).startswith(
        "requests.parquet: arrival_s: column is missing; columns found: no parquet"
    )
    write(tmp_path, "PAR1 no parquet", "requests.parquet")
    assert refusal(write(tmp_path, text)).startswith("requests.parquet: cannot be read: ")


def test_lengths_come_from_a_column_of_a_file(tmp_path):
    write(tmp_path, "n,other\n5,x\n3,y\n5,z\n", "lengths.csv")
    text = SMALL.replace("{mean: 10}", "{file: lengths.csv, column: n}") % "[{name: a, rank: 8, rate_rps: 1}]"
    assert load_workload(write(tmp_path, text)).prompt_tokens == Lengths(values=(3, 5), counts=(1, 2))
    assert (
        refusal(write(tmp_path, text.replace("column: n", "column: m")))
        == "lengths.csv: m: column is missing; columns found: n, other, separated by ','"
    )
    assert refusal(write(tmp_path, text.replace("column: n", "column: other"))).startswith(
        "lengths.csv: other: must be"
    )
    write(tmp_path, "n\n5\n0\n", "lengths.csv")
    assert refusal(write(tmp_path, text)).startswith("lengths.csv: n: must be a whole number of tokens")


def test_profile_or_pools_is_required(tmp_path):
    text = (SMALL % "[{name: a, rank: 8, rate_rps: 1}]").replace("profile: p\n", "")
    assert refusal(write(tmp_path, text)).startswith(
        "workload.yaml:1: profile: is required, unless pools are given"
    )
