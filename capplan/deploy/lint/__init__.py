"""Checks of deployment inputs: workloads, plans, exported files, adapter folders and running servers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
