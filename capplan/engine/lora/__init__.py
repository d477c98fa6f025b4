"""LoRA adapters: sources, host and device memory, loads."""

from capplan.engine.lora.adapter import AdapterLayout, AdapterSource, HostAdapter, RandomAdapter
from capplan.engine.lora.peft import PeftFolder

__all__ = ["AdapterLayout", "AdapterSource", "HostAdapter", "PeftFolder", "RandomAdapter"]
