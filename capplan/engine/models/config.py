"""Model configurations: Hugging Face ``config.json`` of Llama (2, 3.x) and Qwen2/2.5, and built-in models.

Both families are one decoder: RMS norms, rotary positions, grouped-query attention, a gated MLP. Qwen2 adds
biases to q, k and v. A config that requires anything else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from capplan.errors import InputError
from capplan.spec import ModelArch, read_text

_ROPE_TYPES: Final = ("default", "linear", "llama3")
_BUILTIN_FILE: Final = Path(__file__).with_name("builtin.json")
"""Fields of the ``config.json`` that each model is published with on Hugging Face."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes
    ----------
    theta
        Base of the geometric series of wavelengths.
    kind
        Scaling for long contexts. ``linear``: all frequencies divided by `factor`; ``llama3``: only the low
        ones, with a smooth transition between ``original_positions / low_freq_factor`` and ``.../
        high_freq_factor``.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a model."""

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_eps: float = 1e-6
    rope: Rope = Rope()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "vocab_size")
        for field in sizes:
            if getattr(self, field) < 1:
                raise InputError("must be >= 1", getattr(self, field), f"{self.name}: {field}")
        if self.heads % self.kv_heads:
            raise InputError(f"must divide the {self.heads} heads", self.kv_heads, f"{self.name}: kv_heads")
        if self.head_dim % 2:
            raise InputError(
                "must be even: rotary positions turn pairs", self.head_dim, f"{self.name}: head_dim"
            )

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads."""
        return self.kv_heads * self.head_dim

    def arch(self, dtype_bytes: int) -> ModelArch:
        """Return the architecture for the memory model of `capplan.serving`."""
        return ModelArch(
            name=self.name,
            hf_ids=(self.name,),
            layers=self.layers,
            hidden_size=self.hidden_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            tied_embeddings=self.tied_embeddings,
            dtype_bytes=dtype_bytes,
        )


def read_config(path: str | Path) -> ModelConfig:
    """Read a ``config.json``, or the one in a model's folder.

    Raises
    ------
    InputError
        If it cannot be read, is of another family, or requires an unsupported feature.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        fields = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise InputError(f"must be JSON: {error.msg}", location=f"{file}:{error.lineno}") from None
    if not isinstance(fields, dict):
        raise InputError("must be a JSON object", location=str(file))
    config = config_from_hf(fields, str(file))
    beside = file.with_name("generation_config.json")
    return config if not beside.is_file() else replace(config, eos_token_ids=_all_stops(config, beside))


def _all_stops(config: ModelConfig, file: Path) -> tuple[int, ...]:
    """Return the stop tokens of both files: chat models have more of them for generation."""
    try:
        more = json.loads(read_text(file)).get("eos_token_id")
    except (json.JSONDecodeError, AttributeError):
        raise InputError("must be a JSON object", location=str(file)) from None
    return tuple(dict.fromkeys((*config.eos_token_ids, *_token_ids(more, f"{file}: eos_token_id"))))


def config_from_hf(fields: Mapping[str, Any], location: str = "config.json") -> ModelConfig:
    """Return the model of a Hugging Face config; absent fields have its defaults."""
    family = fields.get("model_type")
    if family not in ("llama", "qwen2"):
        raise InputError("must be llama or qwen2", family, f"{location}: model_type")
    _refuse_unknown_features(fields, location)
    heads = _whole_number(fields, "num_attention_heads", location)
    hidden = _whole_number(fields, "hidden_size", location)
    attention_bias = bool(fields.get("attention_bias", False))
    return ModelConfig(
        name=str(fields.get("_name_or_path") or Path(location).parent.name or family),
        layers=_whole_number(fields, "num_hidden_layers", location),
        hidden_size=hidden,
        heads=heads,
        kv_heads=_whole_number(fields, "num_key_value_heads", location, heads),
        head_dim=_whole_number(fields, "head_dim", location, hidden // heads),
        intermediate_size=_whole_number(fields, "intermediate_size", location),
        vocab_size=_whole_number(fields, "vocab_size", location),
        max_positions=_whole_number(
            fields, "max_position_embeddings", location, 2048 if family == "llama" else 32768
        ),
        rms_eps=_number(fields, "rms_norm_eps", location, 1e-6),
        rope=_rope(fields, location),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family == "llama" and attention_bias,
        mlp_bias=family == "llama" and bool(fields.get("mlp_bias", False)),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_token_ids(fields.get("eos_token_id"), f"{location}: eos_token_id"),
    )


def _token_ids(value: Any, location: str) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in ids):
        raise InputError("must be a token id or a list of them", value, location)
    return tuple(ids)


def _number(fields: Mapping[str, Any], key: str, location: str, default: float) -> float:
    value = fields.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError("must be a number", value, f"{location}: {key}")
    return float(value)


def _whole_number(fields: Mapping[str, Any], key: str, location: str, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError("must be a whole number >= 1", value, f"{location}: {key}")
    return value


def _refuse_unknown_features(fields: Mapping[str, Any], location: str) -> None:
    if fields.get("hidden_act", "silu") != "silu":
        raise InputError("must be silu", fields["hidden_act"], f"{location}: hidden_act")
    kinds = fields.get("layer_types") or ["full_attention"]
    if fields.get("use_sliding_window") or any(kind != "full_attention" for kind in kinds):
        raise InputError(
            "must be off: only full attention is implemented", True, f"{location}: use_sliding_window"
        )
    if fields.get("quantization_config") is not None:
        raise InputError(
            "must be absent: weights are float32, float16 or bfloat16",
            location=f"{location}: quantization_config",
        )


def _rope(fields: Mapping[str, Any], location: str) -> Rope:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters` (transformers 5)."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise InputError("must be a JSON object", scaling, f"{location}: rope_scaling")
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in _ROPE_TYPES:
        raise InputError(f"must be one of {', '.join(_ROPE_TYPES)}", kind, f"{location}: rope_type")
    if (scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0) != 1.0:
        raise InputError("must be 1", location=f"{location}: partial_rotary_factor")
    scaling = {key: value for key, value in scaling.items() if value is not None}
    known = {key: value for key, value in {**fields, **scaling}.items() if value is not None}
    positions = _number(known, "original_max_position_embeddings", location, 0.0)
    return Rope(
        theta=_number(known, "rope_theta", location, 10000.0),
        kind=kind,
        factor=_number(scaling, "factor", location, 1.0),
        low_freq_factor=_number(scaling, "low_freq_factor", location, 1.0),
        high_freq_factor=_number(scaling, "high_freq_factor", location, 4.0),
        original_positions=int(positions or _number(fields, "max_position_embeddings", location, 8192)),
    )


@cache
def builtin_models() -> Mapping[str, ModelConfig]:
    """Return the built-in models by Hugging Face id; ``tiny-llama`` is for tests and first tries."""
    documents = json.loads(read_text(_BUILTIN_FILE))
    models = {name: config_from_hf({"_name_or_path": name, **each}, name) for name, each in documents.items()}
    return MappingProxyType(models)


def builtin_config(name: str) -> ModelConfig:
    """Return a built-in model.

    Raises
    ------
    InputError
        If it does not exist.
    """
    models = builtin_models()
    if name not in models:
        raise InputError(f"must be a folder with a config.json, or one of {', '.join(models)}", name, "model")
    return models[name]
