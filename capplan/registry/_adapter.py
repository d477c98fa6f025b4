"""Entry of an adapter in a registry, and its description from a PEFT folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, BinaryIO, Final, TypeAlias

from pydantic import AfterValidator, Field

from capplan.errors import InputError
from capplan.spec import (
    ADAPTER_CONFIG,
    WEIGHTS_FILE,
    Count,
    Many,
    ModelId,
    Name,
    Natural,
    PeftFiles,
    Rank,
    Sha256,
    SpecModel,
    TargetModules,
    Text,
    open_regular,
    require_described,
    rule_error,
)

ADAPTER_FILES: Final = (ADAPTER_CONFIG, WEIGHTS_FILE)
"""Files of an adapter, in the order of its digest."""

_PART_BYTES: Final = 2**20


_MAX_LOCATION: Final = 8192


def _check_location(value: str) -> str:
    if len(value) > _MAX_LOCATION:
        raise rule_error(f"must have at most {_MAX_LOCATION} characters")
    if "@" in value.partition("://")[2].partition("/")[0]:
        raise rule_error("must not hold a user or password: lists, plans and reports show it")
    return value


Location: TypeAlias = Annotated[Text, AfterValidator(_check_location)]


class RegisteredAdapter(SpecModel):
    """Adapter in a registry."""

    name: Name = Field(description="Name of the adapter, as requests give it.")
    base_model: ModelId = Field(description="Hugging Face id of the model that the adapter belongs to.")
    rank: Rank = Field(description="Largest LoRA rank over its matrices, 1 to 512.")
    target_modules: TargetModules | None = Field(
        default=None, description="Linear layers that it has matrices for; null: all that the engine adapts."
    )
    size_bytes: Count | None = Field(default=None, description="Bytes of its files; null: unknown.")
    digest: Sha256 | None = Field(
        default=None,
        description="SHA-256 of the output of sha256sum adapter_config.json adapter_model.safetensors; null: "
        "unknown, so that servers cannot fetch it.",
    )
    location: Location = Field(description="Folder, URL or other reference of its files.")
    holders: Many[Name] = Field(default=(), description="Servers that store it.")


class RegisteredServer(SpecModel):
    """Server in a registry."""

    name: Name = Field(description="Name of the server.")
    url: Location = Field(description="Where other servers reach it.")
    owner: Text | None = Field(default=None, description="Identity of the running server.")
    renewals: Natural = Field(default=0, description="Number that grows while it runs.")


def read_adapter(
    name: str, folder: str | os.PathLike[str], base_model: str | None = None
) -> RegisteredAdapter:
    """Return the entry of an adapter in a PEFT folder; its location is the absolute path.

    Parameters
    ----------
    base_model
        None: ``base_model_name_or_path`` of the folder's ``adapter_config.json``.

    Raises
    ------
    InputError
        If the files cannot be read, do not hold a plain LoRA adapter, or name no base model.
    """
    path = Path(folder).resolve()
    files = PeftFiles.of(path)
    found = files.describe()
    base_model = base_model or found.base_model
    if not base_model:
        where = f"{files.config}: base_model_name_or_path"
        raise InputError("is required, or --base-model", location=where)
    hashed = [_file_digest(file) for file in (files.config, files.weights)]
    adapter = RegisteredAdapter(
        name=name,
        base_model=base_model,
        rank=found.rank,
        target_modules=found.target_modules,
        size_bytes=sum(size_bytes for size_bytes, _ in hashed),
        digest=digest_of(dict(zip(ADAPTER_FILES, (each for _, each in hashed), strict=True))),
        location=str(path),
    )
    require_described(found, found.rank, None, base_model, lambda key: f"adapter {name}: {key}")
    return adapter


def digest_of(files: Mapping[str, str]) -> str:
    """Return the digest of an adapter from the SHA-256 of each of its files, in hexadecimal."""
    lines = "".join(f"{files[name]}  {name}\n" for name in ADAPTER_FILES)
    return hashlib.sha256(lines.encode()).hexdigest()


def file_digest(file: BinaryIO) -> tuple[int, str]:
    """Return the remaining bytes of a file and their SHA-256."""
    total_bytes, hashed = 0, hashlib.sha256()
    while part := file.read(_PART_BYTES):
        total_bytes += len(part)
        hashed.update(part)
    return total_bytes, hashed.hexdigest()


def _file_digest(file: Path) -> tuple[int, str]:
    with open_regular(file, None, str(file)) as opened:
        return file_digest(opened)
