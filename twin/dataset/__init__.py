"""Simulated scenarios of one GPU: the training data of surrogates."""

from capplan.twin.dataset._designs import DESIGNS, Sample, draw
from capplan.twin.dataset._shards import generate_dataset

__all__ = ["DESIGNS", "Sample", "draw", "generate_dataset"]
