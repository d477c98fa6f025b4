"""Rotary positions: tables of cosines and sines, and the turn of queries and keys by them."""

from __future__ import annotations

import math

import torch

from capplan.engine.models.config import ModelConfig, Rope


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions, float32, shape (head_dim / 2,).

    Sources: Su et al. 2021, RoFormer; stretched as ``rope_type`` "linear" and "llama3" of transformers.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "default":
        return plain
    wave = 2 * math.pi / plain
    longest_kept = rope.original_positions / rope.high_freq_factor
    shortest_stretched = rope.original_positions / rope.low_freq_factor
    share_kept = (rope.original_positions / wave - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share_kept) * plain / rope.factor + share_kept * plain
    stretched = torch.where(wave > shortest_stretched, plain / rope.factor, between)
    return torch.where(wave < longest_kept, plain, stretched)


class RopeTable:
    """Cosines and sines of every position, in the dtype of the model."""

    def __init__(self, config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(positions).float(), frequencies(config.rope, config.head_dim))
        # Both halves of a head turn by the same angles.
        both = torch.cat((angles, angles), dim=1)
        self._cos = both.cos().to(device, dtype)
        sine = both.sin()
        sine[
            :, : config.head_dim // 2
        ] *= -1  # the first half takes minus the second, the second plus the first
        self._sin = sine.to(device, dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines of some positions, shape (tokens, 1, head_dim) each."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads, shape (tokens, heads, head_dim), turned by their positions."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)
