"""Triton kernels for GPUs: low-rank products of many adapters in one launch, and attention over pages.

Imported only where they are used: Triton need not be installed on a machine without a GPU.
"""
