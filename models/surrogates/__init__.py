"""Surrogates of the twin: predictions for one GPU in microseconds, with error intervals."""

from capplan.models.surrogates.files import load_surrogate
from capplan.models.surrogates.surrogate import Surrogate, SurrogateAnswer

__all__ = ["Surrogate", "SurrogateAnswer", "load_surrogate"]
