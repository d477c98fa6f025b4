"""Language models inside multimodal ones: their fields of ``config.json``, and the weights of vision towers.

Source: transformers 5, the defaults of the configuration classes; vLLM loads both parts on every GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from capplan.errors import InputError

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

    Parameters
    ----------
    config
        Fields of the whole model.
    hidden_size
        Width of its language model.
    location
        Place of the fields, for messages.

    Raises
    ------
    InputError
        For a tower that is not known.
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
