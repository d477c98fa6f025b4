"""CPU cores that compute the layers of an adapter which are not on the GPU yet (Toppings, section 4)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
