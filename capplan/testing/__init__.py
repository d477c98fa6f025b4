"""For users who plug in parts of their own, and for our tests: contracts and integrity checks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
