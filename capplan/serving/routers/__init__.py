"""Routers: which instance gets a request. Rules over flat arrays, each in a file of its own."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
