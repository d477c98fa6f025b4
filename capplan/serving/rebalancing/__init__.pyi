from ._near import place_near
from ._placement import AdapterDemand, place
from ._rebalancer import (
    DemandHistory,
    Rebalanced,
    Rebalancer,
    Replan,
    ReplanRequest,
    arrived_tok_s,
    extrapolate,
)

__all__ = [
    "AdapterDemand",
    "DemandHistory",
    "Rebalanced",
    "Rebalancer",
    "Replan",
    "ReplanRequest",
    "arrived_tok_s",
    "extrapolate",
    "place",
    "place_near",
]
