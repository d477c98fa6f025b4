"""Model configurations: Hugging Face ``config.json`` of Llama (2, 3.x) and Qwen2/2.5, built-in ones, shards.

Both families are one decoder: RMS norms, rotary positions, grouped-query attention, a gated MLP. Qwen2 adds
biases to q, k and v. A config with any other feature is refused.

Under tensor parallelism a model is cut as vLLM cuts it. The linear maps before attention and inside the MLP
(q, k, v, gate, up) are cut by output, those after them (o, down) by input, so that a layer needs two sums
over all ranks. Embedding and head are cut by token. Ranks share a KV head if there are fewer KV heads than
ranks. Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from pydantic import model_validator

from capplan.datasets import arch_of, flag, hf_config, whole_number
from capplan.errors import InputError
from capplan.spec import ModelArch, read_json_object, rule_error

_POSITIONS: Final = "max_position_embeddings"
_MOST_NUMBER: Final = 1e15  # of rope_theta and factors; the largest in use is 1e9
_MOST_ID: Final = 2**31 - 1
_ROPE_TYPES: Final = ("default", "linear", "llama3")
_BUILTIN: Final = (
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
)
"""Models of `capplan.datasets._catalog` with random weights."""
_TINY: Final = MappingProxyType(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 320,
    }
)


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


class ModelConfig(ModelArch):
    """Architecture of a model with the details of its forward pass."""

    hf_ids: tuple[str, ...] = ()
    max_positions: int
    rms_eps: float = 1e-6
    rope: Rope = Rope()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.heads % self.kv_heads:
            raise rule_error(f"must divide the {self.heads} heads", key=("kv_heads",), value=self.kv_heads)
        if self.head_dim % 2:
            rule = "must be even: rotary positions turn pairs"
            raise rule_error(rule, key=("head_dim",), value=self.head_dim)
        return self

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
        fields = {name: getattr(self, name) for name in ModelArch.model_fields}
        own = {"hf_ids": (self.name,), "dtype_bytes": dtype_bytes, "lora_on_embeddings": False}
        return ModelArch(**(fields | own))


def read_config(path: str | Path) -> ModelConfig:
    """Read a ``config.json``, or the one in a model's folder.

    Raises
    ------
    InputError
        If it cannot be read, is of another family, or requires an unsupported feature.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    config = config_from_hf(read_json_object(file), str(file))
    beside = file.with_name("generation_config.json")
    if not beside.is_file():
        return config
    # Chat models have more stop tokens for generation.
    more = _token_ids(read_json_object(beside).get("eos_token_id"), f"{beside}: eos_token_id")
    return config.replace(eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def config_from_hf(fields: Mapping[str, Any], location: str = "config.json") -> ModelConfig:
    """Return the model of a Hugging Face config; absent fields have its defaults."""
    family = fields.get("model_type")
    if family not in ("llama", "qwen2"):
        raise InputError("must be llama or qwen2", family, f"{location}: model_type")
    _refuse_unknown_features(fields, location)
    name = str(fields.get("_name_or_path") or Path(location).parent.name or family)
    attention_bias = flag(fields, "attention_bias", location)
    default = 2048 if family == "llama" else 32768
    positions = whole_number(fields, _POSITIONS, location, default)
    arch = arch_of(fields, name, location).model_dump()
    if arch["head_dim"] % 2:
        rule = "must be even: rotary positions turn pairs"
        raise InputError(rule, arch["head_dim"], f"{location}: head_dim")
    return ModelConfig(
        **(arch | {"name": name, "max_positions": positions}),
        rms_eps=_number(fields, "rms_norm_eps", location, 1e-6, most=1.0),
        rope=_rope(fields, location),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family == "llama" and attention_bias,
        mlp_bias=family == "llama" and flag(fields, "mlp_bias", location),
        dtype=_dtype(fields, location),
        eos_token_ids=_token_ids(fields.get("eos_token_id"), f"{location}: eos_token_id"),
    )


def _token_ids(value: Any, location: str) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(each) is not int or abs(each) > _MOST_ID for each in ids):
        raise InputError("must be a token id or a list of them", value, location)
    return tuple(ids)


def _number(
    fields: Mapping[str, Any], key: str, location: str, default: float, most: float = _MOST_NUMBER
) -> float:
    value = default if fields.get(key) is None else fields[key]
    if type(value) not in (int, float) or not 0 < value <= most:
        raise InputError(f"must be a number above 0, at most {most:g}", value, f"{location}: {key}")
    return float(value)


def _dtype(fields: Mapping[str, Any], location: str) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    name = "float32" if fields.get(key) is None else fields[key]
    if not isinstance(name, str):
        raise InputError("must be the name of a dtype", name, f"{location}: {key}")
    return name.removeprefix("torch.")


