"""LoRAServe's placement (its section IV-A, Algorithm 1): demand, server budgets, packing, leftovers, labels.

Every adapter gets servers and shares phi of its traffic there that sum to 1. The steps are modules of their
own; `place` runs them one after the other, and neither it nor they know of problems, plans or the twin.
`operating_points` is apart: it has the twin measure what a server sustains when it serves one rank.
"""

from capplan.planner.loraserve.demand import Extrapolation, arrived_tok_s, extrapolate
from capplan.planner.loraserve.filling import AdapterLoad
from capplan.planner.loraserve.placement import Placement, Variants, place

__all__ = ["AdapterLoad", "Extrapolation", "Placement", "Variants", "arrived_tok_s", "extrapolate", "place"]
