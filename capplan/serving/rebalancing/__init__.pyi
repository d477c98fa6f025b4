from ._demand import DemandHistory, arrived_tok_s, extrapolate
from ._near import place_near
from ._placement import AdapterDemand, place
from ._rebalancer import Rebalanced, Rebalancer, Replan, ReplanRequest

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
