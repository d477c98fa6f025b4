"""Surrogates: learned from the twin, they answer for one GPU in microseconds and know their error."""

from capplan.models.surrogates.files import load_surrogate
from capplan.models.surrogates.surrogate import Surrogate, SurrogateAnswer

__all__ = ["Surrogate", "SurrogateAnswer", "load_surrogate"]
