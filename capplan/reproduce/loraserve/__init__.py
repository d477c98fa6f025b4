"""LoRAServe: its setting, systems and figures."""

from capplan.reproduce.loraserve._figures import EXPERIMENTS

__all__ = ["EXPERIMENTS"]
