"""Shares of adapters in the requests, by the laws that papers use."""

from capplan.spec.popularity import exponential, power_law, zipf

__all__ = ["exponential", "power_law", "zipf"]
