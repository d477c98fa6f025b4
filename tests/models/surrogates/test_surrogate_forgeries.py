"""Forged surrogate files are refused, and none of their code runs."""

import io
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capplan.models.surrogates import FEATURES, surrogate_bytes
from tests.models.surrogates.making import surrogates
from tests.models.surrogates.written import Columns, contents, kind_of, refused, write


def swap(*keys: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *holders, last = keys
        at: Any = document
        for key in holders:
            at = at[key]
        at[last] = value

    return change


BROKEN: dict[str, Callable[[dict[str, Any]], None]] = {
    "no calibration": lambda d: d.pop("calibration"),
    "no domain": lambda d: d.pop("domain"),
    "no report": lambda d: d.pop("report"),
    "no intervals": lambda d: d.pop("intervals"),
    "half an interval": lambda d: d["intervals"].pop("low"),
    "a report of letters": swap("report", value="good"),
    "a calibration that is a list": swap("calibration", value=[1.0, 2.0]),
    "a slope of letters": swap("calibration", "slope", value="1"),
    "a slope that is none": swap("calibration", "slope", value=float("nan")),
    "an endless offset": swap("calibration", "offset", value=float("inf")),
    "a slope that is true": swap("calibration", "slope", value=True),
    "a slope of many digits": swap("calibration", "slope", value=10**400),
    "a short range": swap("domain", "low", value=[0.0]),
    "a range of letters": swap("domain", "high", value=["x"] * len(FEATURES)),
    "a range of many digits": swap("domain", "high", value=[10**400] * len(FEATURES)),
    "a range beyond float32": swap("domain", "high", value=[1e300] * len(FEATURES)),
    "a range that is none": swap("domain", "low", 0, value=float("nan")),
    "a flat whitening": swap("domain", "whitening", value=[0.0] * len(FEATURES)),
    "a ragged whitening": swap("domain", "whitening", 3, value=[0.0]),
    "no distance": swap("domain", "farthest", value=0.0),
    "a distance that is none": swap("domain", "farthest", value=None),
    "intervals of probabilities": swap("intervals", "low", "answer", value="probability"),
    "an interval's end that is none": lambda d: swap("value", value=float("nan"))(
        next(node for node in d["intervals"]["low"]["nodes"] if "value" in node)
    ),
    "an interval's circle": swap(
        "intervals",
        "high",
        "nodes",
        0,
        value={"feature": "a_max", "at_most": 1.0, "left": 0, "right": 1},
    ),
    "an interval without regimes": swap("intervals", "low", "nodes", value=[]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_incomplete_or_invalid_document_is_refused(file: Path, what: str) -> None:
    document, columns = contents(file)
    BROKEN[what](document)
    write(file, document, columns)
    assert "damaged" in refused(file)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "3", '"text"', "{", "{}x", "NaN", '{"version": 3,}', "\ud800"),
        pytest.param("[" * 200_000, id="nested lists"),
        pytest.param('{"a":' * 200_000 + "1" + "}" * 200_000, id="nested mappings"),
        pytest.param("1" * 100_000, id="many digits"),
        pytest.param('{"version": ' + "9" * 100_000 + "}", id="a version of many digits"),
    ],
)
def test_a_text_that_is_no_document_is_refused(file: Path, text: str) -> None:
    if file.suffix == ".json":
        file.write_bytes(text.encode(errors="surrogatepass"))
    else:
        write(file, text, contents(file)[1])
    refused(file)


def npz(tmp_path: Path, kind: str = "forest") -> Path:
    path = tmp_path / f"s.{kind}.npz"
    path.write_bytes(surrogate_bytes(surrogates()[kind]))
    return path


def circle(columns: Columns) -> Columns:
    inner = columns["throughput_0_feature"] >= 0
    return {"throughput_0_left": np.where(inner, 0, columns["throughput_0_left"]).astype(np.int32)}


def as_nan(name: str) -> Callable[[Columns], Columns]:
    return lambda columns: {name: np.full_like(columns[name], np.nan)}


