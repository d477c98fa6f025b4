"""Surrogates of the twin: predictions for one GPU in microseconds, with error intervals."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
