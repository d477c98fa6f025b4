"""Surrogates of the twin: predictions for one GPU in microseconds, with error intervals."""

from capplan.models.surrogates._files import load_surrogate
from capplan.models.surrogates._surrogate import Surrogate, SurrogateAnswer

__all__ = ["Surrogate", "SurrogateAnswer", "load_surrogate"]
