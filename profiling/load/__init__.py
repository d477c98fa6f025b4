"""Load on a server from outside: requests of a workload, sent when they are due, and what came back when."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
