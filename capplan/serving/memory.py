"""Bytes of adapter slots and of KV blocks: the arithmetic by which an engine sizes its cache.

Source: vLLM's LoRA layers and ``determine_available_memory``, 0.8.5 to 0.32.0: every slot holds A and B
matrices of every wrapped linear layer at the largest rank, whatever the adapters in it need.
"""

from __future__ import annotations

from capplan.spec.profile import ModelArch, ProfileEngine


def kv_bytes_per_token(arch: ModelArch, tp: int = 1) -> int:
    """Return the bytes of keys and values of one token on one GPU."""
    kv_heads = max(1, arch.kv_heads // tp)
    return arch.layers * 2 * kv_heads * arch.head_dim * arch.dtype_bytes


def lora_elements_per_rank(arch: ModelArch, tp: int = 1) -> int:
    """Return the elements that q, k, v, o, gate, up and down take per unit of rank, all layers, on one GPU.

    A column-parallel layer keeps its whole input side and a share of the output side; a row-parallel one the
    reverse.
    """
    query = arch.heads * arch.head_dim
    kv = arch.kv_heads * arch.head_dim
    hidden, inner = arch.hidden_size, arch.intermediate_size
    column = [(hidden, query), (hidden, kv), (hidden, kv), (hidden, inner), (hidden, inner)]
    row = [(query, hidden), (inner, hidden)]
    per_layer = sum(i + o // tp for i, o in column) + sum(i // tp + o for i, o in row)
    return arch.layers * per_layer


def slot_bytes(arch: ModelArch, engine: ProfileEngine, max_lora_rank: int, tp: int = 1) -> int:
    """Return the bytes that one adapter slot reserves on one GPU."""
    elements = lora_elements_per_rank(arch, tp)
    if arch.lora_on_embeddings:
        elements += 2 * (arch.vocab_size + engine.lora_extra_vocab + arch.hidden_size)
    return max_lora_rank * arch.dtype_bytes * elements


def adapter_bytes(arch: ModelArch, rank: int) -> int:
    """Return the bytes of an adapter's own weights on all linear layers, at its true rank."""
    return rank * arch.dtype_bytes * lora_elements_per_rank(arch)


def weight_bytes(arch: ModelArch, tp: int = 1) -> int:
    """Return the bytes of the base model's matrices on one GPU (norms and biases, under 0.1 %, left out)."""
    query = arch.heads * arch.head_dim
    kv = arch.kv_heads * arch.head_dim
    per_layer = arch.hidden_size * (2 * query + 2 * kv + 3 * arch.intermediate_size)
    embeddings = arch.vocab_size * arch.hidden_size * (1 if arch.tied_embeddings else 2)
    return arch.dtype_bytes * (arch.layers * per_layer + embeddings) // tp
