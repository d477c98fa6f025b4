"""Model weights: read from safetensors, or drawn at random for a config without weights.

Under tensor parallelism each rank holds its part of every matrix, see `capplan.engine.models._config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from capplan.engine.models._config import WHOLE, ModelConfig, ModelShard
from capplan.errors import InputError
from capplan.spec import open_regular, read_json_object

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
    """Weights of a model, or of a part of it; tied embeddings are shared by `embed` and `head`.

    Attributes
    ----------
    first_token
        Token of the first row of `embed` and `head`.
    vocab_size
        Tokens of the whole model.
    """

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear
    first_token: int
    vocab_size: int


def empty_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: ModelShard = WHOLE
) -> Weights:
    """Return uninitialised weights."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(out: int, width: int, bias: bool) -> Linear:
        return Linear(new(out, width), new(out) if bias else None)

    part = shard.config(config)
    hidden, inner = part.hidden_size, part.intermediate_size
    qkv = part.query_size + 2 * part.kv_size
    adds_bias = shard.rank == 0  # once to the sum over all ranks
    layers = tuple(
        LayerWeights(
            input_norm=new(hidden),
            qkv=linear(qkv, hidden, config.qkv_bias),
            o=linear(hidden, part.query_size, config.o_bias and adds_bias),
            post_norm=new(hidden),
            gate_up=linear(2 * inner, hidden, config.mlp_bias),
            down=linear(hidden, inner, config.mlp_bias and adds_bias),
        )
        for _ in range(config.layers)
    )
    rows = shard.token_rows(config)
    embed = new(rows, hidden).zero_()
    head = Linear(embed if config.tied_embeddings else new(rows, hidden).zero_())
    first_token = shard.rank * rows
    return Weights(embed, layers, new(hidden), head, first_token, config.vocab_size)


def packed(weights: Weights) -> Weights:
    """Return the weights with packed matrices."""
    names = ("qkv", "o", "gate_up", "down")
    layers = tuple(
        replace(layer, **{name: getattr(layer, name).pack() for name in names}) for layer in weights.layers
    )
    return replace(weights, layers=layers, head=weights.head.pack())


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0, shard: ModelShard = WHOLE
) -> Weights:
    """Return normal weights and norms of one; for one seed and kind of device the parts of one model."""
    weights = empty_weights(config, dtype, device, shard)
    generator = torch.Generator(device).manual_seed(seed)
    for name, target in _targets(config, weights, shard).items():
        if name.endswith("norm.weight"):
            target.tensor.fill_(1.0)
        else:
            target.draw(generator)
    return weights


def load_weights(
    config: ModelConfig,
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    shard: ModelShard = WHOLE,
) -> Weights:
    """Read the safetensors files of a folder.

    Raises
    ------
    InputError
        If a file cannot be read, or a tensor is missing or does not have the shape in the config.
    """
    weights = empty_weights(config, dtype, device, shard)
    missing = _targets(config, weights, shard)
    for file, name, tensor in _tensors(Path(folder)):
        target = missing.pop(name, None)
        if target is None:
            continue  # for example a second copy of tied embeddings
        if tensor.shape != target.shape:
            rule = f"must have the shape {target.shape} of config.json"
            raise InputError(rule, tuple(tensor.shape), f"{file}: {name}")
        target.fill(tensor)
    if missing:
        raise InputError(f"must hold {next(iter(missing))}", location=str(folder))
    return weights


def _tensors(folder: Path) -> Iterator[tuple[Path, str, torch.Tensor]]:
    for file in _files(folder):
        open_regular(file, None, str(file)).close()
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
            names = {Path(name).name for name in read_json_object(index)["weight_map"].values()}
        except (KeyError, AttributeError, TypeError):
            raise InputError("must be JSON with a weight_map", location=str(index)) from None
        return [folder / name for name in sorted(names)]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise InputError("must hold model.safetensors or model.safetensors.index.json", location=str(folder))


