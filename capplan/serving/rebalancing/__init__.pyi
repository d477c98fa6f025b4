from ._placement import AdapterDemand, place, place_near
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
