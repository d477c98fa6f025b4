"""Workloads of papers, systems and public traces, by name."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from capplan.errors import InputError
from capplan.workload.presets import (
    adapter_caching,
    chameleon,
    generators,
    loraserve,
    recorded,
    toppings,
)
from capplan.workload.presets.base import Preset

__all__ = ["Preset", "preset", "presets"]

_SOURCES = (chameleon, loraserve, toppings, adapter_caching, generators, recorded)


@lru_cache(maxsize=1)
def presets() -> Mapping[str, Preset]:
    """Return every preset by its name, source by source."""
    return MappingProxyType({each.name: each for source in _SOURCES for each in source.presets()})


def preset(name: str) -> Preset:
    """Return a preset.

    Raises
    ------
    InputError
        For a name that none has, with the nearest one.
    """
    from difflib import get_close_matches

    known = presets()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"must be a preset of `capplan workload preset --list`{hint}", name, "preset")
    return known[name]