ARRAYS: dict[str, Callable[[Columns], dict[str, np.ndarray | None]]] = {
    "no children": lambda c: {"throughput_0_left": None},
    "no starvation": lambda c: {name: None for name in c if name.startswith("starvation")},
    "few values": lambda c: {"throughput_0_value": np.zeros(3, np.float32)},
    "a root beyond the nodes": lambda c: {"starvation_0_roots": np.array([10**6], np.int32)},
    "a root before the nodes": lambda c: {"starvation_0_roots": np.array([-1], np.int32)},
    "no roots": lambda c: {"starvation_0_roots": np.array([], np.int32)},
    "fractional roots": lambda c: {"starvation_0_roots": np.array([0.0])},
    "roots in a square": lambda c: {"starvation_0_roots": np.zeros((1, 1), np.int32)},
    "children in a circle": circle,
    "children beyond the nodes": lambda c: {"throughput_0_right": c["throughput_0_right"] + np.int32(10**6)},
    "an unknown feature": lambda c: {
        "throughput_0_feature": np.full_like(c["throughput_0_feature"], len(FEATURES))
    },
    "values that are none": as_nan("throughput_0_value"),
    "thresholds that are none": as_nan("starvation_0_threshold"),
    "endless values": lambda c: {"starvation_0_value": np.full_like(c["starvation_0_value"], np.inf)},
    "objects": lambda c: {"throughput_0_value": np.array([{"a": 1}] * c["throughput_0_value"].size)},
    "letters": lambda c: {"throughput_0_value": np.array(["x"] * c["throughput_0_value"].size)},
    "other numbers": lambda c: {"throughput_0_value": c["throughput_0_value"].astype(np.float64)},
}


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_that_do_not_belong_together_are_refused(tmp_path: Path, what: str) -> None:
    file = npz(tmp_path)
    document, columns = contents(file)
    changed = columns | ARRAYS[what](columns)
    write(file, document, {name: column for name, column in changed.items() if column is not None})
    assert "damaged" in refused(file)


@pytest.mark.parametrize("form", ["log_served", "served_and_step", "oracle", "", None, ["over_expected"], 3])
def test_a_form_of_another_kind_or_number_of_forests_is_refused(tmp_path: Path, form: Any) -> None:
    file = npz(tmp_path)
    document, columns = contents(file)
    document["forms"]["throughput"] = form
    write(file, document, columns)
    assert "damaged" in refused(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda trees: trees.pop("throughput"),
        lambda trees: trees.pop("starvation"),
        lambda trees: trees["throughput"].update(answer="log_tok_s"),
    ],
    ids=["no throughput", "no starvation", "another quantity"],
)
def test_small_trees_that_lack_one_or_are_of_another_quantity_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    file = tmp_path / "s.tree.json"
    file.write_bytes(surrogate_bytes(surrogates()["tree"]))
    document, _ = contents(file)
    change(document["trees"])
    write(file, document, {})
    assert "damaged" in refused(file)


class Harm:
    """What a pickle would run on load."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (Path("harm-was-done"), "")


def test_a_pickle_by_the_name_of_a_surrogate_is_not_run(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file.write_bytes(pickle.dumps(Harm()))
    refused(file)
    if file.suffix == ".npz":
        columns = contents(npz(tmp_path, kind_of(file)))[1]
        np.savez(file, header=np.array([Harm()], object), **columns)
        refused(file)
        (member := io.BytesIO()).write(pickle.dumps(Harm()))
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("header.npy", member.getvalue())
        refused(file)
    assert not (tmp_path / "harm-was-done").exists()


def archived(file: Path, member: bytes, **entry: int) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", member)
        for name, value in entry.items():
            setattr(archive.infolist()[0], name, value)  # the table of contents, not the bytes


def declared(shape: str, descr: str = "'<f4'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 64


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(declared("(1000000000000,)"), id="an array of terabytes"),
        pytest.param(declared("(4611686018427387904, 16)"), id="a size beyond 64 bits"),
        pytest.param(declared("(-1,)", "'|O'"), id="objects"),
        pytest.param(declared("(16,)", "'<U0'"), id="texts of no length"),
        pytest.param(declared("("), id="an open bracket"),
        pytest.param(declared("'''"), id="an open text"),
        pytest.param(declared("().__class__"), id="an expression"),
        pytest.param(declared("__import__('os').getpid()"), id="a call"),
        pytest.param(b"\x93NUMPY\x09\x00" + b"\0" * 80, id="another version"),
        pytest.param(b"\x93NUM", id="cut short"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_member_that_is_no_plain_array_is_refused(tmp_path: Path, member: bytes) -> None:
    file = tmp_path / "s.best.npz"
    archived(file, member)
    tracemalloc.start()
    assert "damaged" in refused(file)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    "entry", [{"file_size": 2**40}, {"file_size": 2**31}, {"compress_type": 14}, {"flag_bits": 1}]
)
def test_an_archive_that_lies_about_its_members_is_refused(tmp_path: Path, entry: dict[str, int]) -> None:
    file = tmp_path / "s.best.npz"
    archived(file, declared("(16,)"), **entry)
    assert "damaged" in refused(file)


def test_a_bomb_is_not_expanded(tmp_path: Path) -> None:
    file = tmp_path / "s.best.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(6):
            archive.writestr(f"{number}.npy", bytes(100 * 2**20))
    tracemalloc.start()
    assert "damaged" in refused(file)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
