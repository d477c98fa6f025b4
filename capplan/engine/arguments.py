"""What callers of the engine hand over, turned into what it works with, or refused in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capplan.engine.lora.sources import AdapterSource, PeftFolder, RandomAdapter
from capplan.engine.request import SamplingParams
from capplan.engine.settings import EngineSettings
from capplan.errors import InputError
from capplan.spec.base import unknown_key

Prompt = str | Sequence[int]


def engine_settings(fields: Mapping[str, Any]) -> EngineSettings:
    """Return settings from keyword arguments."""
    _require_fields(EngineSettings, fields)
    return EngineSettings(**fields)


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters from keyword arguments."""
    _require_fields(SamplingParams, fields)
    return SamplingParams(**fields)


def _require_fields(kind: type[EngineSettings] | type[SamplingParams], fields: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in names:
            raise InputError(unknown_key(name, names), location=name)


def adapter_source(value: str | Path | int, seed: int) -> AdapterSource:
    """Return where an adapter comes from: a folder that PEFT wrote, or random numbers of a given rank."""
    if isinstance(value, int):
        if isinstance(value, bool) or not 1 <= value <= 512:
            raise InputError("must be a rank from 1 to 512, or a folder", value, "adapters")
        return RandomAdapter(value, seed)
    return PeftFolder(Path(value))


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return several prompts; a single one counts as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]
