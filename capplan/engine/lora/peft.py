"""Adapters in PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from capplan.engine.lora.adapter import MODULES, AdapterLayout, HostAdapter, pack, ranks_of
from capplan.errors import InputError
from capplan.spec.files import read_json_object

_MUST_BE_OFF = (
    "alora_invocation_tokens",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)

_REPLACES_BASE = re.compile(r"pissa.*|corda|olora|loftq|lora_ga")
"""Values of `init_lora_weights` with which PEFT replaces the weights of the base model."""

_TENSOR = re.compile(r"(?:.*\.)?(layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])(?:\.default)?\.weight")

Place = tuple[int, int]
"""(layer, module)"""


class _TensorEntry(NamedTuple):
    name: str
    """Of the tensor."""
    module: str
    shape: tuple[int, ...]


class _Pair(NamedTuple):
    a: _TensorEntry
    b: _TensorEntry
    scale: float


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Any, dict[Place, _Pair]]]:
    """Open the tensors of a PEFT folder; yield them with A, B and scale of every (layer, module).

    Raises
    ------
    InputError
        If a file cannot be read or is truncated, or the engine does not support the adapter's kind: DoRA,
        trained biases, embeddings, whole modules.
    """
    config = _read_config(folder / "adapter_config.json")
    file = folder / "adapter_model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            halves = _halves(opened, file)
            yield (
                opened,
                {
                    place: _Pair(a, halves["B"][place], _scale(config, a, file))
                    for place, a in halves["A"].items()
                },
            )
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read: {error}", location=str(file)) from None


def _halves(opened: Any, file: Path) -> dict[str, dict[Place, _TensorEntry]]:
    """Return the tensors A and B of every (layer, module)."""
    halves: dict[str, dict[Place, _TensorEntry]] = {"A": {}, "B": {}}
    for name in opened.keys():  # noqa: SIM118 - no mapping
        match = _TENSOR.fullmatch(name)
        if match is None or match[3] not in MODULES:
            raise InputError(f"must hold lora_A and lora_B of {', '.join(MODULES)} only", name, str(file))
        shape = tuple(opened.get_slice(name).get_shape())
        if len(shape) != 2:
            raise InputError("must be a matrix", shape, f"{file}: {name}")
        halves[match[4]][int(match[2]), MODULES.index(match[3])] = _TensorEntry(name, match[1], shape)
    for layer, module in halves["A"].keys() ^ halves["B"].keys():
        raise InputError(
            "must hold both lora_A and lora_B", location=f"{file}: layer {layer} {MODULES[module]}"
        )
    return halves


def _read_config(file: Path) -> dict[str, Any]:
    config = read_json_object(file)
    if config.get("peft_type") != "LORA":
        raise InputError("must be a LoRA adapter: peft_type LORA", location=str(file))
    for key in _MUST_BE_OFF:
        if config.get(key):
            raise InputError(
                "must be off: the engine does not run such adapters", config[key], f"{file}: {key}"
            )
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and _REPLACES_BASE.fullmatch(initial):
        rule = "must be converted to plain LoRA: it replaces the weights of the base model"
        raise InputError(rule, initial, f"{file}: init_lora_weights")
    if config.get("bias", "none") != "none":
        raise InputError("must be none", config["bias"], f"{file}: bias")
    return config


def _scale(config: dict[str, Any], a: _TensorEntry, file: Path) -> float:
    location, rank = f"{file}: {a.name}", a.shape[0]
    declared = _by_pattern(config.get("rank_pattern"), a.module, config.get("r", 8), location)
    if declared != rank or rank < 1:
        raise InputError(f"must have the rank {declared:g} that adapter_config.json says", rank, location)
    alpha = _by_pattern(config.get("alpha_pattern"), a.module, config.get("lora_alpha", 8), location)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Any, module: str, default: Any, location: str) -> float:
    """Return the value of the first pattern that matches the end of a module's name, as in PEFT."""
    value = default
    if not isinstance(patterns or {}, dict):
        raise InputError("rank_pattern and alpha_pattern must be mappings", patterns, location)
    for pattern, other in (patterns or {}).items():
        if _matches(pattern, module, location):
            value = other
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError("rank and alpha must be finite numbers", value, location)
    return float(value)


def _matches(pattern: str, module: str, location: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({pattern})$", f"model.{module}") is not None
    except re.error:
        raise InputError("must be a regular expression", pattern, location) from None


@dataclass(frozen=True)
class PeftFolder:
    """PEFT folder with ``adapter_config.json`` and ``adapter_model.safetensors``."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def ranks(self, layout: AdapterLayout) -> NDArray[np.int64]:
        """Return the rank on each module, shape (layers, modules), from the file's header.

        Raises
        ------
        InputError
            If the adapter cannot be read, or does not fit the model.
        """
        with _opened(self.path) as (_, pairs):
            shapes = {place: (pair.a.shape, pair.b.shape) for place, pair in pairs.items()}
        return ranks_of(layout, shapes, str(self))

    def read(self, layout: AdapterLayout, dtype: torch.dtype, pin: bool) -> HostAdapter:
        """Return the adapter, in pinned memory if `pin`.

        B is multiplied by alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        """
        with _opened(self.path) as (opened, pairs):
            matrices = {
                place: (opened.get_tensor(a.name).float(), opened.get_tensor(b.name).float() * scale)
                for place, (a, b, scale) in pairs.items()
            }
        return pack(layout, matrices, dtype, pin, str(self))
