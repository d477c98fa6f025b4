"""The digital twin paper: fidelity, surrogates and placement."""

from collections.abc import Mapping
from typing import Final

from capplan.reproduce._lab import Experiment

EXPERIMENTS: Final[Mapping[str, Experiment]] = {}
