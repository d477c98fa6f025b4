"""Files that name too much and files without end are refused before they are built."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from capplan import InputError, Plan, load_profile, load_workload, simulate
from capplan.spec import MAX_SIMULATED_S, InputLimits, limited, parse_json, read_columns, read_text
from capplan.spec import _table_files as table_files
from capplan.workload import read_trace
from tests.cli.examples import MODEL, WORKLOAD, small_plan, write_inputs

COLUMNS = "arrival_s,adapter,prompt_tokens,output_tokens\n"


def workload_of(folder: Path, adapters: str) -> Path:
    lengths = "{prompt_tokens: {mean: 9}, output_tokens: {mean: 9}}"
    head = f"base_model: {MODEL}\nprofile: p\nrequests: {lengths}\n"
    path = folder / "workload.yaml"
    path.write_text(f"{head}adapters:{adapters}\n")
    return path


def test_a_small_file_that_names_100_million_adapters_is_refused_before_they_are_made(tmp_path: Path) -> None:
    entries = "".join(
        f"\n  - {{name: 'n{k}-{{i}}', count: 100000, rank: 8, rate_rps: 0}}" for k in range(1000)
    )
    path = workload_of(tmp_path, entries)
    assert path.stat().st_size < 70_000
    with limited(InputLimits(max_adapters=1000)), pytest.raises(InputError) as caught:
        load_workload(path)
    assert "adapters[0]: must be at most 1,000 adapters; capplan --max-adapters sets another limit" in str(
        caught.value
    )


@pytest.mark.parametrize("count", [10, 11])
def test_the_number_of_adapters_is_that_of_all_entries(tmp_path: Path, count: int) -> None:
    entries = f"\n  - {{name: 'a{{i}}', count: {count - 5}, rank: 8, rate_rps: 1}}"
    path = workload_of(tmp_path, entries + "\n  - {name: 'b{i}', count: 5, rank: 8, rate_rps: 1}")
    with limited(InputLimits(max_adapters=10)):
        if count == 10:
            assert len(load_workload(path).adapters) == 10
        else:
            with pytest.raises(
                InputError, match=r"workload\.yaml:6: adapters\[1\]: must be at most 10 adapters"
            ):
                load_workload(path)


def test_adapters_of_a_table_count_as_well(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name,rank,rate_rps\n" + "".join(f"a{i},8,1\n" for i in range(11)))
    path = workload_of(tmp_path, " a.csv")
    with (
        limited(InputLimits(max_adapters=10)),
        pytest.raises(InputError, match=r"a\.csv: must be at most 10"),
    ):
        load_workload(path)


@pytest.mark.parametrize("replicas", [10_000, 1_000_000_000])
def test_a_plan_of_too_many_instances_is_refused(tmp_path: Path, replicas: int) -> None:
    document = small_plan().model_dump(mode="json")
    document["groups"][0]["replicas"] = replicas
    document["totals"]["gpus"] = replicas + 1
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(
        InputError, match=r"groups: must be at most 10,000 instances; capplan --max-instances"
    ):
        Plan.from_json(tmp_path / "plan.json")
    with limited(InputLimits(max_instances=2_000_000_000)):
        assert Plan.from_json(tmp_path / "plan.json").groups[0].replicas == replicas


def test_keys_of_an_object_take_linear_time() -> None:
    def seconds(keys: int) -> float:
        text = json.dumps({f"key {number}": number for number in range(keys)})
        started_s = time.process_time()
        assert len(parse_json(text, "x.json")) == keys
        return time.process_time() - started_s

    assert seconds(100_000) < 2.0  # 40 s where every key was compared with all others


def test_a_key_that_repeats_at_the_end_is_found() -> None:
    with pytest.raises(InputError, match=r"duplicate key \(got 'k0'\)"):
        parse_json('{"k0": 1, "k1": 2, "k0": 3}', "x.json")


@pytest.mark.parametrize(
    "read", [read_text, lambda path: read_columns(Path(path), ("a",)), lambda p: read_trace(Path(p))]
)
def test_an_endless_device_is_refused(tmp_path: Path, read: Callable[[str], object]) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to("/dev/zero")
    for path in ("/dev/zero", str(link)):
        with pytest.raises(InputError, match="must be a regular file, not a device"):
            read(path)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.jsonl"])
def test_a_line_without_end_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("gz"):
        import gzip

        path.write_bytes(gzip.compress(COLUMNS.encode() + bytes(2**25)))
    else:
        with path.open("wb") as file:
            file.write(b"" if name.endswith("jsonl") else COLUMNS.encode())
            file.truncate(2**33)
    with pytest.raises(InputError, match="line must not be longer than"):
        read_trace(path)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.jsonl"])
def test_a_trace_of_too_many_requests_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    frame = pd.DataFrame(
        {"arrival_s": np.arange(11.0), "adapter": "a", "prompt_tokens": 1, "output_tokens": 1}
    )
    if name.endswith("csv"):
        frame.to_csv(path, index=False)
    elif name.endswith("parquet"):
        frame.to_parquet(path)
    else:
        row = '{"timestamp": 1, "input_length": 1, "output_length": 1}\n'
        path.write_text(row * 11)
    deal = None if "jsonl" not in name else lambda requests: ["a"] * requests
    assert len(read_trace(path, 20.0, deal=deal)) == 11
    with (
        limited(InputLimits(max_trace_rows=10)),
        pytest.raises(InputError, match="must be at most 10 requests"),
    ):
        read_trace(path, 20.0, deal=deal)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_trace_is_the_same_in_parts_of_any_size(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    rows = 50
    names = rng.choice(["b", "a", None, "c"], rows)
    frame = pd.DataFrame(
        {
            "arrival_s": np.sort(rng.random(rows)),
            "adapter": names,
            "prompt_tokens": rng.integers(1, 100, rows),
            "output_tokens": rng.integers(1, 100, rows),
        }
    )
    path = tmp_path / name
    frame.to_csv(path, index=False) if name.endswith("csv") else frame.to_parquet(path)
    whole = read_trace(path, base_model="m")
    monkeypatch.setattr(table_files, "_PART_ROWS", 7)
    parts = read_trace(path, base_model="m")
    assert parts == whole
    assert [parts.names[each] for each in parts.adapter] == [each or "m" for each in names]


def test_more_than_a_year_is_not_simulated_unless_allowed(tmp_path: Path) -> None:
    workload = load_workload(write_inputs(tmp_path))
    profile = load_profile(str(tmp_path / "profile.json"))
    quiet = workload.at_rates_times(0.0)
    for duration_s in (4.62e9, 31_622_401.0):
        with pytest.raises(InputError, match="duration_s: must be at most 31,622,400 seconds"):
            simulate(quiet, profile, a_max=4, duration_s=duration_s)
    with limited(InputLimits(max_duration_s=MAX_SIMULATED_S)):
        assert simulate(quiet, profile, a_max=4, duration_s=MAX_SIMULATED_S).submitted == 0
        with pytest.raises(InputError, match="must be at most 2,000,000,000 seconds"):
            simulate(quiet, profile, a_max=4, duration_s=4.62e9)
    with pytest.raises(InputError, match="must be at least 1e-09 seconds"):
        simulate(quiet, profile, a_max=4, duration_s=1e-300)


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("rate_rps: 0.3", "rate_rps: 1.0e+308", "rate_rps: must be at most 1e+100"),
        ("std: 60", "std: 1.0e+308", "prompt_tokens.std: must be at most"),
        (
            "max_num_seqs: 64",
            "max_num_seqs: 9223372036854775808",
            "engine.max_num_seqs: must be at most 9.0072e+15",
        ),
    ],
)
def test_numbers_that_overflow_are_refused(tmp_path: Path, old: str, new: str, rule: str) -> None:
    assert old in WORKLOAD
    with pytest.raises(InputError) as caught:
        load_workload(write_inputs(tmp_path, WORKLOAD.replace(old, new)))
    assert rule in str(caught.value)


def test_a_list_of_a_million_wrong_items_is_one_error(tmp_path: Path) -> None:
    document = small_plan().model_dump(mode="json") | {"groups": [0] * 1_000_000}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"groups\[0\]: must be a mapping"):
        Plan.from_json(tmp_path / "plan.json")


def test_control_characters_do_not_reach_a_message() -> None:
    error = InputError("must be so", "\x1b[2J", "file\x1b[31m.json: key\x9b")
    assert str(error).isprintable()
    assert len(str(InputError("must be so", location="k" * 2**20))) < 2000
