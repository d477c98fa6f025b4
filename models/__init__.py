"""Performance models: step latency, memory, loading; their calibration; surrogates of the twin."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
