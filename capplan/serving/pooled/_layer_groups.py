"""Groups of layers in which an adapter is copied while its first prompt is computed.

CPU cores compute the adapter's part of the first group while the second is copied. The GPU computes a later
group while the next one is copied. The first group itself is copied last: decoding needs it. Groups are
chosen so that computing and copying end together; a layer that is late is computed by the CPU.

Source: Toppings, section 4.1 (pipeline loading).
"""

from __future__ import annotations

from typing import NamedTuple

from capplan._jit import inner, jit


class LayerTimes(NamedTuple):
    """Nanoseconds of one layer."""

    cpu_ns: int
    """Computed with the CPU's part of the adapter."""
    gpu_ns: int
    """Computed by the GPU alone."""
    copy_ns: int
    """Copy of the adapter's matrices."""


@inner
def _next_group(size: int, is_first: bool, times: LayerTimes) -> int:
    """Return the layers that can be copied while a group is computed."""
    compute_ns = times.cpu_ns if is_first else times.gpu_ns
    return int(size * compute_ns // max(1, times.copy_ns))


@jit
def first_group(layers: int, times: LayerTimes) -> int:
    """Return the layers of the first group: the fewest with which every later group is copied in time."""
    for first in range(1, layers):
        end, size, is_first = first, first, True
        while end < layers and size > 0:
            size = _next_group(size, is_first, times)
            end += size
            is_first = False
        if end >= layers:
            return first
    return layers


@jit
def copied_before(layers: int, first: int, times: LayerTimes, layer: int) -> int:
    """Return the layers that have been copied when the group of `layer` has."""
    if layer < first:
        return layers
    end, size, is_first = first, first, True
    while end <= layer:
        size = max(1, _next_group(size, is_first, times))
        end = min(layers, end + size)
        is_first = False
    return end - first


def layer_groups(layers: int, times: LayerTimes) -> tuple[range, ...]:
    """Return the groups in the order of their layers; the first one is copied last.

    Parameters
    ----------
    layers
        Number of layers.
    times
        Of the adapter and the prompt that needs it.
    """
    first = first_group(layers, times)
    groups = [range(first)]
    while groups[-1].stop < layers:
        begin = groups[-1].stop
        groups.append(range(begin, first + copied_before(layers, first, times, begin)))
    return tuple(groups)
