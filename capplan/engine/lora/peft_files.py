"""Reading what PEFT writes: ``adapter_config.json`` and ``adapter_model.safetensors``.

The scale (alpha / rank, or alpha / sqrt(rank) with rsLoRA) is multiplied into B here, once. Variants that are
more than two matrices beside a linear map (DoRA, trained biases, embeddings, whole modules) are refused.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

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
_TENSOR = re.compile(r"(?:.*\.)?(layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])(?:\.default)?\.weight")


def read_peft(folder: Path) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Return A and scaled B of every (layer, module) of an adapter, in float32.

    Raises
    ------
    InputError
        When a file cannot be read, or the adapter is of a kind that the engine does not run.
    """
    config = _read_config(folder / "adapter_config.json")
    file = folder / "adapter_model.safetensors"
    halves: tuple[dict[tuple[int, int], torch.Tensor], ...] = ({}, {})
    scales: dict[tuple[int, int], float] = {}
    for name, tensor in _read_tensors(file):
        match = _TENSOR.fullmatch(name)
        if match is None or match[3] not in MODULES:
            raise InputError(f"must hold lora_A and lora_B of {', '.join(MODULES)} only", name, str(file))
        place = int(match[2]), MODULES.index(match[3])
        if tensor.ndim != 2:
            raise InputError("must be a matrix", tuple(tensor.shape), f"{file}: {name}")
        halves["AB".index(match[4])][place] = tensor.float()
        if match[4] == "A":
            scales[place] = _scale(config, match[1], tensor.shape[0], f"{file}: {name}")
    if halves[0].keys() != halves[1].keys():
        layer, module = next(iter(halves[0].keys() ^ halves[1].keys()))
        raise InputError(
            "must hold both lora_A and lora_B", location=f"{file}: layer {layer} {MODULES[module]}"
        )
    return {place: (a, halves[1][place] * scales[place]) for place, a in halves[0].items()}


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise InputError(f"must be JSON: {error.msg}", location=f"{file}:{error.lineno}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InputError("must be a LoRA adapter: peft_type LORA", location=str(file))
    for key in _MUST_BE_OFF:
        if config.get(key):
            raise InputError(
                "must be off: the engine does not run such adapters", config[key], f"{file}: {key}"
            )
    if config.get("bias", "none") != "none":
        raise InputError("must be none", config["bias"], f"{file}: bias")
    return config


def _read_tensors(file: Path) -> list[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            return [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read: {error}", location=str(file)) from None


def _scale(config: dict[str, Any], module: str, rank: int, location: str) -> float:
    declared = _by_pattern(config.get("rank_pattern"), module, config.get("r", 8), location)
    if declared != rank:
        raise InputError(f"must have the rank {declared:g} that adapter_config.json says", rank, location)
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8), location)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Any, module: str, default: Any, location: str) -> float:
    """Return the value of the first pattern that a module's name ends with, as PEFT chooses it."""
    value = default
    for pattern, other in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", f"model.{module}"):
            value = other
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError("rank and alpha must be finite numbers", value, location)
    return float(value)
