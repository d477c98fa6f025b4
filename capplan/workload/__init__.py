"""Requests over time: workload files and traces, and arrivals and lengths drawn from a workload."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
