"""Rules of a pool that adapters and KV share: S-LoRA, Chameleon, and policies between them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
