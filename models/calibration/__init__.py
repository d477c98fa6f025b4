"""Least-squares calibration: input tables, step model and the other components of a profile."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
