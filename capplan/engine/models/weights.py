"""Model weights: read from safetensors, or drawn at random for a config without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from capplan.engine.models.config import ModelConfig
from capplan.errors import InputError
from capplan.spec import read_text

_PACK_FROM: Final = 2**17
"""Elements of a matrix from which a packed oneDNN product is faster than a plain one on a CPU."""

_PACK_ROWS: Final = 64
"""Rows of activations for which the packing is optimised."""


@dataclass(frozen=True)
class Linear:
    """Linear map; `weight` has shape (out, in), or oneDNN's layout if packed."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    packed: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` for x of shape (tokens, in)."""
        if self.packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return functional.linear(x, self.weight, self.bias)

    def pack(self) -> Linear:
        """Return the map with the fastest layout of its weight."""
        weight = self.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < _PACK_FROM:
            return self
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return self
        return Linear(torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS), self.bias, packed=True)


_RANDOM_STD = 0.02  # as Llama's own initializer_range


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a layer. q, k and v are one matrix; so are gate and up."""

    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    """Weights of a model; tied embeddings are shared by `embed` and `head`."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Return uninitialised weights."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(out: int, width: int, bias: bool) -> Linear:
        return Linear(new(out, width), new(out) if bias else None)

    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = config.query_size + 2 * config.kv_size
    layers = tuple(
        LayerWeights(
            input_norm=new(hidden),
            qkv=linear(qkv, hidden, config.qkv_bias),
            o=linear(hidden, config.query_size, config.o_bias),
            post_norm=new(hidden),
            gate_up=linear(2 * inner, hidden, config.mlp_bias),
            down=linear(hidden, inner, config.mlp_bias),
        )
        for _ in range(config.layers)
    )
    embed = new(config.vocab_size, hidden)
    head = Linear(embed if config.tied_embeddings else new(config.vocab_size, hidden))
    return Weights(embed=embed, layers=layers, norm=new(hidden), head=head)


def packed(weights: Weights) -> Weights:
    """Return the weights with packed matrices."""
    names = ("qkv", "o", "gate_up", "down")
    layers = tuple(
        replace(layer, **{name: getattr(layer, name).pack() for name in names}) for layer in weights.layers
    )
    return replace(weights, layers=layers, head=weights.head.pack())


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    """Return normal weights and norms of one; the same for the same seed and device."""
    weights = empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, target in _targets(config, weights).items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            target.normal_(0.0, _RANDOM_STD, generator=generator)
    return weights


def load_weights(
    config: ModelConfig, folder: str | Path, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Read the safetensors files of a folder.

    Raises
    ------
    InputError
        If a file cannot be read, or a tensor is missing or does not have the shape in the config.
    """
    weights = empty_weights(config, dtype, device)
    missing = _targets(config, weights)
    for file, name, tensor in _tensors(Path(folder)):
        target = missing.pop(name, None)
        if target is None:
            continue  # for example a second copy of tied embeddings
        if tensor.shape != target.shape:
            rule = f"must have the shape {tuple(target.shape)} of config.json"
            raise InputError(rule, tuple(tensor.shape), f"{file}: {name}")
        target.copy_(tensor)
    if missing:
        raise InputError(f"must hold {next(iter(missing))}", location=str(folder))
    return weights


def _tensors(folder: Path) -> Iterator[tuple[Path, str, torch.Tensor]]:
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    yield file, name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"cannot be read: {error}", location=str(file)) from None


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = {Path(name).name for name in json.loads(read_text(index))["weight_map"].values()}
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
            raise InputError("must be JSON with a weight_map", location=str(index)) from None
        return [folder / name for name in sorted(names)]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise InputError("must hold model.safetensors or model.safetensors.index.json", location=str(folder))


def _targets(config: ModelConfig, weights: Weights) -> dict[str, torch.Tensor]:
    """Return the destination of each tensor, by its name in Hugging Face's files."""
    targets = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    if not config.tied_embeddings:
        targets["lm_head.weight"] = weights.head.weight
    q, kv, inner = config.query_size, config.kv_size, config.intermediate_size
    for number, layer in enumerate(weights.layers):
        place = f"model.layers.{number}."
        parts = [
            ("self_attn.q_proj", layer.qkv, 0, q),
            ("self_attn.k_proj", layer.qkv, q, kv),
            ("self_attn.v_proj", layer.qkv, q + kv, kv),
            ("self_attn.o_proj", layer.o, 0, config.hidden_size),
            ("mlp.gate_proj", layer.gate_up, 0, inner),
            ("mlp.up_proj", layer.gate_up, inner, inner),
            ("mlp.down_proj", layer.down, 0, config.hidden_size),
        ]
        for name, linear, start, rows in parts:
            targets[f"{place}{name}.weight"] = linear.weight[start : start + rows]
            if linear.bias is not None:
                targets[f"{place}{name}.bias"] = linear.bias[start : start + rows]
        targets[f"{place}input_layernorm.weight"] = layer.input_norm
        targets[f"{place}post_attention_layernorm.weight"] = layer.post_norm
    return targets
