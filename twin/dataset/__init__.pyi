from ._generate import DESIGNS, Sample, draw, generate_dataset

__all__ = [
    "DESIGNS",
    "Sample",
    "draw",
    "generate_dataset",
]
