"""The planning problem: instances, their settings, and how they are estimated and evaluated."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
