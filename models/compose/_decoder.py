"""Operators of a dense decoder: products, attention and memory-bound kernels of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan.datasets import (
    arch_of,
    architectures_of,
    hf_config,
    known_arch,
    model_arch,
    require_dense,
    whole_number,
)
from capplan.errors import InputError
from capplan.models.compose._attention import Heads
from capplan.spec import ModelArch

DENSE: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
)
"""Dense decoders with a gated MLP, by ``architectures`` of config.json."""

_PATTERN: Final = "sliding_window_pattern"

DTYPES: Final = ("bfloat16", "float16", "fp8", "fp8_block")
"""Dtypes of weights and products; those of 16 bits take the same time. In ``fp8`` a weight matrix has one
scale, in ``fp8_block`` one per block.
"""

_FOUR_NORMS: Final = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
_WINDOW_PERIODS: Final = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6}
"""Layers per layer without a window, where config.json does not list them."""

_ACTIVATION_BYTES: Final = 2


@dataclass(frozen=True)
class Decoder:
    """A dense decoder and what its kernels need beyond the sizes of `ModelArch`."""

    arch: ModelArch
    norms: int = 2
    """Norms of the residual stream per layer."""
    window_layers: int = 0
    """Layers with a sliding window."""
    dtype: str = "bfloat16"
    """Dtype of the products of a layer, see `DTYPES`."""

    def products(self, tp: int) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of the products of a layer on one GPU, as vLLM merges and shards them."""
        arch = self.arch
        query, kv = arch.heads * arch.head_dim // tp, self.heads(tp).kv * arch.head_dim
        inner = arch.intermediate_size // tp
        return (
            (query + 2 * kv, arch.hidden_size),
            (arch.hidden_size, query),
            (2 * inner, arch.hidden_size),
            (arch.hidden_size, inner),
        )

    def head(self, tp: int) -> tuple[int, int]:
        """Return outputs and inputs of the output head on one GPU."""
        return -(-self.arch.vocab_size // tp), self.arch.hidden_size

    def heads(self, tp: int) -> Heads:
        """Return the attention heads on one GPU; KV heads fewer than `tp` are replicated."""
        return Heads(self.arch.heads // tp, max(1, self.arch.kv_heads // tp), self.arch.head_dim)

    def elementwise_bytes(self, tp: int) -> tuple[int, ...]:
        """Return the bytes per token that each memory-bound kernel of a layer reads and writes."""
        arch, heads = self.arch, self.heads(tp)
        query, kv = heads.query * arch.head_dim, heads.kv * arch.head_dim
        rotary = 2 * (query + kv)
        norms = [4 * arch.hidden_size] * self.norms  # the stream and the residual, read and written
        parts = [*norms, rotary, 4 * kv, 3 * arch.intermediate_size // tp]
        return tuple(_ACTIVATION_BYTES * part for part in [*parts, *([rotary] if self.arch.qk_norm else [])])


def decoder_of(
    config: Mapping[str, Any], base_model: str, dtype: str | None = None, location: str = "config.json"
) -> Decoder:
    """Return the decoder of the fields of a ``config.json``.

    Parameters
    ----------
    config
        The fields.
    base_model
        Hugging Face id of the model.
    dtype
        One of `DTYPES`; that of the weights by default.
    location
        Place of the fields, for messages.

    Raises
    ------
    InputError
        For an architecture that is not known to be a dense decoder, by its name; for an unknown dtype or
        quantization.
    """
    require_dense(config, base_model, location)
    names = architectures_of(config, location)
    name = next((each for each in names if each in DENSE), None)
    if name is None:
        rule = (
            f"must name one of {', '.join(DENSE)}: dense decoders whose operators are known; "
            "`capplan profile roofline` computes a profile from sizes alone"
        )
        raise InputError(rule, ", ".join(names) or None, f"{location}: architectures")
    dtype = _dtype(config, location) if dtype is None else dtype
    if dtype not in DTYPES:
        raise InputError(f"must be one of {', '.join(DTYPES)}", dtype, "--dtype")
    arch = arch_of(config, base_model, location)
    known = known_arch([base_model])
    if known is not None and known.replace(name=arch.name, hf_ids=arch.hf_ids) == arch:
        arch = known  # with its short name, and the ids of other models of this shape
    if dtype.startswith("fp8"):
        arch = arch.replace(linear_dtype_bytes=1)
    return Decoder(
        arch=arch,
        norms=4 if name in _FOUR_NORMS else 2,
        window_layers=(
            0 if arch.sliding_window is None else _window_layers(config, name, arch.layers, location)
        ),
        dtype="bfloat16" if dtype == "float16" else dtype,
    )


def known_decoder(name: str, dtype: str | None = None) -> Decoder:
    """Return the decoder of a known model, by its short name or Hugging Face id; see `decoder_of`.

    Raises
    ------
    InputError
        For an unknown name; the message lists the known ones.
    """
    arch = model_arch(name)
    base_model = name if name in arch.hf_ids else arch.hf_ids[0]
    return decoder_of(hf_config(base_model) or {}, base_model, dtype, "--model")


def _dtype(config: Mapping[str, Any], location: str) -> str:
    """Return the dtype of the weights that a ``config.json`` describes."""
    quantization = config.get("quantization_config")
    if not quantization:
        return "bfloat16"
    fields = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    if fields.get("quant_method") != "fp8":
        rule = "must be fp8, whose products were measured; other weights by --dtype"
        method = str(fields.get("quant_method"))
        raise InputError(rule, method, f"{location}: quantization_config.quant_method")
    return "fp8_block" if fields.get("weight_block_size") else "fp8"


def _window_layers(config: Mapping[str, Any], name: str, layers: int, location: str) -> int:
    """Return the number of layers with a sliding window, in a model that has one."""
    kinds = config.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise InputError("must be a list of names", kinds, f"{location}: layer_types")
    if kinds:
        if len(kinds) != layers:
            raise InputError(f"must name the {layers} layers", len(kinds), "layer_types")
        return sum(kind == "sliding_attention" for kind in kinds)
    if config.get(_PATTERN) is not None:
        period = whole_number(config, _PATTERN, location)
    else:
        period = _WINDOW_PERIODS.get(name, 0)
    return layers - layers // period if period else layers
