"""A case as calls to be timed: the engine's own kernels, half by half, each call on fresh weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch

from capplan.engine.input_batch import Segment
from capplan.engine.kernels.torch_lora import GroupedLoRA, PaddedLoRA
from capplan.engine.lora.memory import Expand, Shrink, SiteViews
from capplan.profiling.kernels.cases import Case
from capplan.profiling.kernels.pool import WeightPool

SITE: Final = 0
HALVES: Final = ("shrink", "expand")


class Calls(NamedTuple):
    """Calls of one half each; the first of each is for warming up."""

    shrink: list[Callable[[], object]]
    expand: list[Callable[[], object]]


class MakeCalls(Protocol):
    """Makes calls of a kernel on a case."""

    def __call__(self, case: Case, width: int, pool: WeightPool, number: int) -> Calls:
        """Return `number` calls of each half for adapters on a linear map from `width` to `width`."""
        ...


def segments_of(case: Case) -> list[Segment]:
    """Return the tokens of each adapter; adapters count from 1."""
    each = case.requests_each * case.tokens_each
    return [Segment(at + 1, at * each, (at + 1) * each) for at in range(len(case.ranks))]


def activations(case: Case, width: int, pool: WeightPool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and the output that the adapters add to; both stay in the caches, as they do in a step."""
    like = pool.numbers
    ramp = torch.linspace(-1.0, 1.0, case.tokens * width, device=like.device).to(like.dtype)
    return ramp.view(case.tokens, width), like.new_zeros(case.tokens, width)


def grouped_calls(case: Case, width: int, pool: WeightPool, number: int) -> Calls:
    """PyTorch, one product per adapter at its true rank."""
    views = _views(case, width, pool, number)
    return _torch_calls(GroupedLoRA(segments_of(case), views.__getitem__), case, width, pool, number)


def padded_calls(case: Case, width: int, pool: WeightPool, number: int) -> Calls:
    """PyTorch, batched products padded to the largest rank.

    Adapters lie as in slots of that rank, where the rows beyond their own are there and hold zeros. So the
    kernel reads as much for a small one as for the largest, which is what BGMV does.
    """
    views = _views(replace(case, ranks=(max(case.ranks),) * len(case.ranks)), width, pool, number)
    adapters = PaddedLoRA(segments_of(case), views.__getitem__, case.tokens, pool.numbers.device)
    return _torch_calls(adapters, case, width, pool, number)


def _torch_calls(
    adapters: GroupedLoRA | PaddedLoRA, case: Case, width: int, pool: WeightPool, number: int
) -> Calls:
    x, out = activations(case, width, pool)
    h = adapters.shrink(0, SITE, x)
    # What is called is chosen above once: both kinds take back what their own shrink returned.
    expand: Callable[..., None] = adapters.expand
    return Calls(
        [partial(adapters.shrink, layer, SITE, x) for layer in range(number)],
        [partial(expand, layer, SITE, h, out) for layer in range(number)],
    )


def _views(case: Case, width: int, pool: WeightPool, layers: int) -> dict[int, list[list[SiteViews]]]:
    """Return each adapter's matrices by layer; those of one layer follow each other in memory, A before B."""
    views: dict[int, list[list[SiteViews]]] = {number: [] for number in range(1, len(case.ranks) + 1)}
    for _ in range(layers):
        shrinks = [Shrink(0, rank, pool.matrix(rank, width)) for rank in case.ranks]
        expands = [Expand(0, rank, 0, width, pool.matrix(rank, width)) for rank in case.ranks]
        for number, (rank, shrink, expand) in enumerate(
            zip(case.ranks, shrinks, expands, strict=True), start=1
        ):
            views[number].append([SiteViews(rank, (shrink,), (expand,))])
    return views
