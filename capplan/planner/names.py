"""Names of the solvers, apart from the solvers themselves: help texts load neither twin nor surrogates."""

from __future__ import annotations

from typing import Final

SOLVERS: Final = (
    "capplan",
    "greedy",
    "greedy-strict",
    "greedy-fast",
    "latency",
    "maxbase",
    "maxbase-half",
    "random",
    "slora-random",
    "slora-contiguous",
    "dlora-proactive",
    "loraserve",
    "milp",
)
