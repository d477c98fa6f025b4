"""Measuring the reference engine: its steps, adapter loads, KV memory, and what serving adds to a step."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