class _Target(NamedTuple):
    """Destination of a tensor of Hugging Face's files."""

    tensor: torch.Tensor
    """Its part of the tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    at: tuple[slice, ...]
    """Part of the whole tensor."""

    def fill(self, whole: torch.Tensor) -> None:
        """Copy the part of a whole tensor."""
        self.tensor.copy_(whole[self.at])

    def draw(self, generator: torch.Generator) -> None:
        """Draw a whole normal tensor and keep the part."""
        if self.tensor.shape == self.shape:
            self.tensor.normal_(0.0, _RANDOM_STD, generator=generator)
        else:
            whole = self.tensor.new_empty(self.shape)
            self.fill(whole.normal_(0.0, _RANDOM_STD, generator=generator))


def _targets(config: ModelConfig, weights: Weights, shard: ModelShard = WHOLE) -> dict[str, _Target]:
    """Return the destination of each tensor, by its name in Hugging Face's files."""
    hidden, tokens = config.hidden_size, shard.tokens(config)
    vocabulary = (config.vocab_size, hidden)
    held = tokens.stop - tokens.start
    targets = {
        "model.embed_tokens.weight": _Target(weights.embed[:held], vocabulary, (tokens,)),
        "model.norm.weight": _Target(weights.norm, (hidden,), ()),
    }
    if not config.tied_embeddings:
        targets["lm_head.weight"] = _Target(weights.head.weight[:held], vocabulary, (tokens,))
    for number, layer in enumerate(weights.layers):
        place = f"model.layers.{number}."
        targets |= _linear_targets(config, layer, shard, place)
        targets[f"{place}input_layernorm.weight"] = _Target(layer.input_norm, (hidden,), ())
        targets[f"{place}post_attention_layernorm.weight"] = _Target(layer.post_norm, (hidden,), ())
    return targets


def _linear_targets(
    config: ModelConfig, layer: LayerWeights, shard: ModelShard, place: str
) -> dict[str, _Target]:
    """Return the destinations of the linear maps of a layer."""
    parts, own, hidden = shard.parts(config), shard.config(config), config.hidden_size
    query, kv, inner = config.query_size, config.kv_size, config.intermediate_size
    maps: tuple[tuple[str, Linear, int | None, int, slice, bool], ...] = (
        # Name, matrix, first row in it (None: cut by input), dimensions that are cut, part, bias.
        ("self_attn.q_proj", layer.qkv, 0, query, parts.query, config.qkv_bias),
        ("self_attn.k_proj", layer.qkv, own.query_size, kv, parts.kv, config.qkv_bias),
        ("self_attn.v_proj", layer.qkv, own.query_size + own.kv_size, kv, parts.kv, config.qkv_bias),
        ("self_attn.o_proj", layer.o, None, query, parts.query, config.o_bias),
        ("mlp.gate_proj", layer.gate_up, 0, inner, parts.inner, config.mlp_bias),
        ("mlp.up_proj", layer.gate_up, own.intermediate_size, inner, parts.inner, config.mlp_bias),
        ("mlp.down_proj", layer.down, None, inner, parts.inner, config.mlp_bias),
    )
    targets = {}
    for name, linear, first, size, part, has_bias in maps:
        bias = linear.weight.new_empty(0) if linear.bias is None else linear.bias
        if first is None:
            weight = _Target(linear.weight, (hidden, size), (slice(None), part))
            # Only the first rank has it.
            bias_target = _Target(bias, (hidden,), (slice(bias.shape[0]),))
        else:
            rows = slice(first, first + part.stop - part.start)
            weight = _Target(linear.weight[rows], (size, hidden), (part,))
            bias_target = _Target(bias[rows], (size,), (part,))
        targets[f"{place}{name}.weight"] = weight
        if has_bias:
            targets[f"{place}{name}.bias"] = bias_target
    return targets
