"""Model architectures and GPU data sheets by name, read from ``archs.json`` and ``gpus.json``.

Every entry of both files has a ``source`` and a ``licence``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from capplan.errors import InputError
from capplan.spec import ModelArch
from capplan.spec.validation import SpecModel

_FOLDER: Final = Path(__file__).parent

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class GpuSheet(SpecModel):
    """Data sheet of a GPU type."""

    key: str
    """Name on the command line."""
    name: str
    """As the driver reports it."""
    memory_bytes: Annotated[int, Field(gt=0)]
    """As the driver reports it; engines size themselves by it."""
    bytes_per_s: Positive
    """Peak memory bandwidth."""
    flop_per_s: Positive
    """Peak of the tensor cores on 16-bit floats, accumulated in float32, without sparsity."""
    host_bytes_per_s: Positive
    """Peak of the link to the host, one direction."""
    peer_bytes_per_s: Positive
    """Peak of the links to its peers, one direction; the host's link if there are no others."""
    source: str
    licence: str


class _ArchEntry(ModelArch):
    """Architecture with its provenance."""

    source: str
    licence: str


class _ArchFile(SpecModel):
    archs: tuple[_ArchEntry, ...]


class _GpuFile(SpecModel):
    gpus: tuple[GpuSheet, ...]


@functools.cache
def model_archs() -> tuple[ModelArch, ...]:
    """Return every known architecture."""
    entries = _ArchFile.model_validate_json((_FOLDER / "archs.json").read_bytes()).archs
    provenance: Any = {"source", "licence"}
    return tuple(ModelArch.model_validate(entry.model_dump(exclude=provenance)) for entry in entries)


@functools.cache
def gpu_sheets() -> tuple[GpuSheet, ...]:
    """Return every known GPU type."""
    return _GpuFile.model_validate_json((_FOLDER / "gpus.json").read_bytes()).gpus


def model_arch(name: str) -> ModelArch:
    """Return an architecture by its short name, such as ``llama-3.1-8b``, or by its Hugging Face id.

    Raises
    ------
    InputError
        For an unknown name; the message lists the known ones.
    """
    for arch in model_archs():
        if name.lower() == arch.name.lower() or name in arch.hf_ids:
            return arch
    known = ", ".join(arch.name.lower() for arch in model_archs())
    raise InputError(f"must be one of {known}; others by --model-config", name, "--model")


def gpu_sheet(key: str) -> GpuSheet:
    """Return the data sheet of a GPU type.

    Raises
    ------
    InputError
        For an unknown type; the message lists the known ones.
    """
    for sheet in gpu_sheets():
        if sheet.key == key:
            return sheet
    raise InputError(f"must be one of {', '.join(sheet.key for sheet in gpu_sheets())}", key, "--gpu")
