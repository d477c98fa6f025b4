"""LoRAServe's evaluation, simulated."""
