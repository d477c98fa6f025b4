"""The engine's Triton kernels as calls to be timed."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from capplan.engine.kernels.triton_lora import Kind, TritonLoRA
from capplan.engine.lora.adapter import GROUPS, A, AdapterLayout, B
from capplan.engine.lora.memory import RowTables
from capplan.engine.models.config import ModelConfig
from capplan.profiling.kernels.calls import Calls, activations, segments_of
from capplan.profiling.kernels.cases import Case
from capplan.profiling.kernels.pool import WeightPool

_OUT_SITE: Final = 1
_O_PROJ: Final = 3  # alone in its place, from the width of all heads to the hidden size: both `width` here


class TritonCalls:
    """Makes calls of one Triton kernel.

    Parameters
    ----------
    kind
        ``bgmv``, ``mbgmv`` or ``sgmv``; see `TritonLoRA`.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def __call__(self, case: Case, width: int, pool: WeightPool, number: int) -> Calls:
        """See `capplan.profiling.kernels.calls.MakeCalls`."""
        layout = AdapterLayout(_square_model(width, number))
        tables = RowTables(layout, len(case.ranks), max(case.ranks), pool.numbers.device)
        padded = self._kind == "bgmv"
        for index, rank in enumerate(case.ranks):
            tables.number_of[index + 1] = index
            tables.max_rank_of[index] = rank
            tables.ranks[index, :, _O_PROJ] = rank
            for layer in range(number):
                for side in (A, B):
                    rows = tables.rows[index, layer, GROUPS.index((_O_PROJ, side))]
                    # A padded kernel reads rows beyond the rank, too, and each adapter has its own.
                    held = rows.numel() if padded else rank
                    first = pool.take(held, width)
                    rows[:held] = first + width * torch.arange(held, device=rows.device)
        adapters = TritonLoRA(layout, tables, pool.numbers, segments_of(case), case.tokens, self._kind)
        x, out = activations(case, width, pool)
        return Calls(
            [partial(adapters.shrink, layer, _OUT_SITE, x) for layer in range(number)],
            [partial(adapters.expand, layer, _OUT_SITE, out) for layer in range(number)],
        )


def _square_model(width: int, layers: int) -> ModelConfig:
    return ModelConfig(
        name="square",
        layers=layers,
        hidden_size=width,
        heads=1,
        kv_heads=1,
        head_dim=width,
        intermediate_size=1,
        vocab_size=1,
        max_positions=1,
    )
