"""Interaction of what the papers propose: caches, schedulers, loading, placements, routers together."""

from collections.abc import Mapping
from typing import Final

from capplan.reproduce._lab import Experiment
from capplan.reproduce.joint._experiments import effects, joint, wholes

EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    "wholes": wholes,
    "effects-4": effects(4),
    "effects-16": effects(16),
    "joint": joint,
}
