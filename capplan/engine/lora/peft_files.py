"""Reading what PEFT writes: ``adapter_config.json`` and ``adapter_model.safetensors``.

The scale (alpha / rank, or alpha / sqrt(rank) with rsLoRA) is multiplied into B here, once. Variants that are
more than two matrices beside a linear map (DoRA, trained biases, embeddings, whole modules) are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from capplan.engine.lora.layout import MODULES
from capplan.errors import InputError
from capplan.spec import read_text

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
"""Values of `init_lora_weights` with which PEFT puts a remainder in place of the model's own weights."""
_TENSOR = re.compile(r"(?:.*\.)?(layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])(?:\.default)?\.weight")

Place = tuple[int, int]
"""(layer, module)"""


class _Entry(NamedTuple):
    """A tensor of the file: its full name, the module's, and its shape."""

    name: str
    module: str
    shape: tuple[int, ...]


def read_shapes(folder: Path) -> dict[Place, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes of A and B of every (layer, module) of an adapter, from the file's header alone.

    Raises
    ------
    InputError
        When a file cannot be read or is cut off, or the adapter is of a kind that the engine does not run.
    """
    with _opened(folder) as (opened, file, config):
        pairs = _pairs(opened, file)
        for a, _ in pairs.values():
            _scale(config, a, file)
        return {place: (a.shape, b.shape) for place, (a, b) in pairs.items()}


def read_peft(folder: Path) -> dict[Place, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and scaled B of every (layer, module) of an adapter, in float32; raises as `read_shapes`."""
    with _opened(folder) as (opened, file, config):
        return {
            place: (
                opened.get_tensor(a.name).float(),
                opened.get_tensor(b.name).float() * _scale(config, a, file),
            )
            for place, (a, b) in _pairs(opened, file).items()
        }


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Any, Path, dict[str, Any]]]:
    """Open an adapter: (tensors, their file, config)."""
    config = _read_config(folder / "adapter_config.json")
    file = folder / "adapter_model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened, file, config
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read: {error}", location=str(file)) from None


def _pairs(opened: Any, file: Path) -> dict[Place, tuple[_Entry, _Entry]]:
    halves: tuple[dict[Place, _Entry], ...] = ({}, {})
    for name in opened.keys():  # noqa: SIM118 - no mapping
        match = _TENSOR.fullmatch(name)
        if match is None or match[3] not in MODULES:
            raise InputError(f"must hold lora_A and lora_B of {', '.join(MODULES)} only", name, str(file))
        shape = tuple(opened.get_slice(name).get_shape())
        if len(shape) != 2:
            raise InputError("must be a matrix", shape, f"{file}: {name}")
        place = int(match[2]), MODULES.index(match[3])
        halves["AB".index(match[4])][place] = _Entry(name, match[1], shape)
    if halves[0].keys() != halves[1].keys():
        layer, module = next(iter(halves[0].keys() ^ halves[1].keys()))
        raise InputError(
            "must hold both lora_A and lora_B", location=f"{file}: layer {layer} {MODULES[module]}"
        )
    return {place: (a, halves[1][place]) for place, a in halves[0].items()}


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise InputError(f"must be JSON: {error.msg}", location=f"{file}:{error.lineno}") from None
    except RecursionError:
        raise InputError("must be JSON that is not nested so deeply", location=str(file)) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InputError("must be a LoRA adapter: peft_type LORA", location=str(file))
    for key in _MUST_BE_OFF:
        if config.get(key):
            raise InputError(
                "must be off: the engine does not run such adapters", config[key], f"{file}: {key}"
            )
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and _REPLACES_BASE.fullmatch(initial):
        rule = "must be converted to plain LoRA: it comes with a base model of its own"
        raise InputError(rule, initial, f"{file}: init_lora_weights")
    if config.get("bias", "none") != "none":
        raise InputError("must be none", config["bias"], f"{file}: bias")
    return config


def _scale(config: dict[str, Any], a: _Entry, file: Path) -> float:
    location, rank = f"{file}: {a.name}", a.shape[0]
    declared = _by_pattern(config.get("rank_pattern"), a.module, config.get("r", 8), location)
    if declared != rank or rank < 1:
        raise InputError(f"must have the rank {declared:g} that adapter_config.json says", rank, location)
    alpha = _by_pattern(config.get("alpha_pattern"), a.module, config.get("lora_alpha", 8), location)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Any, module: str, default: Any, location: str) -> float:
    """Return the value of the first pattern that a module's name ends with, as PEFT chooses it."""
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
