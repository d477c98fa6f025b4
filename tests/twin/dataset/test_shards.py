"""A dataset depends on its arguments alone, not on workers, interruptions or damaged files."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from capplan import InputError, Profile, load_profile
from capplan.models.training import MANIFEST, Manifest, read_tables, schema
from capplan.twin.dataset import _generate as shards
from capplan.twin.dataset import generate_dataset
from capplan.twin.dataset._generate import NoRow
from tests.conftest import output_of_python

pytestmark = pytest.mark.long

PROFILE = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
PER_SHARD = 16
DURATION_S = 3.0


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SCENARIOS_PER_SHARD", PER_SHARD)


def generate(folder: Path, *, profile: Profile = PROFILE, **more: Any) -> Manifest:
    asked: dict[str, Any] = {"design": "paper-grid", "scenarios": 40, "duration_s": DURATION_S, "workers": 1}
    return generate_dataset(folder, profile, **(asked | more))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A dataset of one uninterrupted call."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SCENARIOS_PER_SHARD", PER_SHARD)
        generate(folder)
    return bytes_of(folder)


def laid_out(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_the_manifest_holds_the_request_and_every_row(tmp_path: Path) -> None:
    manifest = generate(tmp_path / "data")
    assert Manifest.model_validate_json((tmp_path / "data" / MANIFEST).read_text()) == manifest
    answered = manifest.answered
    assert answered is not None
    assert [shard.file for shard in answered.shards] == [f"part-{n:05d}.parquet" for n in range(3)]
    tables = [pq.read_table(tmp_path / "data" / shard.file) for shard in answered.shards]
    assert [len(table) for table in tables] == [shard.rows for shard in answered.shards]
    assert answered.rows + answered.refused_for_memory + answered.without_requests == 40
    numbers = [number for table in tables for number in table.column("number").to_pylist()]
    assert numbers == sorted(set(numbers))
    assert all(table.schema.equals(schema()) for table in tables)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_data_do_not_depend_on_the_workers(workers: int, tmp_path: Path, whole: dict[str, bytes]) -> None:
    generate(tmp_path / "data", workers=workers)
    assert bytes_of(tmp_path / "data") == whole


@pytest.mark.long
def test_the_data_do_not_depend_on_a_ray_cluster(tmp_path: Path, whole: dict[str, bytes]) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    program = (
        "import sys; from pathlib import Path;"
        "from tests.twin.dataset.test_shards import PER_SHARD, generate, shards;"
        "shards.SCENARIOS_PER_SHARD = PER_SHARD; generate(Path(sys.argv[1]), ray_address='local')"
    )
    # In a process of its own: Ray ends the process whose node dies.
    output_of_python("-c", program, tmp_path / "data")
    assert bytes_of(tmp_path / "data") == whole


def test_a_missing_ray_is_one_line_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"^ray_address: needs Ray"):
        generate(tmp_path / "data", ray_address="auto")
    assert not (tmp_path / "data").exists()


def test_another_seed_gives_other_rows(tmp_path: Path, whole: dict[str, bytes]) -> None:
    generate(tmp_path / "data", seed=1)
    assert all(bytes_of(tmp_path / "data")[name] != data for name, data in whole.items())


@pytest.mark.parametrize("last", [False, True], ids=["before the rename", "after the rename"])
@pytest.mark.parametrize("writes", range(5))
def test_a_run_that_ends_at_any_write_is_continued_to_the_same_bytes(
    writes: int, last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    folder = tmp_path / "data"
    count = itertools.count()

    def dying(write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(path: Path, data: Any) -> None:
            if next(count) != writes:
                write(path, data)
                return
            if last:
                write(path, data)
            # A write that SIGKILL interrupts leaves a temporary file.
            (folder / f".{path.name}.1.tmp").write_bytes(b"half")
            raise KeyboardInterrupt

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("write_bytes_atomic", "write_text_atomic"):
            patch.setattr(shards, name, dying(getattr(shards, name)))
        with pytest.raises(KeyboardInterrupt):
            generate(folder)
    generate(folder)
    assert bytes_of(folder) == whole


def test_existing_shards_are_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    folder = laid_out(tmp_path / "data", {k: v for k, v in whole.items() if k != "part-00001.parquet"})
    asked: list[tuple[int, int]] = []
    answer = shards.simulate_spans

    def recorded(spans: Any, *more: Any) -> Any:
        asked.extend(spans)
        return answer(spans, *more)

    monkeypatch.setattr(shards, "simulate_spans", recorded)
    calls: list[tuple[int, int]] = []
    generate(folder, progress=lambda done, total: calls.append((done, total)))
    assert asked == [(PER_SHARD, 2 * PER_SHARD)]
    assert calls == [(24, 40), (32, 40), (40, 40)]
    assert bytes_of(folder) == whole


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 3
    return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]


def _without_a_row(data: bytes) -> bytes:
    return _rewritten(data, lambda table: table.slice(1))


def _with_other_numbers(data: bytes) -> bytes:
    return _rewritten(data, lambda table: table.take(list(range(len(table)))[::-1]))


def _rewritten(data: bytes, change: Callable[[Any], Any]) -> bytes:
    import io

    buffer = io.BytesIO()
    pq.write_table(change(pq.read_table(io.BytesIO(data))), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "damage",
    [_truncated, _flipped, _without_a_row, _with_other_numbers, lambda data: b"", lambda data: b"PAR1"],
)
def test_a_damaged_shard_is_written_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, whole: dict[str, bytes]
) -> None:
    name = "part-00000.parquet"
    folder = laid_out(tmp_path / "data", {**whole, name: damage(whole[name])})
    generate(folder)
    assert bytes_of(folder) == whole


def test_valid_rows_in_another_encoding_are_written_again_without_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    name = "part-00000.parquet"
    folder = laid_out(tmp_path / "data", {**whole, name: _rewritten(whole[name], lambda table: table)})
    assert bytes_of(folder) != whole
    monkeypatch.delattr("capplan.twin.dataset._generate.simulate_span")
    generate(folder)
    assert bytes_of(folder) == whole


def test_a_shard_in_another_place_is_written_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    swapped = {**whole, "part-00000.parquet": whole["part-00001.parquet"]}
    folder = laid_out(tmp_path / "data", swapped)
    generate(folder)
    assert bytes_of(folder) == whole


def test_a_shard_of_another_seed_is_written_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    generate(tmp_path / "other", seed=1)
    stranger = (tmp_path / "other" / "part-00001.parquet").read_bytes()
    folder = laid_out(tmp_path / "data", {**whole, "part-00001.parquet": stranger})
    generate(folder)
    assert bytes_of(folder) == whole


@pytest.mark.parametrize("fewer", [1, PER_SHARD, 39])
def test_an_extended_dataset_equals_one_generated_at_once(
    fewer: int, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    generate(tmp_path / "data", scenarios=fewer)
    generate(tmp_path / "data")
    assert bytes_of(tmp_path / "data") == whole


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"seed": 5}, "seed is 0 there; give the same, or a new folder (got 5)"),
        ({"design": "space-filling"}, "design is 'paper-grid' there"),
        ({"duration_s": 4.0}, "duration_s is 3.0 there; give the same, or a new folder (got 4.0)"),
        ({"scenarios": 39}, "scenarios is 40 there, and cannot fall (got 39)"),
        ({"profile": load_profile("h100-64g/qwen2.5-7b/vllm-0.8.5")}, "profile is 'h100-64g/llama"),
    ],
)
def test_other_arguments_are_refused_and_change_nothing(
    other: dict[str, Any], told: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    folder = laid_out(tmp_path / "data", whole)
    with pytest.raises(InputError) as caught:
        generate(folder, **other)
    assert str(caught.value).startswith(f"{folder / MANIFEST}: {told}")
    assert bytes_of(folder) == whole


@pytest.mark.parametrize("key", ["features", "capplan", "profile_digest"])
def test_data_of_another_version_is_refused(key: str, tmp_path: Path, whole: dict[str, bytes]) -> None:
    document = json.loads(whole[MANIFEST])
    document["asked"][key] = ["adapters"] if key == "features" else "another"
    folder = laid_out(tmp_path / "data", {**whole, MANIFEST: json.dumps(document).encode()})
    with pytest.raises(InputError, match=rf"{MANIFEST}: {key} "):
        generate(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 2}', "null"])
def test_a_damaged_manifest_is_one_line(text: str, tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "data", {MANIFEST: text.encode()})
    with pytest.raises(InputError, match="is no manifest of a dataset, or damaged"):
        generate(folder)
    assert bytes_of(folder) == {MANIFEST: text.encode()}


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    folder = laid_out(tmp_path / "data", {"thesis.tex": b"mine", ".thesis.tex.1.tmp": b"mine too"})
    with pytest.raises(InputError, match=r"holds files but no manifest\.json; give a new or empty folder"):
        generate(folder)
    assert bytes_of(folder) == {"thesis.tex": b"mine", ".thesis.tex.1.tmp": b"mine too"}


def test_a_folder_that_cannot_be_created_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "missing" / "data", tmp_path / "nul\0"):
        with pytest.raises(InputError, match="cannot be written"):
            generate(folder)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ({"design": "random"}, r"^design: must be one of paper-grid, space-filling, near-starvation"),
        ({"scenarios": 0}, "^scenarios: must be a whole number >= 1"),
        ({"scenarios": 2.5}, "^scenarios: must be a whole number >= 1"),
        ({"seed": -1}, "^seed: must be a whole number >= 0"),
        ({"duration_s": 0.0}, "^duration_s: must be a finite number > 0"),
        ({"duration_s": float("nan")}, "^duration_s: must be a finite number > 0"),
        ({"workers": 0}, "^workers: must be a whole number from 1 to 1024"),
    ],
)
def test_an_invalid_argument_is_refused_before_anything_is_written(
    argument: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=told):
        generate(tmp_path / "data", **argument)
    assert not (tmp_path / "data").exists()


def test_a_dataset_without_rows_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = NoRow.REFUSED_FOR_MEMORY
    monkeypatch.setattr(
        "capplan.twin.dataset._generate.simulate_span", lambda *a: [refusal] * (a[-1] - a[-2])
    )
    answered = generate(tmp_path / "data").answered
    assert answered is not None
    assert (answered.rows, answered.refused_for_memory, len(answered.shards)) == (0, 40, 3)
    with pytest.raises(InputError, match="at least 200 rows are needed"):
        read_tables([tmp_path / "data"])
