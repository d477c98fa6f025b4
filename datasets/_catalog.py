"""Model architectures and GPU data sheets by name, and the reader of Hugging Face's ``config.json``.

Every entry of ``archs.json`` and ``gpus.json`` has a ``source`` and a ``licence``.

Source of language models inside multimodal ones, and of vision towers: transformers 5, the defaults of the
configuration classes; vLLM loads both parts on every GPU. Source of the formats of weights:
quantization_config of Hugging Face, compressed-tensors and modelopt, as vLLM reads them.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import Field

from capplan.errors import InputError
from capplan.spec import Experts, ModelArch, SpecModel, read_json_object

_FOLDER: Final = Path(__file__).parent
_EMBEDDING_ADAPTERS: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3ForCausalLM",
)
"""Architectures whose slots also hold embedding and output head (vLLM: ``embedding_modules``)."""

_FUSED: Final = ("Phi3ForCausalLM",)
"""Architectures that hold q, k and v as one matrix, and gate and up as another."""

_POSITIONS: Final = "max_position_embeddings"
_MOST: Final = MappingProxyType(
    dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), 2**10)
    | {"hidden_size": 2**17, "intermediate_size": 2**20, "vocab_size": 2**24, _POSITIONS: 2**24}
)
"""Largest sizes of a model, far above those of any; products of a few of them stay far inside int64."""
_MOST_OTHERS: Final = 2**30

_QK_NORM: Final = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Gemma3ForCausalLM",
)
"""Architectures that normalize queries and keys per head."""

_TIED: Final = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
"""Architectures whose output head is the embedding unless the config says otherwise."""

_OPTIONAL_WINDOW: Final = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

_PATTERN: Final = "sliding_window_pattern"
_WINDOW_PERIODS: Final = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6, "GptOssForCausalLM": 2}
"""Layers per layer without a window, where config.json does not list them."""

MIXTURES: Final = (
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
)
"""Architectures with experts in every layer and no shared ones."""

_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Fields of the ``config.json`` of a mixture of experts."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FittedShares(SpecModel):
    """Shares of a GPU's peaks that a measured engine reached."""

    bandwidth: Annotated[float, Field(gt=0, le=1)]
    compute: Annotated[float, Field(gt=0, le=1)]
    """Of the peak of 16-bit floats, in the dtype of the rows."""
    source: str
    """Rows of the fit, and the error on rows left out."""


class GpuSheet(SpecModel):
    """Data sheet of a GPU type."""

    key: str
    """Name on the command line."""
    name: str
    """As the driver reports it."""
    memory_bytes: Annotated[int, Field(gt=0)]
    """As CUDA reports it, which is less than the driver does; engines size themselves by it."""
    bytes_per_s: Positive
    """Peak memory bandwidth."""
    flop_per_s: Positive
    """Peak of the tensor cores on 16-bit floats, accumulated in float32, without sparsity."""
    host_bytes_per_s: Positive
    """Peak of the link to the host, one direction."""
    peer_bytes_per_s: Positive
    """Peak of the links to its peers, one direction; the host's link if there are no others."""
    l2_bytes_per_s: Positive | None = None
    """Peak of reading the L2 cache, where a source states it."""
    shares: FittedShares | None = None
    """None: no engine was measured on it as a whole."""
    source: str
    licence: str


class _ArchEntry(SpecModel):
    name: str
    hf_ids: tuple[str, ...]
    config: dict[str, Any]
    """Fields of ``config.json`` on Hugging Face."""
    source: str
    licence: str


class _ArchFile(SpecModel):
    archs: tuple[_ArchEntry, ...]


class _GpuFile(SpecModel):
    gpus: tuple[GpuSheet, ...]


@functools.cache
def _arch_entries() -> tuple[_ArchEntry, ...]:
    return _ArchFile.model_validate_json((_FOLDER / "archs.json").read_bytes()).archs


@functools.cache
def model_archs() -> tuple[ModelArch, ...]:
    """Return every known architecture."""
    return tuple(
        arch_of(entry.config, entry.name, "archs.json").replace(hf_ids=entry.hf_ids)
        for entry in _arch_entries()
    )


def hf_config(hf_id: str) -> Mapping[str, Any] | None:
    """Return the fields of the ``config.json`` of a known architecture, by its Hugging Face id."""
    return next((entry.config for entry in _arch_entries() if hf_id in entry.hf_ids), None)


