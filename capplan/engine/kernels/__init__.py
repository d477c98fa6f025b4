"""Kernels of LoRA products, paged attention and norms: PyTorch, numba (CPU) and Triton (GPU).

Triton modules are imported on use: Triton may be absent on a machine without a GPU.
"""
