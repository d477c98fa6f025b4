"""Reference engine: multi-LoRA inference with the scheduling rules of `capplan.serving`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
