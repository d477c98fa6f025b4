"""Workloads from what was observed: access logs, traces, results of load tests, metrics of servers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
