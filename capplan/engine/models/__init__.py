"""Models of the engine: Llama and Qwen2, from a Hugging Face folder or a config alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
