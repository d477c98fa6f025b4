from ._designs import DESIGNS, Sample, draw
from ._shards import generate_dataset

__all__ = [
    "DESIGNS",
    "Sample",
    "draw",
    "generate_dataset",
]
