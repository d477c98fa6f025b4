"""Tables of results and the words beside them, for the terminal and for pages."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
