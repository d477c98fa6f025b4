"""Adapters: read from PEFT folders or drawn at random, kept on the host, brought into memory, applied."""

from capplan.engine.lora.adapter import AdapterLayout, AdapterSource, HostAdapter, PeftFolder, RandomAdapter

__all__ = ["AdapterLayout", "AdapterSource", "HostAdapter", "PeftFolder", "RandomAdapter"]
