"""Training data is read completely or refused in one line."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from capplan import InputError
from capplan.models.surrogates import FEATURES, feature_of
from capplan.models.training import (
    MANIFEST,
    OUTCOMES,
    DatasetRequest,
    DatasetResult,
    Manifest,
    Shard,
    content_digest,
    read_tables,
    schema,
)
from capplan.models.training._data import LATENCIES, MIN_ROWS, training_table
from capplan.spec import STARVED_BELOW

ASKED = DatasetRequest(
    design="paper-grid",
    seed=0,
    scenarios=300,
    duration_s=60.0,
    profile="any/model/engine",
    profile_digest="0" * 64,
    features=FEATURES,
    probe=("1", "2"),
    capplan="1",
)
Change = Callable[[dict[str, Any]], Any]


def columns(rows: int = 300, seed: int = 0, design: str = "paper-grid") -> dict[str, Any]:
    """Return the columns of a table, half of whose scenarios starve."""
    rng = np.random.default_rng(seed)
    made: dict[str, Any] = {
        "number": np.arange(rows),
        "group": np.arange(rows) // 2,
        "design": pa.array([design] * rows, pa.string()),
        **{name: rng.uniform(1, 100, rows).astype(np.float32) for name in FEATURES},
        **{name: rng.uniform(1, 100, rows) for name in OUTCOMES},
    }
    made["served_fraction"] = np.where(np.arange(rows) % 2, 1.0, 0.4)
    return made


def write(folder: Path, *parts: dict[str, Any], asked: DatasetRequest = ASKED, finished: bool = True) -> Path:
    """Write a dataset with these columns, as a generator of such data would."""
    folder.mkdir()
    shards = []
    for number, part in enumerate(parts):
        buffer = io.BytesIO()
        pq.write_table(pa.table(part), buffer)
        path = folder / f"part-{number:05d}.parquet"
        path.write_bytes(buffer.getvalue())
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        shards.append(Shard(file=path.name, rows=len(part["number"]), sha256=digest))
    answered = DatasetResult(
        rows=sum(shard.rows for shard in shards),
        refused_for_memory=0,
        without_requests=0,
        shards=tuple(shards),
    )
    text = Manifest(asked=asked, answered=answered if finished else None).to_json()
    (folder / MANIFEST).write_text(text)
    return folder


def refusal(*folders: Path, **more: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_tables(folders, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_row_is_read_in_order(tmp_path: Path) -> None:
    first, second = columns(150), columns(70, seed=1)
    other = columns(90, seed=2, design="space-filling")
    one = write(tmp_path / "one", first, second)
    two = write(tmp_path / "two", other, asked=ASKED.model_copy(update={"design": "space-filling"}))
    table = read_tables([one, str(two)], profile_digest="0" * 64)
    parts = (first, second, other)
    whole = {name: np.concatenate([part[name] for part in parts]) for name in first if name != "design"}
    assert len(table) == 310
    assert table.features.dtype == np.float32
    np.testing.assert_array_equal(table.features, np.column_stack([whole[name] for name in FEATURES]))
    for name in ("throughput_tok_s", "offered_drawn_tok_s", "served_fraction", "step_ms"):
        np.testing.assert_array_equal(
            getattr(table, name), whole["step_ms_mean" if name == "step_ms" else name]
        )
        assert getattr(table, name).dtype == np.float64
    for name in ("group", "number"):
        np.testing.assert_array_equal(getattr(table, name), whole[name])
        assert getattr(table, name).dtype == np.int64
    assert table.design.tolist() == ["paper-grid"] * 220 + ["space-filling"] * 90


def test_no_two_columns_share_a_name() -> None:
    assert len(set(schema().names)) == len(schema().names)


def test_what_follows_from_the_columns() -> None:
    made = columns()
    made["offered_drawn_tok_s"][0] = 50.0
    made["throughput_tok_s"][0] = 25.0
    table = training_table(pa.table(made))
    np.testing.assert_array_equal(table.starved, made["served_fraction"] < STARVED_BELOW)
    assert table.share_tok_s[0] == pytest.approx(float(feature_of(table.features, "offered_tok_s")[0]) / 2)


def test_a_latency_may_lack_where_nothing_was_completed(tmp_path: Path) -> None:
    made = columns()
    for name in LATENCIES:
        made[name][5] = np.nan
    assert len(read_tables([write(tmp_path / "data", made)])) == 300


def _set(name: str, row: int, value: float) -> Change:
    def change(made: dict[str, Any]) -> None:
        made[name][row] = value

    return change


def _null(made: dict[str, Any]) -> None:
    made["throughput_tok_s"] = pa.array([None if row == 3 else 1.0 for row in range(300)])


def _recast(made: dict[str, Any]) -> None:
    made["kv_tokens"] = made["kv_tokens"].astype(np.float64)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda made: made.pop("kv_tokens"), "has no column kv_tokens"),
        (lambda made: made.pop("ttft_s_p99"), "has no column ttft_s_p99"),
        (lambda made: made.update(extra=np.zeros(300)), "has a column extra, which is none of a dataset's"),
        (_recast, "column kv_tokens must be float (got 'double')"),
        (_set("kv_tokens", 17, np.nan), "column kv_tokens, row 17: must be a finite number (got nan)"),
        (_set("step_ms_mean", 0, np.inf), "column step_ms_mean, row 0: must be a finite number (got inf)"),
        (_set("ttft_s_p50", 299, -np.inf), "column ttft_s_p50, row 299: must be a finite number (got -inf)"),
        (_null, "column throughput_tok_s, row 3: must be a finite number (got None)"),
        (lambda made: made.update(design=pa.array(["other"] * 300)), "is not the file that"),
    ],
)
def test_a_wrong_column_is_named(change: Change, told: str, tmp_path: Path) -> None:
    made = columns()
    change(made)
    folder = write(tmp_path / "data", made)
    assert refusal(folder).startswith(f"{folder / 'part-00000.parquet'}: {told}")


@given(
    name=st.sampled_from([n for n in (*FEATURES, *OUTCOMES) if n not in LATENCIES]),
    row=st.integers(0, 299),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_no_value_that_is_not_finite_is_learned(
    tmp_path_factory: pytest.TempPathFactory, name: str, row: int, value: float
) -> None:
    made = columns()
    made[name][row] = value
    folder = write(tmp_path_factory.mktemp("any") / "data", made)
    assert f"column {name}, row {row}: must be a finite number" in refusal(folder)


def test_a_file_that_is_not_the_one_listed_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", columns())
    made = columns()
    made["throughput_tok_s"][0] += 1.0
    pq.write_table(pa.table(made), folder / "part-00000.parquet")
    assert "part-00000.parquet: is not the file that manifest.json lists" in refusal(folder)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused(keep: float, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", columns())
    path = folder / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    assert "part-00000.parquet: damaged" in refusal(folder)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", columns())
    (folder / "part-00000.parquet").unlink()
    assert "part-00000.parquet: cannot be read: No such file" in refusal(folder)


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(at=0.90625, bit=7)  # in the name of a column
def test_no_flipped_bit_is_learned(tmp_path_factory: pytest.TempPathFactory, at: float, bit: int) -> None:
    folder = write(tmp_path_factory.mktemp("any") / "data", columns())
    path = folder / "part-00000.parquet"
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    path.write_bytes(data)
    assert "part-00000.parquet: " in refusal(folder)


def test_other_folders_than_datasets_are_refused(tmp_path: Path) -> None:
    assert "nowhere: no such folder; make one with: capplan dataset generate" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty: holds no dataset" in refusal(tmp_path / "empty")
    assert "at least one dataset is required" in refusal()
    unfinished = write(tmp_path / "unfinished", columns(), finished=False)
    assert "unfinished: is not finished; run the command that began it again" in refusal(unfinished)


def test_data_with_other_features_is_refused(tmp_path: Path) -> None:
    old = ASKED.model_copy(update={"features": FEATURES[:-1]})
    assert "was made with other features" in refusal(write(tmp_path / "old", columns(), asked=old))


def test_data_of_another_profile_is_refused(tmp_path: Path) -> None:
    ours = write(tmp_path / "ours", columns())
    other = ASKED.model_copy(update={"profile_digest": "1" * 64})
    theirs = write(tmp_path / "theirs", columns(), asked=other)
    assert "theirs/manifest.json: was made with another profile" in refusal(ours, theirs)
    assert "ours/manifest.json: was made with another profile" in refusal(ours, profile_digest="1" * 64)


@pytest.mark.parametrize("rows", [0, 1, MIN_ROWS - 1])
def test_too_few_rows_are_refused(rows: int, tmp_path: Path) -> None:
    told = refusal(write(tmp_path / "data", columns(rows)))
    assert f"at least {MIN_ROWS} rows are needed to train (got {rows})" in told


@pytest.mark.parametrize(("served", "told"), [(1.0, "no scenario starves"), (0.5, "every scenario starves")])
def test_one_class_alone_is_refused(served: float, told: str, tmp_path: Path) -> None:
    made = columns()
    made["served_fraction"][:] = served
    assert told in refusal(write(tmp_path / "data", made))


def test_a_manifest_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", columns())
    document = json.loads((folder / MANIFEST).read_text())
    document["answered"]["shards"][0]["file"] = "../data/part-00000.parquet"
    (folder / MANIFEST).write_text(json.dumps(document))
    assert "manifest.json: is no manifest of a dataset, or damaged: answered.shards.0.file" in refusal(folder)


def test_a_digest_is_about_values_and_not_about_their_storage() -> None:
    table = pa.table(columns(10), schema=schema())
    chunks = pa.concat_tables([table.slice(0, 4), table.slice(4)])
    assert content_digest(chunks) == content_digest(table)
    changed = columns(10)
    changed["step_ms_mean"][9] = np.nextafter(changed["step_ms_mean"][9], 0.0)
    assert content_digest(pa.table(changed, schema=schema())) != content_digest(table)
