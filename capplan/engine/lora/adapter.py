"""An adapter in host memory: its true ranks and all its rows in one flat tensor, ready to be copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.lora.layout import MODULES, SITES, AdapterLayout
from capplan.errors import InputError

Matrices = Mapping[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
"""(layer, module) to A, shape (rank, in), and B, shape (out, rank), with the scale multiplied in."""
Shapes = Mapping[tuple[int, int], tuple[Sequence[int], Sequence[int]]]
"""(layer, module) to the shapes of A and B."""


@dataclass(frozen=True)
class HostAdapter:
    """An adapter as `AdapterLayout` orders it.

    Attributes
    ----------
    ranks
        Rank on each module, 0 where it has none, shape (layers, modules).
    flat
        All rows one after the other, in the dtype of the model.
    """

    ranks: NDArray[np.int64]
    flat: torch.Tensor


def pack(
    layout: AdapterLayout, matrices: Matrices, dtype: torch.dtype, pin: bool, location: str
) -> HostAdapter:
    """Put the matrices of an adapter into one flat tensor.

    Raises
    ------
    InputError
        When a matrix has a shape that does not go with the model, or a number in it is not finite.
    """
    shapes = {place: (a.shape, b.shape) for place, (a, b) in matrices.items()}
    ranks = ranks_of(layout, shapes, location)
    parts: list[torch.Tensor] = []
    for layer in range(layout.layers):
        for site in SITES:
            here = [matrices[layer, module] for module in site if (layer, module) in matrices]
            parts += [a.reshape(-1) for a, _ in here]
            parts += [b.t().reshape(-1) for _, b in here]
    flat = torch.cat([part.to(dtype) for part in parts]) if parts else torch.zeros(0, dtype=dtype)
    if not bool(torch.isfinite(flat).all()):
        # Zero times infinity is no zero: padded kernels would carry it into the tokens of others.
        raise InputError("must hold finite numbers only", location=location)
    return HostAdapter(ranks=ranks, flat=flat.pin_memory() if pin else flat)


def ranks_of(layout: AdapterLayout, shapes: Shapes, location: str) -> NDArray[np.int64]:
    """Return the rank on each module, shape (layers, modules).

    Raises
    ------
    InputError
        When a shape does not go with the model.
    """
    ranks = np.zeros((layout.layers, len(MODULES)), np.int64)
    for (layer, module), (a, b) in shapes.items():
        where = f"{location}: layer {layer} {MODULES[module]}"
        if layer >= layout.layers:
            raise InputError(f"must be below the model's {layout.layers} layers", layer, where)
        size_in, size_out = layout.sizes[module]
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] < 1:
            raise InputError("A must be (rank, in) and B (out, rank)", (tuple(a), tuple(b)), where)
        if a[1] != size_in or b[0] != size_out:
            rule = f"must go from {size_in} to {size_out} dimensions as the model does"
            raise InputError(rule, (a[1], b[0]), where)
        ranks[layer, module] = a[0]
    return ranks
