"""Performance models: step latency, memory, loading; their calibration; surrogates of the twin."""

from capplan.models.surrogates import Surrogate, SurrogateAnswer, load_surrogate

__all__ = ["Surrogate", "SurrogateAnswer", "load_surrogate"]
