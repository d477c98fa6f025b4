"""Shared memory without a name in a file system, so that a process that is killed leaves nothing behind."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any, Final, Self

import torch

from capplan.errors import InputError

_cudart: Final[Any] = torch.cuda.cudart
_PUNCH_HOLE: Final = 3  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE


class SharedMemory:
    """Memory of a file without a name, mapped by all processes that inherit its descriptor.

    Pages that nothing was written to take no memory.

    Parameters
    ----------
    descriptor
        Of existing memory, which this process inherited.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, 0)

    @classmethod
    def new(cls, size_bytes: int) -> Self:
        """Return new memory, filled with zeros.

        Raises
        ------
        InputError
            If the system has no such memory, or not as much.
        """
        if sys.platform != "linux":
            raise InputError(
                "must not be assisted: the cores share memory as Linux does", None, "cache.loading"
            )
        descriptor = os.memfd_create("capplan", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(mmap.PAGESIZE, size_bytes))
            return cls(descriptor)
        except OSError as error:
            os.close(descriptor)
            rule = f"must leave {size_bytes / 2**30:.3g} GiB of shared memory ({error.strerror})"
            raise InputError(rule, None, "cache.loading") from None

    def tensor(self, start_bytes: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a part of the memory."""
        return torch.frombuffer(self._map, dtype=dtype, count=elements, offset=start_bytes)

    def reserve(self, start_bytes: int, size_bytes: int) -> bool:
        """Take memory for a part of it now; return False if there is none, where a write would be fatal."""
        try:
            os.posix_fallocate(self.descriptor, start_bytes, size_bytes)
        except OSError:
            return False
        return True

    def pin(self, start_bytes: int, size_bytes: int) -> None:
        """Let a GPU copy from and to a part of the memory by itself."""
        address = self.tensor(start_bytes, size_bytes, torch.uint8).data_ptr()
        torch.cuda.check_error(_cudart().cudaHostRegister(address, size_bytes, 0))

    def unpin(self, start_bytes: int) -> None:
        """Undo `pin`."""
        address = self.tensor(start_bytes, 1, torch.uint8).data_ptr()
        torch.cuda.check_error(_cudart().cudaHostUnregister(address))

    def release(self, start_bytes: int, size_bytes: int) -> None:
        """Return the memory of a part, which holds zeros then."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate(self.descriptor, _PUNCH_HOLE, ctypes.c_long(start_bytes), ctypes.c_long(size_bytes))

    def close(self) -> None:
        """Close the descriptor; the mapping ends with the last tensor of it."""
        os.close(self.descriptor)
