"""The four papers' figures, simulated on the papers' own settings, beside the papers' numbers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
