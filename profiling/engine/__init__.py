"""Measuring the reference engine: its steps, adapter loads, KV memory, and what serving adds to a step."""
