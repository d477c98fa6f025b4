"""Sums and gathers over the ranks of a model: NCCL between GPUs, gloo between CPU processes.

The process groups are not registered with `torch.distributed`, whose default group would be one per process.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch

from capplan.engine.models.shard import ModelShard

_LOOPBACK: Final = "127.0.0.1"
_C10D: Final[Any] = torch.distributed


class Collectives:
    """Collectives of a model on one rank, which have nothing to do."""

    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in place."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, from shape (tokens, columns) to (tokens, size * columns)."""
        return x

    def close(self) -> None:
        """End the connections."""


class DistributedCollectives(Collectives):
    """Collectives between processes of this machine.

    Parameters
    ----------
    meeting
        File, still missing, by which the processes find each other.
    timeout_s
        For all ranks to arrive at a collective.

    Raises
    ------
    RuntimeError
        From every method, if another rank ends or does not arrive.
    """

    def __init__(self, shard: ModelShard, device: torch.device, meeting: Path, timeout_s: float) -> None:
        self.size = shard.size
        store = _C10D.FileStore(str(meeting), shard.size)
        timeout = timedelta(seconds=timeout_s)
        new_backend = _nccl if device.type == "cuda" else _gloo
        kind, backend = new_backend(store, shard, timeout)
        self._group = _C10D.ProcessGroup(store, shard.rank, shard.size)
        self._group._set_default_backend(kind)
        backend._set_sequence_number_for_group()
        self._group._register_backend(device, kind, backend)
        self.all_reduce(torch.zeros(1, device=device))  # connects

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in place."""
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, from shape (tokens, columns) to (tokens, size * columns)."""
        tokens, columns = x.shape
        found = x.new_empty(self.size * tokens, columns)
        if tokens:
            self._group._allgather_base(found, x.contiguous()).wait()
        return found.view(self.size, tokens, columns).movedim(0, 1).reshape(tokens, self.size * columns)

    def close(self) -> None:
        """End the connections."""
        self._group.abort()


def _gloo(store: Any, shard: ModelShard, timeout: timedelta) -> tuple[Any, Any]:
    options = _C10D.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_C10D.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    gloo = _C10D.ProcessGroupGloo(store, shard.rank, shard.size, options)
    return _C10D.ProcessGroup.BackendType.GLOO, gloo


def _nccl(store: Any, shard: ModelShard, timeout: timedelta) -> tuple[Any, Any]:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    options = _C10D.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = _C10D.ProcessGroupNCCL(store, shard.rank, shard.size, options)
    return _C10D.ProcessGroup.BackendType.NCCL, nccl
