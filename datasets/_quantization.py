"""Formats of a model's weights, as its ``config.json`` describes them.

Source: quantization_config of Hugging Face, compressed-tensors and modelopt, as vLLM reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan.errors import InputError

_KEY: Final = "quantization_config"
_INTEGERS: Final = ("awq", "awq_marlin", "gptq", "gptq_marlin")
_MXFP4: Final = "mxfp4"
_METHODS: Final = ("fp8", "compressed-tensors", "modelopt", _MXFP4, *_INTEGERS)
_BLOCK: Final = 128 * 128
_LAYER: Final = re.compile(r"\blayers\b|self_attn|mlp|_proj")
"""Names of a layer's matrices, in lists of what is not quantized."""
_OTHER: Final = re.compile(r"vision|multi_modal|router|norm|\bgate$|gate\.|e_score")
"""Names of what a layer has beside, or another part of the model."""


@dataclass(frozen=True)
class WeightFormat:
    """Format of the matrices of a model's layers."""

    dtype: str = "bfloat16"
    """bfloat16 for any 16 bits; fp8 with one scale per matrix or channel; fp8_block; int4 and int8."""
    bytes_per_weight: float | None = None
    """With its part of the scales; None: those of the model's dtype."""
    expert_dtype: str | None = None
    """Of the experts, if it is another: mxfp4, with activations of 16 bits."""
    expert_bytes: float | None = None
    kv_bytes: int | None = None
    """Of an element of keys and values, if the file says so."""


def weight_format(config: Mapping[str, Any], location: str) -> WeightFormat:
    """Return the format of the weights that a ``config.json`` describes.

    Raises
    ------
    InputError
        For a method or a type of numbers that is not known, and for layers that are quantized in part.
    """
    given = config.get(_KEY)
    if not given:
        return WeightFormat()
    fields = given if isinstance(given, Mapping) else {"quant_method": given}
    where = f"{location}: {_KEY}"
    method = fields.get("quant_method")
    if method not in _METHODS:
        raise InputError(f"must be one of {', '.join(_METHODS)}", method, f"{where}.quant_method")
    if method == _MXFP4:  # one scale of 8 bits per 32 weights; attention has 16 bits
        return WeightFormat(expert_dtype=_MXFP4, expert_bytes=0.5 + 1.0 / 32)
    _require_whole_layers(fields, where)
    if method == "fp8":
        return _float8(bool(fields.get("weight_block_size")))
    if method in _INTEGERS:
        return _integer(fields, bool(fields.get("zero_point", not fields.get("sym", False))), where, "bits")
    if method == "modelopt":
        return _modelopt(fields, where)
    return _compressed(fields, where)


def _float8(in_blocks: bool, kv_bytes: int | None = None) -> WeightFormat:
    if in_blocks:
        return WeightFormat("fp8_block", 1.0 + 4.0 / _BLOCK, kv_bytes=kv_bytes)
    return WeightFormat("fp8", 1.0, kv_bytes=kv_bytes)


def _integer(
    fields: Mapping[str, Any], has_zero: bool, where: str, key: str, kv_bytes: int | None = None
) -> WeightFormat:
    """Return a format of whole numbers with a scale of 16 bits, and a zero if so, per group of inputs."""
    bits, group = fields.get(key), fields.get("group_size")
    if bits not in (4, 8):
        raise InputError("must be 4 or 8", bits, f"{where}.{key}")
    per_group = 2.0 + (bits / 8.0 if has_zero else 0.0)
    in_groups = isinstance(group, int) and not isinstance(group, bool) and group > 0
    scales = per_group / float(group) if in_groups and group is not None else 0.0
    return WeightFormat(f"int{bits}", bits / 8.0 + scales, kv_bytes=kv_bytes)


def _modelopt(fields: Mapping[str, Any], where: str) -> WeightFormat:
    inner = fields.get("quantization")
    own = inner if isinstance(inner, Mapping) else fields
    if own.get("quant_algo") != "FP8":
        rule = "must be FP8: products of other types are not known"
        raise InputError(rule, own.get("quant_algo"), f"{where}.quant_algo")
    return _float8(False, 1 if own.get("kv_cache_quant_algo") == "FP8" else None)


def _compressed(fields: Mapping[str, Any], where: str) -> WeightFormat:
    groups = fields.get("config_groups")
    weights = [
        group["weights"]
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    if not weights or any(each != weights[0] for each in weights):
        rule = "must have one format of weights for all linear layers"
        raise InputError(rule, len(weights), f"{where}.config_groups")
    own, scheme = weights[0], fields.get("kv_cache_scheme")
    kv_bytes = 1 if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 else None
    if own.get("type") == "float" and own.get("num_bits") == 8:
        return _float8(own.get("strategy") == "block", kv_bytes)
    if own.get("type") == "int":
        return _integer(own, not own.get("symmetric", True), f"{where}.weights", "num_bits", kv_bytes)
    rule = "must be whole numbers of 4 or 8 bits, or floats of 8: products of other types are not known"
    raise InputError(rule, f"{own.get('type')}, {own.get('num_bits')} bits", f"{where}.weights")


def _require_whole_layers(fields: Mapping[str, Any], where: str) -> None:
    """Check that no matrix of a layer is left as it was."""
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
        names = fields.get(key)
        left = [str(each) for each in names if _is_of_a_layer(str(each))] if isinstance(names, list) else []
        if left:
            rule = "must not name linear layers of the language model, which are taken to be quantized"
            raise InputError(rule, left[0], f"{where}.{key}")


def _is_of_a_layer(name: str) -> bool:
    is_other = _OTHER.search(name)
    return bool(_LAYER.search(name)) and not is_other
