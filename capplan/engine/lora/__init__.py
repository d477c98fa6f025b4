"""Adapters: read from PEFT folders or drawn at random, kept on the host, brought into memory, applied."""

from capplan.engine.lora.adapter import HostAdapter
from capplan.engine.lora.layout import AdapterLayout
from capplan.engine.lora.sources import AdapterSource, PeftFolder, RandomAdapter

__all__ = ["AdapterLayout", "AdapterSource", "HostAdapter", "PeftFolder", "RandomAdapter"]
