"""Adapter folders made to stall or exhaust a server: refused in a second, with little memory."""

import json
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from capplan import InputError
from capplan.engine.lora import AdapterLayout, PeftFolder
from capplan.engine.lora._adapter import read_tensors
from capplan.spec import ADAPTER_CONFIG, WEIGHTS_FILE, SafetensorsFile
from capplan.spec._peft_folder import _matches
from tests.engine.engines import TINY_MODEL as TINY
from tests.engine.test_dynamic_adapters import write_adapter

LAYOUT = AdapterLayout(TINY)
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
MAX_RANK = 16


def read(folder: PeftFolder) -> Any:
    return folder.read(LAYOUT, torch.float32, pin=False, max_rank=MAX_RANK)


def write_weights(folder: Path, header: Any, data_bytes: int) -> None:
    """Write a file of zeros, which takes no room on the disk."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + data_bytes)


def entries(rank: int, size_in: int, size_out: int) -> dict[str, Any]:
    middle, end = rank * size_in * 4, rank * (size_in + size_out) * 4
    return {
        f"{MODULE}.lora_A.weight": {"dtype": "F32", "shape": [rank, size_in], "data_offsets": [0, middle]},
        f"{MODULE}.lora_B.weight": {"dtype": "F32", "shape": [size_out, rank], "data_offsets": [middle, end]},
    }


def sparse(rank: int, size_in: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        header = entries(rank, size_in, TINY.query_size)
        write_weights(folder, header, rank * (size_in + TINY.query_size) * 4)
        configured(r=rank)(folder)

    return spoil


def configured(**fields: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / ADAPTER_CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return spoil


def header(text: bytes, data_bytes: int = 0) -> Callable[[Path], None]:
    return lambda folder: write_weights(folder, text, data_bytes)


def tensor(shape: str, offsets: str, name: str = "x") -> Callable[[Path], None]:
    text = f'{{"{name}": {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}'
    return header(text.encode(), 4)


def replaced(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return spoil


def claim_header(folder: Path) -> None:
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", 2**30))
        file.truncate(2**31)


def overlap(folder: Path) -> None:
    fields = entries(4, TINY.hidden_size, TINY.query_size)
    fields[f"{MODULE}.lora_B.weight"]["data_offsets"] = [0, 4 * TINY.query_size * 4]
    write_weights(folder, fields, 4 * max(TINY.hidden_size, TINY.query_size) * 4)


def write_twice(folder: Path) -> None:
    a, b = torch.zeros(4, TINY.hidden_size), torch.zeros(TINY.query_size, 4)
    halves = {"lora_A": a, "lora_B": b}
    prefixes = (MODULE, MODULE.removeprefix("base_model."))
    save_file(
        {f"{p}.{half}.weight": each.clone() for p in prefixes for half, each in halves.items()},
        folder / WEIGHTS_FILE,
    )


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "pattern with a back reference": (configured(rank_pattern={r"(q)\1": 4}), "regular expression"),
    "pattern with counts": (configured(alpha_pattern={"((a{999}){999}){999}": 4}), "regular expression"),
    "long pattern": (configured(alpha_pattern={"a" * 300: 4}), "regular expression"),
    "many patterns": (configured(alpha_pattern={f"x{i}": 4 for i in range(5000)}), "at most 2048 patterns"),
    "endless rank": (configured(r=10**4000), "finite numbers"),
    "sparse weights of a huge rank": (sparse(2**28, TINY.hidden_size), "max_lora_rank, 16"),
    "sparse weights of a huge width": (sparse(4, 2**28), "dimensions as the model"),
    "huge claimed header": (claim_header, "header of at most"),
    "negative offset": (tensor("[1, 1]", "[-4, 0]"), "cannot be"),
    "huge dimensions": (tensor("[" + "9" * 4000 + ", 1]", "[0, 4]"), "matrix"),
    "deep header": (header(b"[" * 100_000), "nesting"),
    "header without an end": (header(b'{"x": '), "must be JSON"),
    "tensor of no bytes": (tensor("[0, 1]", "[0, 0]"), "matrix"),
    "overlapping tensors": (overlap, "and not at"),
    "long name": (tensor("[1, 1]", "[0, 4]", "layers.0." * 100_000), "only"),
    "a matrix twice": (write_twice, "every matrix once"),
    "FIFO as config": (replaced(ADAPTER_CONFIG, os.mkfifo), "regular file"),
    "FIFO as weights": (replaced(WEIGHTS_FILE, os.mkfifo), "regular file"),
    "folder as weights": (replaced(WEIGHTS_FILE, Path.mkdir), "regular file"),
    "device as config": (replaced(ADAPTER_CONFIG, lambda at: at.symlink_to("/dev/zero")), "regular file"),
    "huge config": (lambda folder: os.truncate(folder / ADAPTER_CONFIG, 2**32), "at most 1048576 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_adapter_is_refused_at_once(case: str, tmp_path: Path) -> None:
    spoil, message = HOSTILE[case]
    folder = write_adapter(tmp_path / "bad")
    spoil(folder)
    started_s = time.monotonic()
    with pytest.raises(InputError, match=message) as caught:
        read(PeftFolder.of(folder))
    assert time.monotonic() - started_s < 1
    assert len(str(caught.value)) < 1000


def test_a_pattern_with_nested_repetition_is_matched_in_linear_time(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "slow", rank_pattern={"([a-z._0-9]+)+:": 5})
    started_s = time.monotonic()
    read(PeftFolder.of(folder))
    assert time.monotonic() - started_s < 1


@pytest.mark.parametrize("part", ["", ADAPTER_CONFIG, WEIGHTS_FILE])
def test_a_part_swapped_for_a_link_is_not_followed(part: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    inside, outside = write_adapter(root / "in"), write_adapter(tmp_path / "out")
    folder = PeftFolder("in", inside / ADAPTER_CONFIG, inside / WEIGHTS_FILE, root)
    read(folder)
    (inside / part).rename(root / "before")
    (inside / part).symlink_to(outside / part)
    assert read(PeftFolder.of(inside)).flat.numel()  # the operator's folders may be links
    with pytest.raises(InputError, match="cannot be read"):
        read(folder)


PARTS = ("q_proj", "layers", ".", ".*", "[0-9]+", "(0|1)", "self_attn", "_", r"\d", "model", "^", "?", "$")


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map("".join))
@settings(max_examples=200, deadline=None)
def test_patterns_match_as_in_peft(pattern: str) -> None:
    modules = [f"layers.{i}.self_attn.{name}_proj" for i in (0, 1, 10) for name in "qkv"]
    try:
        expected = [re.match(rf"(.*\.)?({pattern})$", f"model.{each}") is not None for each in modules]
    except re.error:
        return
    try:
        found = _matches(pattern, modules, "")
    except InputError:  # RE2 refuses some, such as ^?
        return
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_those_that_safetensors_wrote(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.randn(n, 3).to(dtype) for n in (1, 5, 2)}
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    with (tmp_path / "x").open("rb", buffering=0) as opened:
        file = SafetensorsFile(opened, "x")
        got = read_tensors(file, file.entries)
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
