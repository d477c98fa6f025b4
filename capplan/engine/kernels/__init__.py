"""Kernels of LoRA products, paged attention and norms: PyTorch, numba (CPU) and Triton (GPU).

Triton modules are imported on use: Triton may be absent on a machine without a GPU.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
