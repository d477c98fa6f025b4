"""From a plan to the files that deployers consume: pure functions, which write nothing themselves."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from capplan.deploy.vllm import TOP_NAMES, vllm_files
from capplan.spec import Plan


class Exporter(Protocol):
    """Turns a plan into files."""

    def __call__(self, plan: Plan, *, port: int, runtime_updates: bool) -> dict[str, str]:
        """Return the text of each file, by its path within the exported directory."""
        ...


EXPORTERS: Final[Mapping[str, Exporter]] = MappingProxyType({"vllm": vllm_files})
"""The exporters by the name of their target."""

__all__ = ["EXPORTERS", "TOP_NAMES", "Exporter", "vllm_files"]
