"""How long an adapter takes to reach the host's memory and a GPU slot."""

from __future__ import annotations

from capplan.spec import FittedModel

FORM = "copies-and-bytes"
"""``gpu_ms = serving_factor * (gpu_base + gpu_per_rank * rank + gpu_padding [rank < s_max])`` and
``disk_ms = disk_base + disk_per_rank * rank``.

An engine copies every matrix of a slot by itself, so the number of copies weighs more than the bytes; a rank
below the slot's is copied into a strided view, which is slower. The copies were timed on an idle engine;
between the steps of a busy one they take `serving_factor` times as long.
"""


def gpu_load_ms(loading: FittedModel, rank: int, s_max: int) -> float:
    """Return the milliseconds of one copy from host memory into a slot."""
    padding = loading.value("gpu_padding_ms") if rank < s_max else 0.0
    idle = loading.value("gpu_base_ms") + loading.value("gpu_ms_per_rank") * rank + padding
    return loading.value("serving_factor") * idle


def disk_load_ms(loading: FittedModel, rank: int) -> float:
    """Return the milliseconds of one read from disk into host memory."""
    return loading.value("disk_base_ms") + loading.value("disk_ms_per_rank") * rank
