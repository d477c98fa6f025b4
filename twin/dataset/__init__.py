"""Simulated scenarios of one GPU: the training data of surrogates."""

from capplan.twin.dataset.designs import DESIGNS, Sample, draw
from capplan.twin.dataset.shards import generate_dataset

__all__ = ["DESIGNS", "Sample", "draw", "generate_dataset"]
