"""Shipped profiles, each with where its numbers come from, and their loader."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
