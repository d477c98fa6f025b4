"""Bytes of adapter slots and of KV blocks: the arithmetic by which an engine sizes its cache.

Source: vLLM's LoRA layers and ``determine_available_memory``, 0.8.5 to 0.32.0: every slot holds A and B
matrices of every wrapped linear layer at the largest rank, whatever the adapters in it need.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from capplan.spec import EMBEDDING_MODULES, FUSED_MODULES, LORA_MODULES, ModelArch, ProfileEngine


def kv_bytes_per_token(arch: ModelArch, tp: int = 1) -> int:
    """Return the bytes of keys and values of one token on one GPU, where every layer keeps them."""
    return arch.kv_layers * 2 * _kv_width(arch, tp) * (arch.kv_dtype_bytes or arch.dtype_bytes)


def _kv_width(arch: ModelArch, tp: int) -> int:
    """Return the width of keys on one GPU: with more GPUs than heads, each has a whole head."""
    return max(1, arch.kv_heads // tp) * arch.head_dim


def lora_elements_per_rank(
    arch: ModelArch, tp: int = 1, modules: Sequence[str] | None = None, fully_sharded: bool = False
) -> int:
    """Return the elements that LoRA matrices take per unit of rank, all layers, on one GPU.

    A and B are each sharded as vLLM does it. Of a column-parallel layer (q, k, v, gate, up), B has a share
    of the output side; of a row-parallel one (o, down), A has a share of the input side. The other matrix is
    whole on every GPU, or sharded as well if `fully_sharded`.

    Parameters
    ----------
    arch
        The base model.
    tp
        GPUs that share one copy of it.
    modules
        Targeted layers; None: all linear ones. Embedding and output head are whole on every GPU.
    fully_sharded
        As vLLM's ``--fully-sharded-loras``.
    """
    query = arch.heads * arch.head_dim // tp
    kv = _kv_width(arch, tp)
    hidden, inner = arch.hidden_size, arch.intermediate_size // tp
    whole = hidden // tp if fully_sharded else hidden
    copies = 1
    if arch.experts is not None:  # every expert has matrices of its own
        inner, copies = arch.experts.intermediate_size // tp, arch.experts.number
    elements = {
        "q_proj": whole + query,
        "k_proj": whole + kv,
        "v_proj": whole + kv,
        "o_proj": query + whole,
        "gate_proj": copies * (whole + inner),
        "up_proj": copies * (whole + inner),
        "down_proj": copies * (inner + whole),
    }
    chosen = LORA_MODULES if modules is None else modules
    per_layer = sum(elements[name] for name in chosen if name in elements)
    if arch.fused_layers:
        for parts in FUSED_MODULES.values():
            per_layer -= max(0, len(set(parts).intersection(chosen)) - 1) * copies * whole
    outside = sum(arch.vocab_size + arch.hidden_size for name in chosen if name in EMBEDDING_MODULES)
    return arch.layers * per_layer + outside


def lora_matrices(arch: ModelArch, modules: Sequence[str]) -> int:
    """Return the pairs of matrices of an adapter on these layers, experts counted once."""
    return sum(1 if name in EMBEDDING_MODULES else arch.layers for name in modules)


def slot_bytes(arch: ModelArch, engine: ProfileEngine, max_lora_rank: int, tp: int = 1) -> int:
    """Return the bytes that one adapter slot reserves on one GPU, whatever its adapter targets.

    vLLM fuses q, k and v, and gate and up: a slot holds all parts of a fused layer, or none.
    """
    modules = engine.target_modules
    if modules is not None:
        fused = [each for each in FUSED_MODULES.values() if not set(each).isdisjoint(modules)]
        modules = tuple({*modules, *chain.from_iterable(fused)})
    elements = lora_elements_per_rank(arch, tp, modules, fully_sharded=engine.fully_sharded_loras)
    if arch.lora_on_embeddings and modules is None:
        elements += 2 * (arch.vocab_size + engine.lora_extra_vocab + arch.hidden_size)
    return max_lora_rank * arch.dtype_bytes * elements


def adapter_bytes(arch: ModelArch, rank: int, modules: Sequence[str] | None = None) -> int:
    """Return the bytes of an adapter's own weights on these linear layers (None: all), at its true rank."""
    return rank * arch.dtype_bytes * lora_elements_per_rank(arch, modules=modules)


def adapter_pages(
    arch: ModelArch, rank: int, page_bytes: int, tp: int = 1, modules: Sequence[str] | None = None
) -> int:
    """Return the pages that an adapter takes of a pool shared with KV, on one GPU.

    S-LoRA shards both matrices, so with heads for every GPU the pages are those of one GPU.
    """
    elements = lora_elements_per_rank(arch, tp, modules, fully_sharded=True)
    return -(-rank * arch.dtype_bytes * elements // page_bytes)


def adapter_tokens(arch: ModelArch, rank: int, tp: int = 1, modules: Sequence[str] | None = None) -> int:
    """Return the KV tokens that take the memory of an adapter in a shared pool, on one GPU."""
    return adapter_pages(arch, rank, kv_bytes_per_token(arch, tp), tp, modules)


def weight_bytes(arch: ModelArch, tp: int = 1) -> int:
    """Return the bytes of the base model's matrices on one GPU (norms and biases, under 0.1 %, left out)."""
    query = arch.heads * arch.head_dim
    kv = arch.kv_heads * arch.head_dim
    linear_bytes = arch.linear_dtype_bytes or arch.dtype_bytes
    attention_bytes = linear_bytes * arch.hidden_size * (2 * query + 2 * kv)
    experts = arch.experts
    if experts is None:
        mlp_bytes = linear_bytes * arch.hidden_size * 3 * arch.intermediate_size
    else:
        weights = experts.number * arch.hidden_size * 3 * experts.intermediate_size
        routers_bytes = arch.dtype_bytes * arch.hidden_size * experts.number
        mlp_bytes = (experts.dtype_bytes or linear_bytes) * weights + routers_bytes
    embeddings = arch.vocab_size * arch.hidden_size * (1 if arch.tied_embeddings else 2)
    layers_bytes = round(arch.layers * (attention_bytes + mlp_bytes))
    return (layers_bytes + arch.dtype_bytes * embeddings + arch.other_weight_bytes) // tp
