"""Kernels for the CPU, compiled by numba: what a decode step does between its large matrix products.

A step of few tokens is many small operations, and each costs PyTorch more to begin than to do. These here do
several of them in one pass, in float32. Prompts, and other dtypes, go through PyTorch.
"""
