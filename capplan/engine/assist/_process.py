"""Process of a CPU core.

``python -m capplan.engine.assist._process WAKE BOARD WEIGHTS PARENT CORE CPU SHAPE DTYPE``: descriptors of
the socket that wakes it and of the shared memory of board and adapters; the process that it ends with; its
number, and the CPU that it runs on; sizes of the board, and the dtype of everything.

It sleeps until it is woken, and polls the board while a batch is active. It ends when the socket is closed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Final

import torch

from capplan.engine.assist._board import Board, BoardShape, Task
from capplan.engine.assist._shared import SharedMemory
from capplan.processes import end_by_kernel_with

_POLLS: Final = 2000
"""Polls before a yield to other processes of the CPU."""


class Core:
    """Computes the tasks of one core."""

    def __init__(self, number: int, board: Board, weights: torch.Tensor) -> None:
        self._number = number
        self._board = board
        self._weights = weights

    def serve(self, wake: socket.socket) -> None:
        """Compute rounds until the engine closes its end."""
        last = self._board.round()
        self._board.set_done(self._number, last, 0)
        wake.sendall(b"\0")  # ready
        while wake.recv(64):
            polls = 0
            while self._board.is_active():
                number = self._board.round()
                if number != last:
                    last, polls = number, 0
                    self._compute(number)
                    continue
                polls += 1
                if polls % _POLLS == 0:
                    os.sched_yield()

    def _compute(self, number: int) -> None:
        began_ns = time.perf_counter_ns()
        for task in self._board.tasks_of(self._number):
            product(self._board, self._weights, task)
        self._board.set_done(self._number, number, time.perf_counter_ns() - began_ns)


def product(board: Board, weights: torch.Tensor, task: Task) -> None:
    """Compute a task: x A B of a slice of tokens."""
    first, end = task.first_row, task.first_row + task.rows
    x = board.x(end, task.inputs)[first:]
    a = weights[task.a : task.a + task.rank * task.inputs].view(task.rank, task.inputs)
    b = weights[task.b : task.b + task.rank * task.outputs].view(task.rank, task.outputs)
    out = board.out(end, board.shape.outputs)[first:, task.column : task.column + task.outputs]
    torch.mm(torch.mm(x, a.t()), b, out=out)


def main() -> None:
    """Run the process."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # the engine closes the socket
    *numbers, sizes, dtype_name = sys.argv[1:]
    wake, board, weights, parent, core, cpu = map(int, numbers)
    end_by_kernel_with(parent)
    with suppress(OSError):
        os.sched_setaffinity(0, {cpu})
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dtype = getattr(torch, dtype_name)
    shape = BoardShape(*map(int, sizes.split(",")))
    adapters = SharedMemory(weights)
    elements = os.fstat(weights).st_size // dtype.itemsize
    with suppress(OSError):  # the engine has ended
        own = Core(core, Board(SharedMemory(board), shape, dtype), adapters.tensor(0, elements, dtype))
        own.serve(socket.socket(fileno=wake))


if __name__ == "__main__":
    main()
