"""From a log to a workload that repeats it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capplan import InputError, load_workload
from capplan.observe import fit_report
from capplan.workload import draw_requests
from tests.cli.conftest import Run, error_line, run
from tests.observe.logs import MODEL, PROFILE, day_log, observed

__all__ = ["run"]


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "access.csv"
    day_log(path, 300_000)
    return path


def test_the_workload_of_a_day_repeats_the_day(day: Path, tmp_path: Path) -> None:
    found = observed(day)
    (workload, *_) = found.write(tmp_path / "w.yaml")
    report = fit_report(found, workload)
    errors = {row.what: abs(row.error) for row in report.rows}
    assert errors.pop("requests of the busiest minute") < 0.1
    assert max(errors.values()) < 0.03
    assert report.worst("hours") < 0.04  # 5,000 requests of the quietest hours are within 3 % on their own
    assert report.worst("shares") < 0.05
    assert found.requests + sum(each.rows for each in found.dropped) == found.rows
    (failed,) = found.dropped
    assert failed.reason == "failed, by its status"
    assert "| 500" in failed.example
    lengths = [np.corrcoef(np.log(p), np.log(o))[0, 1] for p, o in [(found.prompts, found.outputs)]]
    assert lengths[0] == pytest.approx(0.4, abs=0.05)  # pairs are kept


def test_rows_are_requests_whatever_the_packing_the_order_and_the_form(day: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    table = pa.csv.read_csv(day).slice(0, 4000)
    rows = table.to_pylist()
    lines = day.read_text().splitlines(keepends=True)[:4001]
    files = {
        "plain.csv": "".join(lines).encode(),
        "reversed.csv": "".join([lines[0], *reversed(lines[1:])]).encode(),
        "excel.csv": "".join(["sep=;\n", *(line.replace(",", ";") for line in lines)])
        .replace("\n", "\r\n")
        .encode(),
        "semicolons.csv": "".join(line.replace(",", ";") for line in lines).encode(),
        "utf-16.csv": "".join(lines).encode("utf-16"),
        "bom.csv": b"\xef\xbb\xbf" + "".join(lines).encode(),
        "log.jsonl": "".join(json.dumps(row, default=str) + "\n" for row in rows).encode(),
        "array.json": json.dumps(rows, default=str).encode(),
        "nested.jsonl": "".join(
            json.dumps(
                {
                    "meta": {"time": str(row["time"]), "model": row["model"]},
                    "usage": {k: row[k] for k in ("prompt_tokens", "completion_tokens")},
                    "status": row["status"],
                }
            )
            + "\n"
            for row in rows
        ).encode(),
    }
    packed = {f"{name}.gz": gzip.compress(content) for name, content in files.items() if "." in name}
    packed["log.jsonl.zst"] = pa.compress(files["log.jsonl"], "zstd", asbytes=True)
    results = set()
    for name, content in (files | packed).items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(table, tmp_path / "log.parquet")
    for path in sorted(tmp_path.iterdir()):
        found = observed(path)
        names = tuple((each.name, each.requests) for each in found.adapters)
        start = None if found.start is None else found.start.isoformat()
        results.add((found.requests, round(found.duration_s, 3), start, names))
    assert len(results) == 1


def test_the_same_log_gives_the_same_files(day: Path) -> None:
    first, second = (observed(day).files("w") for _ in range(2))
    assert first[".yaml"] == second[".yaml"]


@pytest.mark.long
def test_windows_scales_and_time_zones(day: Path, tmp_path: Path) -> None:
    whole, evening = observed(day), observed(day, window="2026-05-10T18:00..2026-05-10T20:00")
    assert evening.duration_s == pytest.approx(7200)
    assert evening.start is not None
    assert evening.start.hour == 18
    last = observed(day, window="6h")
    assert last.duration_s == pytest.approx(6 * 3600)
    double = observed(day, scale=2.0)
    assert double.rate_rps == pytest.approx(2 * whole.rate_rps)
    assert sum(each.rate_rps for each in double.adapters) == pytest.approx(double.rate_rps)
    local = tmp_path / "local.csv"
    local.write_text(
        "time,prompt_tokens,output_tokens\n" + "2026-07-01 12:00:00,5,5\n2026-07-01 12:10:00,5,5\n"
    )
    assert observed(local, timezone="Europe/Berlin").start.hour == 10  # type: ignore[union-attr]
    for bad in ("noon", "0h", "2026-05-10T20:00..2026-05-10T18:00", "2030-01-01..2030-01-02"):
        with pytest.raises(InputError, match="window"):
            observed(day, window=bad)


def write(tmp_path: Path, text: str, name: str = "log.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def rows(times: list[Any], header: str = "ts,prompt_tokens,output_tokens,adapter") -> str:
    return "\n".join([header, *(f"{at},100,20,a{i % 3}" for i, at in enumerate(times))]) + "\n"


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ([1_778_371_200 + 30 * i for i in range(40)], 1170),
        ([1_778_371_200_000 + 30_000 * i for i in range(40)], 1170),
        ([1_778_371_200_000_000 + 30_000_000 * i for i in range(40)], 1170),
        ([1_778_371_200_000_000_000 + 30_000_000_000 * i for i in range(40)], 1170),
        ([1_778_371_200 + 30 * i if i % 2 else 1_778_371_200_000 + 30_000 * i for i in range(40)], 1170),
        ([0.5 + 0.31 * i for i in range(400)], 123.69),
        ([f"10/May/2026:13:{i:02d}:00 +0200" for i in range(40)], 2340),
        ([f"10.05.2026 13:{i:02d}" for i in range(40)], 2340),
        ([f"2026-05-10T13:{i:02d}:00.1234567Z" for i in range(40)], 2340),
        ([f"05/31/2026 13:{i:02d}:00" for i in range(40)], 2340),
        ([f"31/05/2026 13:{i:02d}:00" for i in range(40)], 2340),
    ],
)
def test_times_are_read_by_their_form_and_size(tmp_path: Path, times: list[Any], seconds: float) -> None:
    found = observed(write(tmp_path, rows(times)))
    assert found.requests == len(times)
    assert found.duration_s == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must not be empty"),
        ("just text\nand more\n", "must have several columns"),
        ("1,2,3\n4,5,6\n", "must name its columns"),
        ("a,b,c\n1,2,3\n", "timestamp: no column of that name among a, b, c"),
        ("time,prompt_tokens\n1,2\n", "output_tokens: no column of that name among time, prompt_tokens"),
        (
            rows(["yesterday"] * 5),
            r"no time of arrival that can be read, such as yesterday \| 100 \| 20 \| a0",
        ),
        ("ts,prompt_tokens,output_tokens\n1,x,2\n", "prompt tokens are no whole number"),
        (rows([0, 1, 2, 3, 2_000_000_000]), "must be dates in all rows or in none"),
        (rows([20 * i for i in range(2000)]), "unit is not clear"),
        (
            rows(list(range(100_000)), "start_ns,prompt_tokens,output_tokens,adapter"),
            "unit is not clear",
        ),
        (rows([f"05/06/2026 13:{i:02d}:00" for i in range(9)]), "which is the day and which the month"),
        (rows(["2026-05-10 10:00:00"] * 3), "one moment has no rate"),
        ("{\n", "must be JSON"),
        ("[1, 2]", "must hold records"),
        ('{"a": 1}\n{"a": 2}\n', "timestamp: no column of that name among a"),
        (b"PK\x03\x04rest", "ZIP"),
        ("time,prompt_tokens,output_tokens\n1,5,5\n".encode("utf-16-le"), "zero bytes"),
        ("1780272000,5,5\n1780272001,5,5\n", "first line, which holds values"),
        ("time,prompt_tokens,output_tokens\n1," + "5" * 2**23 + ",5\n", "longer than 4 MiB"),
    ],
    ids=range(19),
)
def test_files_that_are_no_log_are_refused_in_one_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InputError, match=words) as refused:
        observed(path)
    assert "\n" not in str(refused.value)


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(rows(list(range(9))).encode())[:40])
    with pytest.raises(InputError, match="cannot be read"):
        observed(tmp_path / "log.csv.gz")


def test_odd_rows_are_counted_by_reason_with_an_example(tmp_path: Path) -> None:
    lines = [
        "time,prompt_tokens,completion_tokens,model,error",
        *(f"2026-05-10 10:{i:02d}:00,10,5,ok," for i in range(30)),
        "2026-05-10 10:31:00,10,0,ok,",
        "2026-05-10 10:32:00,-1,5,ok,",
        "2026-05-10 10:33:00,10,5.5,ok,",
        ",10,5,ok,",
        "2026-05-10 10:34:00,10,5,ok,client closed the connection",
        "2026-05-10 10:35:00,10,5,a b,",
        "2026-05-10 10:36:00,10",
        '2026-05-10 10:37:00,"1,234",5,ok,',
        f"2026-05-10 10:38:00,10,5,{MODEL},",
        "2026-05-10 10:39:00,10,5,,",
    ]
    found = observed(write(tmp_path, "\n".join(lines) + "\n"))
    reasons = {each.reason: (each.rows, each.example) for each in found.dropped}
    assert {reason: count for reason, (count, _) in reasons.items()} == {
        "no output tokens, so that it failed": 1,
        "prompt tokens are no whole number from 1 to 16777216": 1,
        "output tokens are no whole number from 0 to 16777216": 1,
        "no time of arrival that can be read": 1,
        "failed, by its status": 1,
        "a name that no adapter can have": 1,
        "a broken line (missing columns)": 1,
    }
    assert "client closed" in reasons["failed, by its status"][1]
    assert found.requests == 33
    assert found.base_rate_rps * found.duration_s == pytest.approx(2)
    assert [each.name for each in found.adapters] == ["ok"]
    assert 1234 in found.prompts


def test_columns_are_named_where_the_guess_is_wrong(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "created,t2,in,out,who\n2026-05-10 10:00:00,2026-05-10 11:00:00,9,8,x\n" * 1
        + "2026-05-10 10:00:10,2026-05-10 11:30:00,9,8,y\n",
    )
    names = {"timestamp": "t2", "prompt_tokens": "in", "output_tokens": "out", "adapter": "who"}
    found = observed(path, columns=names)
    assert found.duration_s == pytest.approx(1800)
    assert {each.name for each in found.adapters} == {"x", "y"}
    with pytest.raises(InputError, match="must be a column of the file: created, t2, in, out, who"):
        observed(path, columns={**names, "adapter": "nobody"})
    with pytest.raises(InputError, match="must be one of timestamp, prompt_tokens"):
        observed(path, columns={"when": "t2"})


def test_ranks_come_from_folders_and_tables(day: Path, tmp_path: Path) -> None:
    for name, rank in (("lora-0", 8), ("idle", 64)):
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        config = {
            "peft_type": "LORA",
            "r": rank,
            "target_modules": ["q_proj"],
            "base_model_name_or_path": MODEL,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "ranks.csv").write_text("name,rank\nlora-1,32\n")
    found = observed(day, adapters=tmp_path / "adapters", ranks=tmp_path / "ranks.csv")
    ranks = {each.name: each.rank for each in found.adapters}
    assert (ranks["lora-0"], ranks["lora-1"], ranks["lora-2"], ranks["idle"]) == (8, 32, 16, 64)
    assert {each.name: each.rate_rps for each in found.adapters}["idle"] == 0.0
    assert any("ranks are missing for 48 adapters" in line for line in found.warnings)
    found.write(tmp_path / "w.yaml")
    assert {a.name: a.path for a in load_workload(tmp_path / "w.yaml").adapters}["idle"] == str(
        tmp_path / "adapters" / "idle"
    )


def test_the_least_popular_adapters_are_a_class_on_request(day: Path, tmp_path: Path) -> None:
    found = observed(day, most_adapters=10)
    assert len(found.adapters) == 10
    assert found.tail is not None
    assert found.tail.adapters == 40
    assert found.tail.requests + sum(a.requests for a in found.adapters) == found.requests
    (path, *_) = found.write(tmp_path / "w.yaml")
    drawn = draw_requests(load_workload(path), 86_400.0, 1, 2**20)
    tail = float((np.asarray(drawn.adapter) > 10).mean())
    assert tail == pytest.approx(found.tail.requests / found.requests, rel=0.03)


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_burstiness_is_that_of_single_adapters(tmp_path: Path, cv: float) -> None:
    rng = np.random.default_rng(5)
    parts = []
    for name in range(4):
        gaps = rng.gamma(1 / cv**2, cv**2, 12_000)
        parts += [(float(at), name) for at in np.cumsum(gaps)]
    lines = [f"{at:.6f},50,20,a{name}" for at, name in sorted(parts) if at < 11_000]
    header = "arrival_s,prompt_tokens,output_tokens,adapter"
    found = observed(write(tmp_path, "\n".join([header, *lines]) + "\n"))
    assert found.gap_cv == pytest.approx(cv, rel=0.15)


def test_prefixes_are_kept_as_a_shared_length(tmp_path: Path) -> None:
    records = [
        {
            "timestamp": 500 * i,
            "input_length": 1024,
            "output_length": 30,
            "hash_ids": [1, 2, *range(10 * i, 10 * i + 6)],
        }
        for i in range(1, 400)
    ]
    path = write(tmp_path, "".join(json.dumps(each) + "\n" for each in records), "mooncake.jsonl")
    found = observed(path)
    hits = 2 / 8 * 398 / 399
    assert found.prefix_hit_share == pytest.approx(hits, rel=0.02)
    assert found.shared_prefix_tokens == pytest.approx(hits * 1024, rel=0.02)
    written = found.write(tmp_path / "w.yaml")
    row = next(row for row in fit_report(found, written[0]).rows if row.what == "prefix hit share")
    assert abs(row.error) < 0.03


def test_drift_and_short_logs_are_said(tmp_path: Path) -> None:
    lines = ["arrival_s,prompt_tokens,output_tokens,adapter"]
    lines += [f"{i * 2.0},50,20,{'old' if i < 500 else 'new'}" for i in range(1000)]
    found = observed(write(tmp_path, "\n".join(lines) + "\n"))
    assert any("shares drift: new, old" in line for line in found.warnings)
    assert any("the log is short" in line for line in found.warnings)


def test_the_command_writes_a_workload_that_plans(day: Path, tmp_path: Path, run: Run) -> None:
    target = tmp_path / "w.yaml"
    options = ("--base-model", MODEL, "--profile", PROFILE, "--rank", 16)
    done = run("observe", day, "-o", target, *options, "--html", tmp_path / "fit.html")
    assert done.exit_code == 0, done.output
    assert "requests of 50 adapters in 24 h from 2026-05-10 00:00:00 UTC" in done.output
    assert "prompt_tokens: prompt_tokens (by its name)" in done.output
    assert "requests of the busiest minute" in done.output
    assert "<html" in (tmp_path / "fit.html").read_text()[:200].lower()
    as_json = json.loads(run("observe", day, "-o", target, *options, "--json").output)
    assert as_json["fit"]["rows"]
    assert as_json["requests"] + sum(each["rows"] for each in as_json["dropped"]) == as_json["rows"]
    assert "must be WHAT=COLUMN" in error_line(run("observe", day, "-o", target, *options, "--map", "ts"))
    assert "must be s, ms, us or ns" in error_line(
        run("observe", day, "-o", target, *options, "--time-unit", "h")
    )
    missing = run("observe", tmp_path / "nothing.csv", "-o", target, *options)
    assert "nothing.csv: cannot be read" in error_line(missing)


# Real logs are odd -------------------------------------------------------------------------------


def log_of(tmp_path: Path, heads: str, rows: int, row: Callable[[int], str]) -> Path:
    """Write a CSV log; of `row`, commas are separators."""
    return write(tmp_path, "\n".join([heads, *map(row, range(rows))]) + "\n")


def test_a_duration_is_no_time_of_arrival(tmp_path: Path) -> None:
    """The `request_time` of nginx is how long a request took."""
    heads = "time_local,request_time,prompt_tokens,output_tokens"
    took = np.random.default_rng(0).exponential(2.0, 400).round(3)
    path = log_of(
        tmp_path, heads, 400, lambda i: f"10/May/2026:00:{i // 60:02}:{i % 60:02} +0000,{took[i]},100,10"
    )
    assert observed(path).rate_rps == pytest.approx(1.0, rel=0.01)
    alone = log_of(tmp_path, heads.partition(",")[2], 400, lambda i: f"{took[i]},100,10")
    with pytest.raises(InputError, match="request_time holds neither dates nor numbers that rise"):
        observed(alone)
    arrivals = log_of(tmp_path, heads.partition(",")[2], 400, lambda i: f"{0.5 * i},100,10")
    assert observed(arrivals).rate_rps == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    "status",
    [
        "429 Too Many Requests",
        "HTTP/1.1 500",
        "5xx",
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "rejected",
        "rate_limited",
        "server_error",
        "client disconnected",
        "False",
        "503.0",
    ],
)
def test_a_status_in_words_tells_failures(tmp_path: Path, status: str) -> None:
    path = log_of(
        tmp_path,
        "time,prompt_tokens,output_tokens,status",
        200,
        lambda i: f"{i},5,5,{'OK' if i % 4 else status}",
    )
    found = observed(path)
    assert [(each.rows, each.reason) for each in found.dropped] == [(50, "failed, by its status")]


@pytest.mark.parametrize(
    "status", ["200", "200 OK", "HTTP/2 200", "success", "stop", "length", "COMPLETED", "-", ""]
)
def test_a_status_of_success_needs_no_note(tmp_path: Path, status: str) -> None:
    path = log_of(tmp_path, "time,prompt_tokens,output_tokens,status", 100, lambda i: f"{i},5,5,{status}")
    found = observed(path)
    assert found.requests == 100
    assert not any("counts as served" in note for note in found.notes)


def test_a_status_that_is_not_known_counts_as_served_and_is_named(tmp_path: Path) -> None:
    path = log_of(tmp_path, "time,prompt_tokens,output_tokens,status", 100, lambda i: f"{i},5,5,{i % 2}")
    found = observed(path)
    assert found.requests == 100
    assert any("'0' (50 rows)" in note for note in found.notes)


@pytest.mark.parametrize("nothing", ["-", "null", "None", "(null)", "\\N", " "])
def test_a_cell_that_holds_nothing_is_no_adapter_and_no_error(tmp_path: Path, nothing: str) -> None:
    heads = "time,prompt_tokens,output_tokens,adapter,error"
    path = log_of(tmp_path, heads, 100, lambda i: f"{i},5,5,{'a' if i % 2 else nothing},{nothing}")
    found = observed(path)
    assert found.requests == 100
    assert [(each.name, each.requests) for each in found.adapters] == [("a", 50)]
    assert found.base_rate_rps == pytest.approx(found.rate_rps / 2)


def test_names_of_a_gateway_are_those_of_adapters_and_of_the_base_model(tmp_path: Path) -> None:
    names = (f"hosted_vllm/{MODEL}", "hosted_vllm/tenant", "llama")
    heads = "time,prompt_tokens,output_tokens,model"
    path = log_of(tmp_path, heads, 300, lambda i: f"{i},5,5,{names[i % 3]}")
    ranks = write(tmp_path, "name,rank\ntenant,8\n", "ranks.csv")
    unlike = observed(path, ranks=ranks)
    assert any("--strip-prefix hosted_vllm/" in warning for warning in unlike.warnings)
    found = observed(path, ranks=ranks, strip_prefix="hosted_vllm/", base_aliases=["llama"])
    assert [(each.name, each.rank, each.requests) for each in found.adapters] == [("tenant", 8, 100)]
    assert found.base_rate_rps == pytest.approx(found.rate_rps * 2 / 3)


@pytest.mark.parametrize("wrong", ["4102444800", "1000000000", "0", "1780272000000000000"])
def test_a_wrong_clock_costs_one_row(tmp_path: Path, wrong: str) -> None:
    heads = "time,prompt_tokens,output_tokens"
    path = log_of(tmp_path, heads, 500, lambda i: f"{wrong if i == 77 else 1780272000 + 7 * i},5,5")
    found = observed(path)
    if len(wrong) == 19:  # the first moment in ns, by its size
        assert found.requests == 500
        return
    assert [(each.rows, each.reason) for each in found.dropped] == [
        (1, "a time far from those of all others")
    ]
    assert found.duration_s == pytest.approx(7 * 499)


def test_the_stated_unit_must_be_that_of_dates(tmp_path: Path) -> None:
    path = log_of(tmp_path, "time,prompt_tokens,output_tokens", 100, lambda i: f"{1780272000 + i},5,5")
    assert observed(path, time_unit="s").requests == 100
    for unit in ("ms", "us", "ns"):
        with pytest.raises(InputError, match="must be s: the times are dates in seconds, by their size"):
            observed(path, time_unit=unit)


def test_names_like_numbers_stay_names(tmp_path: Path) -> None:
    names = ("1e3", "0x1f", "007", "no", "a{i}")
    heads = "time,prompt_tokens,output_tokens,adapter"
    path = log_of(tmp_path, heads, 100, lambda i: f"{i},5,5,{names[i % 5]}")
    (workload, *_) = observed(path).write(tmp_path / "w.yaml")
    assert {each.name for each in load_workload(workload).adapters} == set(names[:4])


def test_files_of_an_earlier_workload_stay_if_a_new_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log_of(tmp_path, "time,prompt_tokens,output_tokens,adapter", 100, lambda i: f"{i},5,5,a")
    good, found = tmp_path / "w.yaml", observed(path)
    found.write(good)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    broken = replace(found, base_model="")
    with pytest.raises(InputError):
        broken.write(good)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_profile_of_another_model_is_refused_before_the_log_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a model that profile"):
        observed(tmp_path / "nowhere.csv", base_model="Qwen/Qwen2.5-7B")
    with pytest.raises(InputError, match="nope"):
        observed(tmp_path / "nowhere.csv", profile="nope")


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = log_of(tmp_path, "time,prompt_tokens,output_tokens,adapter", 100, lambda i: f"{i},5,5,a")
    ranks = write(tmp_path, "name,rank\na,8\nb,8\na,16\n", "ranks.csv")
    with pytest.raises(InputError, match=r"ranks.csv: row 3: must state each adapter once"):
        observed(path, ranks=ranks)


def test_errors_name_the_options_of_the_command(run: Run, tmp_path: Path) -> None:
    path = log_of(tmp_path, "time,prompt_tokens,output_tokens", 100, lambda i: f"{i},5,5")
    common = ("observe", path, "-o", tmp_path / "w.yaml", "--base-model", MODEL, "--profile", PROFILE)
    assert "--window: must be longer" in error_line(run(*common, "--window", "0h"))
    assert "--map: adapter: must be a column" in error_line(run(*common, "--map", "adapter=x"))
    twice = ("--map", "prompt_tokens=output_tokens", "--map", "output_tokens=output_tokens")
    assert "--map: must hold one thing alone" in error_line(run(*common, *twice))
