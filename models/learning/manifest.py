"""What a folder of training data says of itself: what the twin was asked, and which files hold its answers.

It names no time, machine or number of workers, so that equal questions give equal folders, byte for byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, Field, ValidationError

from capplan.errors import InputError
from capplan.spec import read_text

MANIFEST: Final = "manifest.json"


class _Part(BaseModel, frozen=True, strict=True, extra="forbid"):
    """Read-only, and refuses what it does not know."""


class Asked(_Part):
    """What the twin was asked; all of the data follows from it."""

    design: str
    seed: int = Field(ge=0)
    scenarios: int = Field(ge=1)
    duration_s: float = Field(gt=0, allow_inf_nan=False)
    """Horizon of each simulation in seconds."""
    profile: str
    profile_digest: str
    """Of the numbers that throughput and starvation depend on."""
    features: tuple[str, ...]
    probe: tuple[str, ...]
    """Features of fixed scenarios (`capplan.models.surrogates.probe`): what the names mean."""
    capplan: str
    """Version of the package, and so of the twin."""


class Shard(_Part):
    """One file of rows."""

    file: str = Field(pattern=r"^part-\d{5,}\.parquet$")
    rows: int = Field(ge=0)
    sha256: str


class Answered(_Part):
    """What a finished dataset holds."""

    rows: int = Field(ge=0)
    refused_for_memory: int = Field(ge=0)
    """Scenarios without a row: the engine would not start."""
    without_requests: int = Field(ge=0)
    """Scenarios without a row: nobody asked anything."""
    shards: tuple[Shard, ...]


class Manifest(_Part):
    """The document in ``manifest.json``."""

    format: Literal[1] = 1
    asked: Asked
    answered: Answered | None = None
    """None until all is answered."""

    def to_json(self) -> str:
        """Return the text of the file."""
        return self.model_dump_json(indent=2) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """Return what a folder says of itself; None when it says nothing.

    Raises
    ------
    InputError
        When the file cannot be read or is none of ours.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return Manifest.model_validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        told = f"{where}: {first['msg']}" if where else first["msg"]
        raise InputError(f"is no manifest of a dataset, or damaged: {told}", location=str(path)) from None
