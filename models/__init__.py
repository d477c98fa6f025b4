"""Performance models: step latency, memory, loading; their calibration; surrogates of the twin."""

from capplan.models.surrogate import Surrogate, SurrogateAnswer
from capplan.models.surrogate_file import load_surrogate

__all__ = ["Surrogate", "SurrogateAnswer", "load_surrogate"]
