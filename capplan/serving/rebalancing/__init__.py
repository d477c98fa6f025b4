"""Re-balancing: which servers serve which shares of the adapters, as their demand changes."""

from capplan.serving.rebalancing.demand import FORECASTS, DemandHistory, Forecast, arrived_tok_s, extrapolate
from capplan.serving.rebalancing.placement import AdapterDemand, LoraservePlacement, place
from capplan.serving.rebalancing.rebalancer import (
    SOLVERS,
    Rebalanced,
    Rebalancer,
    RebalanceSettings,
    Replan,
    ReplanRequest,
)

__all__ = [
    "FORECASTS",
    "SOLVERS",
    "AdapterDemand",
    "DemandHistory",
    "Forecast",
    "LoraservePlacement",
    "RebalanceSettings",
    "Rebalanced",
    "Rebalancer",
    "Replan",
    "ReplanRequest",
    "arrived_tok_s",
    "extrapolate",
    "place",
]
