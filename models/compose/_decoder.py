"""Operators of a dense decoder: products, attention and memory-bound kernels of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from capplan.datasets import (
    MIXTURES,
    arch_of,
    architectures_of,
    hf_config,
    known_arch,
    language_model,
    model_arch,
    require_known_experts,
    weight_format,
)
from capplan.errors import InputError
from capplan.models.compose._operators import INT4_BYTES, SPREADS, Heads
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
"""Dense decoders with a gated MLP, by ``architectures`` of config.json; beside them `MIXTURES`."""

BYTES_PER_WEIGHT: Final[Mapping[str, float | None]] = MappingProxyType(
    {"bfloat16": None, "float16": None, "fp8": 1.0, "fp8_block": 1.0 + 4.0 / 128**2, "int4": INT4_BYTES}
)
"""Dtypes of weights and products, and their bytes with scales; None: those of the model. Those of 16 bits
take the same time. In ``fp8`` a weight matrix has one scale, in ``fp8_block`` one per block; ``int4`` has a
scale and a zero per 128 inputs, and activations of 16 bits (AWQ, GPTQ).
"""

_MXFP8: Final = "mxfp4_mxfp8"
"""Experts of MXFP4 with activations of MXFP8, which vLLM has on request on Blackwell."""

_FOUR_NORMS: Final = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
_ACTIVATION_BYTES: Final = 2


@dataclass(frozen=True)
class Decoder:
    """A dense decoder and what its kernels need beyond the sizes of `ModelArch`."""

    arch: ModelArch
    norms: int = 2
    """Norms of the residual stream per layer."""
    dtype: str = "bfloat16"
    """Dtype of the products of a layer, see `BYTES_PER_WEIGHT`."""
    expert_dtype: str = "bfloat16"
    """Dtype of those of experts."""
    quantization: str | None = None
    """See `quantized_on_loading`."""
    expert_spread: float = 1.0
    """See `SPREADS`."""

    @property
    def window_layers(self) -> int:
        """Layers with a sliding window."""
        if self.arch.sliding_window is None:
            return 0
        return self.arch.window_layers or self.arch.layers

    def products(self, tp: int) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of the products of a layer on one GPU, as vLLM merges and shards them."""
        arch = self.arch
        query, kv = arch.heads * arch.head_dim // tp, self.heads(tp).kv * arch.head_dim
        attention = ((query + 2 * kv, arch.hidden_size), (arch.hidden_size, query))
        if arch.experts is not None:
            return attention
        inner = arch.intermediate_size // tp
        return (*attention, (2 * inner, arch.hidden_size), (arch.hidden_size, inner))

    @property
    def router(self) -> tuple[int, int] | None:
        """Outputs and inputs of the product that chooses experts, which every GPU computes; None: none."""
        experts = self.arch.experts
        return None if experts is None else (experts.number, self.arch.hidden_size)

    def head(self, tp: int) -> tuple[int, int]:
        """Return outputs and inputs of the output head on one GPU."""
        return -(-self.arch.vocab_size // tp), self.arch.hidden_size

    def heads(self, tp: int) -> Heads:
        """Return the attention heads on one GPU; KV heads fewer than `tp` are replicated."""
        arch = self.arch
        kv_dtype = "fp8" if arch.kv_dtype_bytes == 1 else "bfloat16"
        return Heads(arch.heads // tp, max(1, arch.kv_heads // tp), arch.head_dim, kv_dtype)

    def elementwise_bytes(self, tp: int, fused_norms: int = 0) -> tuple[int, ...]:
        """Return the bytes per token that each memory-bound kernel of a layer reads and writes.

        `fused_norms` of the norms are part of other kernels.
        """
        arch, heads = self.arch, self.heads(tp)
        query, kv = heads.query * arch.head_dim, heads.kv * arch.head_dim
        rotary = 2 * (query + kv)
        norm = 4 * arch.hidden_size  # the stream and the residual, read and written
        norms = (norm,) * (self.norms - fused_norms)
        # The activation of experts is a part of their kernels; the choice of experts is another one.
        mlp = 3 * arch.intermediate_size // tp if arch.experts is None else arch.experts.number
        qk_norm = (rotary,) if arch.qk_norm else ()
        return tuple(_ACTIVATION_BYTES * part for part in (*norms, rotary, 4 * kv, mlp, *qk_norm))


def decoder_of(
    config: Mapping[str, Any],
    base_model: str,
    dtype: str | None = None,
    location: str = "config.json",
    kv_cache_dtype: str = "auto",
) -> Decoder:
    """Return the decoder of the fields of a ``config.json``.

    Parameters
    ----------
    config
        The fields.
    base_model
        Hugging Face id of the model.
    dtype
        One of `BYTES_PER_WEIGHT`; that of the weights by default.
    location
        Place of the fields, for messages.
    kv_cache_dtype
        Of keys and values: fp8, or auto for what the file says, else that of the model.

    Raises
    ------
    InputError
        For an architecture that is not known to be a dense decoder, by its name; for an unknown dtype or
        quantization.
    """
    own = language_model(config, location)
    require_known_experts(own, base_model, location)
    names = architectures_of(own, location)
    name = next((each for each in names if each in (*DENSE, *MIXTURES)), None)
    if name is None:
        rule = (
            f"must name one of {', '.join((*DENSE, *MIXTURES))}: decoders whose operators are known; "
            "`capplan profile roofline` computes a profile from sizes alone"
        )
        raise InputError(rule, ", ".join(names) or None, f"{location}: architectures")
    stored = weight_format(own, location)
    arch = arch_of(config, base_model, location)
    known = known_arch([base_model])
    if known is not None and known.replace(name=arch.name, hf_ids=arch.hf_ids) == arch:
        arch = known  # with its short name, and the ids of other models of this shape
    expert_dtype = None
    if dtype == _MXFP8:
        if stored.expert_dtype is None:
            raise InputError("goes with experts of MXFP4", dtype, "--dtype")
        dtype, expert_dtype = None, dtype
    quantization = quantized_on_loading(arch, expert_dtype or dtype)
    arch = with_weights(arch, None if dtype == stored.dtype else dtype)
    products = "bfloat16" if dtype == "float16" else dtype or stored.dtype
    if kv_cache_dtype != "auto":
        if kv_cache_dtype != "fp8":
            raise InputError("must be auto or fp8", kv_cache_dtype, "--kv-cache-dtype")
        arch = arch.replace(kv_dtype_bytes=1)
    return Decoder(
        arch=arch,
        norms=4 if name in _FOUR_NORMS else 2,
        dtype=products,
        expert_dtype=expert_dtype or stored.expert_dtype or products,
        quantization=quantization,
        expert_spread=SPREADS.get(name, 1.0),
    )


def quantized_on_loading(arch: ModelArch, dtype: str | None) -> str | None:
    """Return a dtype that the files of a model do not have its weights in; None for that of the files."""
    if dtype == _MXFP8:
        return dtype
    is_quantized = dtype is not None and BYTES_PER_WEIGHT.get(dtype) is not None
    return dtype if is_quantized and arch.linear_dtype_bytes is None else None


def with_weights(arch: ModelArch, dtype: str | None) -> ModelArch:
    """Return a model with the weights of its layers in a dtype, see `BYTES_PER_WEIGHT`; None: as they are.

    Raises
    ------
    InputError
        For an unknown dtype.
    """
    if dtype is None:
        return arch
    if dtype not in BYTES_PER_WEIGHT:
        raise InputError(f"must be one of {', '.join(BYTES_PER_WEIGHT)}", dtype, "--dtype")
    stored, experts = BYTES_PER_WEIGHT[dtype], arch.experts
    if experts is not None and experts.dtype_bytes == arch.linear_dtype_bytes:
        experts = experts.replace(dtype_bytes=stored)
    return arch.replace(linear_dtype_bytes=stored, experts=experts)


def known_decoder(name: str, dtype: str | None = None, kv_cache_dtype: str = "auto") -> Decoder:
    """Return the decoder of a known model, by its short name or Hugging Face id; see `decoder_of`.

    Raises
    ------
    InputError
        For an unknown name; the message lists the known ones.
    """
    arch = model_arch(name)
    base_model = name if name in arch.hf_ids else arch.hf_ids[0]
    return decoder_of(hf_config(base_model) or {}, base_model, dtype, "--model", kv_cache_dtype)
