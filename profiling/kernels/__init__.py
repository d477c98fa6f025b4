"""Timings of low-rank products of many adapters, shrink and expand separately."""
