"""The serving rules: pure functions over flat arrays, which engine and twin call once a step."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
