"""Toppings (USENIX ATC 2025): its engine, servers by loading policy, routers of a cluster."""

from collections.abc import Mapping
from typing import Final

from capplan.reproduce._lab import Experiment

EXPERIMENTS: Final[Mapping[str, Experiment]] = {}
