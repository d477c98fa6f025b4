"""Model architectures and GPU data sheets by name, and the reader of Hugging Face's ``config.json``.

Every entry of ``archs.json`` and ``gpus.json`` has a ``source`` and a ``licence``.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import Field

from capplan.datasets._nested_config import language_model, vision_bytes
from capplan.datasets._quantization import weight_format
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
    {
        "num_hidden_layers": 2**10,
        "num_attention_heads": 2**10,
        "num_key_value_heads": 2**10,
        "head_dim": 2**10,
    }
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
    known = ", ".join(arch.name.lower() for arch in model_archs())
    raise InputError(f"must be one of {known}; others by --model-config", name, "--model")


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
    heads = whole_number(config, "num_attention_heads", location)
    hidden = whole_number(config, "hidden_size", location)
    architectures = architectures_of(config, location)
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
        experts=None
        if experts is None
        else experts.replace(dtype_bytes=stored.expert_bytes or stored.bytes_per_weight),
        vocab_size=whole_number(config, "vocab_size", location),
        tied_embeddings=flag(config, "tie_word_embeddings", location, default=_is_of(config, _TIED)),
        lora_on_embeddings=any(each in _EMBEDDING_ADAPTERS for each in architectures),
        fused_layers=any(each in _FUSED for each in architectures),
        qk_norm=any(each in _QK_NORM for each in architectures),
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
    """Return the experts that the fields of a language model describe; None for a dense model.

    Raises
    ------
    InputError
        If a size is missing, or only some layers have experts.
    """
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
    rule = f"must be one of {', '.join(sheet.key for sheet in gpu_sheets())}; {other_gpu(key)}"
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
    keys = [sheet.key for sheet in gpu_sheets()]
    if key.lower() in keys:
        command = f"`capplan profile roofline --gpu {key.lower()} --model NAME -o profile.json`"
        return f"{command} computes one from its data sheet"
    near = [each for each in keys if key and each.startswith(key.lower())]
    near = near or difflib.get_close_matches(key.lower(), keys, n=1)
    hint = f"`capplan profile roofline` has data sheets of {', '.join(near)}; " if near else ""
    measured = "`capplan profile server URL -o DIR` measures a running server, for `capplan calibrate DIR`"
    return f"{hint}{measured}"


def other_model(gpu: str | None = None) -> str:
    """Return how to get a profile of a model that none ships of."""
    given = f"--gpu {gpu or 'NAME'} --model-config FILE --base-model ID -o profile.json"
    return f"`capplan profile compose {given}` makes one of a dense model from its config.json"
