"""Tensor parallelism: one process per GPU, the first of which schedules."""
