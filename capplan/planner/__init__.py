"""Planning: solvers, number of adapter slots, verification by the twin, repair, and the plan document."""

from typing import Final

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["SOLVERS"]

SOLVERS: Final = (  # their names need neither twin nor surrogates
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
