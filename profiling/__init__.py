"""Measures kernels, engine steps and adapter loads, and servers from outside."""
