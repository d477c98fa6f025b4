"""OpenAI-compatible server of the engine; docs/how-it-works/engine.md follows one request through it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
