"""Chameleon (MICRO 2025): its setting, systems and figures."""

from capplan.reproduce.chameleon._figures import FIGURES as EXPERIMENTS

__all__ = ["EXPERIMENTS"]