def _refuse_unknown_features(fields: Mapping[str, Any], location: str) -> None:
    if fields.get("hidden_act", "silu") != "silu":
        raise InputError("must be silu", fields["hidden_act"], f"{location}: hidden_act")
    kinds = fields.get("layer_types") or ["full_attention"]
    if not isinstance(kinds, list):
        raise InputError("must be a list of names", kinds, f"{location}: layer_types")
    if any(kind != "full_attention" for kind in kinds):
        raise InputError("must be full_attention, for all layers", kinds, f"{location}: layer_types")
    if flag(fields, "use_sliding_window", location):
        rule = "must be off: only full attention is implemented"
        raise InputError(rule, True, f"{location}: use_sliding_window")
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
    key = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = "default" if scaling.get(key) is None else scaling[key]
    if kind not in _ROPE_TYPES:
        raise InputError(f"must be one of {', '.join(_ROPE_TYPES)}", kind, f"{location}: {key}")
    if (scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0) != 1.0:
        raise InputError("must be 1", location=f"{location}: partial_rotary_factor")
    scaling = {key: value for key, value in scaling.items() if value is not None}
    known = {key: value for key, value in {**fields, **scaling}.items() if value is not None}
    scales = (
        _number(scaling, "low_freq_factor", location, 1.0),
        _number(scaling, "high_freq_factor", location, 4.0),
    )
    if kind == "llama3" and scales[0] >= scales[1]:
        raise InputError(
            f"must be above low_freq_factor, {scales[0]:g}", scales[1], f"{location}: high_freq_factor"
        )
    positions = whole_number(fields, _POSITIONS, location, 8192)
    return Rope(
        theta=_number(known, "rope_theta", location, 10000.0),
        kind=kind,
        factor=_number(scaling, "factor", location, 1.0),
        low_freq_factor=scales[0],
        high_freq_factor=scales[1],
        original_positions=whole_number(known, f"original_{_POSITIONS}", location, positions),
    )


@cache
def builtin_models() -> Mapping[str, ModelConfig]:
    """Return the built-in models by Hugging Face id; ``tiny-llama`` is for tests and first tries."""
    configs = {"tiny-llama": _TINY, **{name: hf_config(name) or {} for name in _BUILTIN}}
    models = {name: config_from_hf({"_name_or_path": name, **each}, name) for name, each in configs.items()}
    return MappingProxyType(models)


def model_config(model: str | Path) -> ModelConfig:
    """Return the configuration of a model's folder, of a ``config.json``, or of a built-in model.

    Raises
    ------
    InputError
        If there is none, or it is not supported.
    """
    if Path(model).exists():
        return read_config(model)
    models, name = builtin_models(), str(model)
    if name not in models:
        raise InputError(f"must be a folder with a config.json, or one of {', '.join(models)}", name, "model")
    return models[name]


class ShardParts(NamedTuple):
    """Dimensions of the model that one rank computes."""

    query: slice
    """Of all query heads."""
    kv: slice
    """Of all key heads, and of all value heads."""
    inner: slice
    """Of the MLP."""


@dataclass(frozen=True)
class ModelShard:
    """Part of a model.

    Attributes
    ----------
    rank
        From 0.
    size
        Number of ranks: GPUs of one instance.
    """

    rank: int = 0
    size: int = 1

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the architecture of the part: its heads and its width of the MLP."""
        if self.size == 1:
            return config
        return config.replace(
            heads=config.heads // self.size,
            kv_heads=max(1, config.kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )

    def parts(self, config: ModelConfig) -> ShardParts:
        """Return the dimensions of the part."""
        first_kv_head = self.rank * config.kv_heads // self.size
        kv_heads = max(1, config.kv_heads // self.size)
        kv = slice(first_kv_head * config.head_dim, (first_kv_head + kv_heads) * config.head_dim)
        return ShardParts(self._part(config.query_size), kv, self._part(config.intermediate_size))

    def tokens(self, config: ModelConfig) -> slice:
        """Return the tokens of the vocabulary whose rows of embedding and head the part holds.

        The last ranks have fewer if the ranks do not divide the vocabulary.
        """
        rows = self.token_rows(config)
        return slice(min(self.rank * rows, config.vocab_size), min((self.rank + 1) * rows, config.vocab_size))

    def token_rows(self, config: ModelConfig) -> int:
        """Return the rows of embedding and head on each rank; rows without a token are zeros."""
        return -(-config.vocab_size // self.size)

    def _part(self, whole: int) -> slice:
        size = whole // self.size
        return slice(self.rank * size, (self.rank + 1) * size)


WHOLE: Final = ModelShard()


def require_shardable(config: ModelConfig, size: int) -> None:
    """Check that a model can be cut into equal parts.

    Raises
    ------
    InputError
        If heads or MLP cannot be divided by the number of ranks, or KV heads neither divided nor shared
        equally.
    """
    for name, whole in (("heads", config.heads), ("MLP dimensions", config.intermediate_size)):
        if whole % size:
            raise InputError(f"must divide the {whole} {name} of {config.name}", size, "tensor_parallel_size")
    if config.kv_heads % size and size % config.kv_heads:
        rule = f"must divide the {config.kv_heads} KV heads of {config.name}, or be a multiple of them"
        raise InputError(rule, size, "tensor_parallel_size")
