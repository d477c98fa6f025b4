"""LoRAServe: its setting, systems and figures."""

from collections.abc import Mapping
from typing import Final

from capplan.reproduce._lab import Experiment

EXPERIMENTS: Final[Mapping[str, Experiment]] = {}
