"""LoRA adapters: sources, host and device memory, loads."""

from capplan.engine.lora.adapter import AdapterLayout, AdapterSource, HostAdapter, PeftFolder, RandomAdapter

__all__ = ["AdapterLayout", "AdapterSource", "HostAdapter", "PeftFolder", "RandomAdapter"]
