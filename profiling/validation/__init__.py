"""Validation of plans on running servers, under the requests that the twin simulates."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
