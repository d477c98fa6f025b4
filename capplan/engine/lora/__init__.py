"""LoRA adapters: sources, host and device memory, loads."""

from capplan.engine.lora._adapter import AdapterLayout, AdapterSource, HostAdapter, RandomAdapter
from capplan.engine.lora._peft import PeftFolder

__all__ = ["AdapterLayout", "AdapterSource", "HostAdapter", "PeftFolder", "RandomAdapter"]
