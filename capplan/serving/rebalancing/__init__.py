"""Re-balancing: which servers serve which shares of the adapters, as their demand changes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
