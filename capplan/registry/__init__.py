"""Adapter registry: adapters of a fleet, where their weights are, and the servers that store them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