def known_arch(hf_ids: Iterable[str]) -> ModelArch | None:
    """Return the known architecture with one of these Hugging Face ids."""
    return next((arch for arch in model_archs() if not set(hf_ids).isdisjoint(arch.hf_ids)), None)


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
    raise InputError(f"must be one of {', '.join(model_names())}; others by --model-config", name, "--model")


def read_arch(path: str | os.PathLike[str], hf_id: str) -> ModelArch:
    """Return the architecture from the ``config.json`` of a Hugging Face model.

    Raises
    ------
    InputError
        If the file is unreadable, or a size is missing or not a whole number above 0.
    """
    return arch_of(read_json_object(path), hf_id, os.fspath(path))


def arch_of(config: Mapping[str, Any], hf_id: str, location: str) -> ModelArch:
    """Return the architecture from the fields of a ``config.json``; `location` is for messages.

    Raises
    ------
    InputError
        If a size is missing or not a whole number above 0, the model is a mixture of experts, or its weights
        are of a format that is not known.
    """
    whole, config = config, language_model(config, location)
    require_known_experts(config, hf_id, location)
    stored = weight_format(config, location)
    experts = experts_of(config, location)
    if experts is not None:
        experts = experts.replace(dtype_bytes=stored.expert_bytes or stored.bytes_per_weight)
    heads = whole_number(config, "num_attention_heads", location)
    hidden = whole_number(config, "hidden_size", location)
    kv_heads = whole_number(config, "num_key_value_heads", location, heads)
    if heads % kv_heads:
        rule = f"must divide num_attention_heads, {heads}"
        raise InputError(rule, kv_heads, f"{location}: num_key_value_heads")
    return ModelArch(
        name=hf_id.rsplit("/", maxsplit=1)[-1],
        hf_ids=(hf_id,),
        layers=whole_number(config, "num_hidden_layers", location),
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=whole_number(config, "head_dim", location, hidden // heads),
        intermediate_size=whole_number(config, "intermediate_size", location),
        experts=experts,
        vocab_size=whole_number(config, "vocab_size", location),
        tied_embeddings=flag(config, "tie_word_embeddings", location, default=_is_of(config, _TIED)),
        lora_on_embeddings=_is_of(config, _EMBEDDING_ADAPTERS),
        fused_layers=_is_of(config, _FUSED),
        qk_norm=_is_of(config, _QK_NORM),
        linear_dtype_bytes=stored.bytes_per_weight,
        kv_dtype_bytes=stored.kv_bytes,
        other_weight_bytes=vision_bytes(whole, hidden, location),
        sliding_window=_sliding_window(config, location),
        window_layers=_window_layers(config, location),
        max_positions=(
            None if config.get(_POSITIONS) is None else whole_number(config, _POSITIONS, location)
        ),
    )


def _is_of(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    return not set(names).isdisjoint(config.get("architectures") or ())


def experts_of(config: Mapping[str, Any], location: str) -> Experts | None:
    """Return the experts that the fields of a language model describe; None for a dense model."""
    number = next((key for key in _EXPERTS if config.get(key) is not None), None)
    if number is None or config[number] == 1:
        return None
    sparse_step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers")
    if sparse_step != 1 or dense:
        rule = "must have experts in every layer: decoder_sparse_step 1, and no mlp_only_layers"
        raise InputError(rule, location=location)
    width = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    per_token = "experts_per_token" if "experts_per_token" in config else "num_experts_per_tok"
    return Experts(
        number=whole_number(config, number, location),
        per_token=whole_number(config, per_token, location),
        intermediate_size=whole_number(config, width, location),
    )


def require_known_experts(config: Mapping[str, Any], hf_id: str, location: str) -> None:
    """Check that the fields of a language model are those of a dense one, or of a known mixture of experts.

    Raises
    ------
    InputError
        If they are of another mixture of experts, or of multi-head latent attention.
    """
    if config.get("kv_lora_rank") is not None:
        rule = f"must be absent: the multi-head latent attention of {hf_id} is not known"
        raise InputError(rule, config["kv_lora_rank"], f"{location}: kv_lora_rank")
    if not set(MIXTURES).isdisjoint(architectures_of(config, location)):
        return
    for key in _EXPERTS:
        experts = config.get(key)
        if isinstance(experts, int) and experts > 1:
            rule = (
                f"must be a dense model or one of {', '.join(MIXTURES)}: {hf_id} is another mixture of "
                f"{experts} experts"
            )
            raise InputError(rule, location=f"{location}: {key}")


def _sliding_window(config: Mapping[str, Any], location: str) -> int | None:
    """Return the window of attention; None without one, or if the config turns it off.

    Qwen2 and Qwen3 have windows only where the config turns them on.
    """
    default = not _is_of(config, _OPTIONAL_WINDOW)
    is_on = flag(config, "use_sliding_window", location, default=default)
    if config.get("sliding_window") is None or not is_on:
        return None
    return whole_number(config, "sliding_window", location)


def _window_layers(config: Mapping[str, Any], location: str) -> int | None:
    """Return the number of layers with a sliding window; None without a window, or if all have one."""
    if _sliding_window(config, location) is None:
        return None
    layers, kinds = whole_number(config, "num_hidden_layers", location), config.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise InputError("must be a list of names", kinds, f"{location}: layer_types")
    if kinds:
        if len(kinds) != layers:
            raise InputError(f"must name the {layers} layers", len(kinds), f"{location}: layer_types")
        return sum(kind == "sliding_attention" for kind in kinds) or None
    names = [name for name in architectures_of(config, location) if name in _WINDOW_PERIODS]
    if config.get(_PATTERN) is not None:
        period = whole_number(config, _PATTERN, location)
    else:
        period = _WINDOW_PERIODS[names[0]] if names else 0
    return layers - layers // period if period else None


def architectures_of(config: Mapping[str, Any], location: str) -> list[str]:
    """Return the names of a model's classes; none if the field is absent."""
    names = config.get("architectures")
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError("must be a list of names", names, f"{location}: architectures")
    return names


def whole_number(config: Mapping[str, Any], key: str, location: str, default: int | None = None) -> int:
    """Return a field that is a whole number above 0."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError("must be a whole number above 0", value, f"{location}: {key}")
    most = _MOST.get(key, _MOST_OTHERS)
    if value > most:
        raise InputError(f"must be at most {most}", value, f"{location}: {key}")
    return value


def flag(config: Mapping[str, Any], key: str, location: str, *, default: bool = False) -> bool:
    """Return a field that is true or false; null and absent ones have the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError("must be true or false", value, f"{location}: {key}")
    return value


def gpu_names() -> tuple[str, ...]:
    """Return the keys of every known GPU type."""
    return tuple(sheet.key for sheet in gpu_sheets())


def model_names() -> tuple[str, ...]:
    """Return the short names of every known model, in lower case."""
    return tuple(arch.name.lower() for arch in model_archs())


def gpu_sheet(key: str) -> GpuSheet:
    """Return the data sheet of a GPU type, by its key or as drivers, clouds and tables spell it.

    ``h200_sxm``, ``A100-80GB`` and ``NVIDIA GeForce RTX 4090`` are known; ``H100`` is not, since there are
    several.

    Raises
    ------
    InputError
        For an unknown type; the message lists the known ones.
    """
    if (sheet := find_gpu(key)) is not None:
        return sheet
    rule = f"must be one of {', '.join(gpu_names())}; {other_gpu(key)}"
    raise InputError(rule, key, "--gpu")


def find_gpu(name: str) -> GpuSheet | None:
    """Return the data sheet of a GPU type as `gpu_sheet` does; None for an unknown type."""
    kind, memory = _spelling(name)
    for sheet in gpu_sheets():
        for own_kind, own_memory in (_spelling(sheet.key), _spelling(sheet.name)):
            is_implied = own_memory is None and _is_about(memory, sheet)
            if kind == own_kind and (memory == own_memory or is_implied):
                return sheet
    return None


_NO_PART_OF_A_TYPE: Final = re.compile(
    r"nvidia|geforce|tensor|core|gpu|sxm\d?|hbm\d?e?|blackwell|server|edition"
)
_MEMORY: Final = re.compile(r"(\d{1,4})gb?")
_NAMED_MEMORY: Final = 0.1


def _spelling(name: str) -> tuple[str, str | None]:
    """Return the type and, if it is named, the memory of a GPU, in one spelling of all."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    memory = next((found[1] for word in words if (found := _MEMORY.fullmatch(word))), None)
    kept = (word for word in words if not (_NO_PART_OF_A_TYPE.fullmatch(word) or _MEMORY.fullmatch(word)))
    return "".join(kept), memory


def _is_about(memory_gb: str | None, sheet: GpuSheet) -> bool:
    """Return whether a GPU has a memory by its name; drivers report a few per cent less or more."""
    return memory_gb is not None and abs(float(memory_gb) * 1e9 / sheet.memory_bytes - 1.0) < _NAMED_MEMORY


def other_gpu(key: str) -> str:
    """Return how to get a profile of a GPU that none ships of, and that no operators were measured on."""
    keys = gpu_names()
    if key.lower() in keys:
        command = f"`capplan profile roofline --gpu {key.lower()} --model NAME -o profile.json`"
        return f"{command} computes one from its data sheet"
    near = [each for each in keys if key and each.startswith(key.lower())]
    near = near or difflib.get_close_matches(key.lower(), keys, n=1)
    hint = f"`capplan profile roofline` has data sheets of {', '.join(near)}; " if near else ""
    return f"{hint}`capplan profile server URL -o DIR` measures a running server, for `capplan calibrate DIR`"


def other_model(gpu: str | None = None) -> str:
    """Return how to get a profile of a model that none ships of."""
    given = f"--gpu {gpu or 'NAME'} --model-config FILE --base-model ID -o profile.json"
    return f"`capplan profile compose {given}` makes one of a dense model from its config.json"


_CLASSES: Final = MappingProxyType(
    {
        "gemma3_text": "Gemma3ForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)
"""Class of a language model by its ``model_type``."""

_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {"gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072}}
)
"""Fields that files leave out, as transformers does with its defaults."""

_SIGLIP: Final = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 896,
}
_PIXTRAL: Final = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "intermediate_size": 4096,
    "patch_size": 16,
    "image_size": 0,
}
_TOWERS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {"siglip_vision_model": _SIGLIP, "pixtral": _PIXTRAL}
)
"""Defaults of vision towers by ``model_type``; Pixtral has no table of positions."""

_TOWER_OF: Final = MappingProxyType({"gemma3": "siglip_vision_model", "mistral3": "pixtral"})
"""Tower of a multimodal model whose file does not name it."""

_DTYPE_BYTES: Final = 2


def language_model(config: Mapping[str, Any], location: str) -> Mapping[str, Any]:
    """Return the fields of a model's language model: its own, or those of its ``text_config``.

    Raises
    ------
    InputError
        For a language model that is not known.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping) or "hidden_size" in config:
        return config
    kind = inner.get("model_type")
    names = inner.get("architectures") or [_CLASSES.get(str(kind))]
    if names == [None]:
        rule = f"must be one of {', '.join(_CLASSES)}, the language models that are known inside others"
        raise InputError(rule, kind, f"{location}: text_config.model_type")
    shared = ("tie_word_embeddings", "quantization_config")
    outer = {key: config[key] for key in shared if config.get(key) is not None}
    return {**_DEFAULTS.get(str(kind), {}), **outer, **inner, "architectures": names}


def vision_bytes(config: Mapping[str, Any], hidden_size: int, location: str) -> int:
    """Return the bytes of the vision tower and its projector; 0 without one.

    `config` has the fields of the whole model, `hidden_size` is the width of its language model.
    """
    given = config.get("vision_config")
    if not isinstance(given, Mapping):
        return 0
    kind = str(given.get("model_type") or _TOWER_OF.get(str(config.get("model_type"))))
    if kind not in _TOWERS:
        rule = f"must be one of {', '.join(_TOWERS)}, the vision towers whose weights are counted"
        raise InputError(rule, kind, f"{location}: vision_config.model_type")
    size = {key: given.get(key) or default for key, default in _TOWERS[kind].items()}
    if not all(isinstance(value, int) and 0 <= value < 2**20 for value in size.values()):
        raise InputError("must hold whole numbers", location=f"{location}: vision_config")
    width, inner, patch = size["hidden_size"], size["intermediate_size"], size["patch_size"]
    is_gated = kind == "pixtral"
    layer = 4 * width * width + (3 if is_gated else 2) * width * inner
    patches = 3 * patch * patch * width
    if is_gated:  # four patches are merged before the projector's two layers
        projector = 4 * width * width + width * hidden_size + hidden_size * hidden_size
    else:
        projector = (size["image_size"] // patch) ** 2 * width + width * hidden_size
    return _DTYPE_BYTES * (size["num_hidden_layers"] * layer + patches + projector)


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
    return bool(_LAYER.search(name)) and not _OTHER.search(name)
