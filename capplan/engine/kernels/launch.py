"""Launch of a Triton kernel: one definition for running it and for compiling it ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import torch

_DEFAULT_MULTIPROCESSORS: Final = 132
"""Of an H100 (SXM), for devices that are no GPU."""


class Launch(NamedTuple):
    """Kernel, grid, arguments and configuration.

    Arguments on the ``meta`` device describe a launch that is only compiled.
    """

    kernel: Any
    """Function under `triton.jit`."""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    config: Mapping[str, Any]
    """Constants of the kernel, ``num_warps`` and ``num_stages``."""

    def run(self) -> None:
        """Launch the kernel on the current stream."""
        self.kernel[self.grid](*self.arguments, **self.config)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU."""
    if device.type != "cuda":
        return _DEFAULT_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
