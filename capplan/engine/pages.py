"""One pool of pages: KV blocks, and in unified memory adapters, too.

A page has the bytes of one KV block over all layers. Page 0 holds zeros and belongs to nobody: what pads a
table points there. Nor does the last one, which is written where a step is padded, and never read from.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.models.config import ModelConfig

NULL_PAGE = 0


class PagePool:
    """Pages of memory and the list of those that nobody holds.

    Attributes
    ----------
    tensor
        Shape (pages, page elements), in the dtype of the model.
    dump_page
        Where padding of a step is written.
    """

    def __init__(self, pages: int, page_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros((pages + 2, page_elements), dtype=dtype, device=device)
        self.capacity = pages
        self.dump_page = pages + 1
        self.free = pages
        """Pages that nobody holds."""
        self._stack = np.arange(pages, 0, -1, dtype=np.int64)

    @property
    def free_pages(self) -> NDArray[np.int64]:
        """The pages that nobody holds, the next ones last."""
        return self._stack[: self.free]

    def take(self, count: int) -> NDArray[np.int64]:
        """Take pages; what they hold is of no use.

        Raises
        ------
        RuntimeError
            When fewer are free, which the scheduler's count rules out.
        """
        if count > self.free:
            raise RuntimeError(f"{count} pages wanted, {self.free} free: the scheduler's count is broken")
        self.free -= count
        return self._stack[self.free : self.free + count][::-1].copy()

    def give(self, pages: NDArray[np.int64]) -> None:
        """Hand pages back."""
        self._stack[self.free : self.free + pages.size] = pages
        self.free += pages.size

    def clear(self, pages: torch.Tensor) -> None:
        """Fill pages with zeros.

        Attention reads whole blocks and gives the part behind the last token no weight; but no weight times
        what is not a number is not a number, so nothing of an earlier request may stand there.
        """
        self.tensor.index_fill_(0, pages, 0.0)


def kv_page_elements(config: ModelConfig, block_size: int) -> int:
    """Return the numbers in one KV block: keys and values of all layers."""
    return config.layers * 2 * block_size * config.kv_size
