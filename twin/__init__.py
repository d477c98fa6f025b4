"""The digital twin: what an engine would do with a workload, without the engine."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
