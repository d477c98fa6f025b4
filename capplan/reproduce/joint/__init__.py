"""Interaction of what the papers propose: caches, schedulers, loading, placements, routers together."""

from collections.abc import Mapping
from typing import Final

from capplan.reproduce._lab import Experiment

EXPERIMENTS: Final[Mapping[str, Experiment]] = {}
