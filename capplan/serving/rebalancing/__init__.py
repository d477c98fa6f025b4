"""Re-balancing: which servers serve which shares of the adapters, as their demand changes."""

from capplan.serving.rebalancing._demand import DemandHistory, arrived_tok_s, extrapolate
from capplan.serving.rebalancing._near import place_near
from capplan.serving.rebalancing._placement import AdapterDemand, LoraservePlacement, place
from capplan.serving.rebalancing._rebalancer import Rebalanced, Rebalancer, Replan, ReplanRequest
from capplan.spec._routing import FORECASTS, REBALANCE_SOLVERS, Forecast, RebalanceSettings, RebalanceSolver

__all__ = [
    "FORECASTS",
    "REBALANCE_SOLVERS",
    "AdapterDemand",
    "DemandHistory",
    "Forecast",
    "LoraservePlacement",
    "RebalanceSettings",
    "RebalanceSolver",
    "Rebalanced",
    "Rebalancer",
    "Replan",
    "ReplanRequest",
    "arrived_tok_s",
    "extrapolate",
    "place",
    "place_near",
]
