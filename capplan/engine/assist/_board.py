"""Memory shared with CPU cores, the board in it, and the process of a core.

The board is how the engine gives tasks to CPU cores and gets their results. The engine writes tasks and
activations, then raises the counter of rounds; a GPU writes the activations and raises the counter itself. A
core polls that counter, computes its tasks, writes the results, then sets its own counter to the round.
Nothing is locked, and no counter has two writers. Each counter has a cache line of its own. Results are read
only after the counter that follows them, which holds where the processor keeps the order of stores (x86-64).

``python -m capplan.engine.assist._board WAKE BOARD WEIGHTS PARENT CORE CPU SHAPE DTYPE`` is the process:
descriptors of the socket that wakes it and of the shared memory of board and adapters; the process that it
ends with; its number, and the CPU that it runs on; sizes of the board, and the dtype of everything. It sleeps
until it is woken, and polls the board while a batch is active. It ends when the socket is closed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.processes import end_by_kernel_with

_cudart: Final[Any] = torch.cuda.cudart
_PUNCH_HOLE: Final = 3  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE


class SharedMemory:
    """Memory of a file without a name, mapped by all processes that inherit its descriptor.

    A process that is killed leaves nothing behind. Pages that nothing was written to take no memory.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, 0)

    @classmethod
    def new(cls, size_bytes: int) -> Self:
        """Return new memory, filled with zeros; raise `InputError` if the system has none, or not as much."""
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


ORDERED_STORES: Final = ("x86_64", "AMD64")
"""Processors whose counters alone tell that results are there."""
_LINE: Final = 8  # 64-bit words of a cache line
_ROUND, _TASKS, _IS_ACTIVE = 0, _LINE, 2 * _LINE
_CORES: Final = 3 * _LINE
_TASK_FIELDS: Final = 9
_ALIGNMENT: Final = 64


class Task(NamedTuple):
    """Product of some tokens with A and B of one module in one layer; offsets in elements."""

    core: int
    first_row: int
    """Of the activations and results."""
    rows: int
    inputs: int
    a: int
    """In the adapters' memory, shape (rank, inputs)."""
    b: int
    """Likewise, shape (rank, outputs)."""
    rank: int
    outputs: int
    column: int
    """First column of the results."""


@dataclass(frozen=True)
class BoardShape:
    """Sizes of a board."""

    cores: int
    tasks: int
    tokens: int
    inputs: int
    outputs: int
    """Columns of the results: those of the widest site."""
    itemsize: int

    @property
    def counter_words(self) -> int:
        """64-bit words of the counters."""
        return _CORES + 2 * _LINE * self.cores

    def starts_bytes(self) -> tuple[int, int, int, int]:
        """Return the starts of tasks, activations and results, and the end."""
        tasks = 8 * self.counter_words
        x = _aligned(tasks + 8 * _TASK_FIELDS * self.tasks)
        out = _aligned(x + self.itemsize * self.tokens * self.inputs)
        return tasks, x, out, _aligned(out + self.itemsize * self.tokens * self.outputs)

    def text(self) -> str:
        """Return the sizes for the command line of a core."""
        return ",".join(map(str, astuple(self)))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


class Board:
    """Views of the board's memory."""

    def __init__(self, memory: SharedMemory, shape: BoardShape, dtype: torch.dtype) -> None:
        tasks, x, out, _ = shape.starts_bytes()
        self.shape = shape
        counters = memory.tensor(0, shape.counter_words, torch.int64)
        self._words: NDArray[np.int64] = counters.numpy()
        self.rounds = counters[_ROUND : _ROUND + 1]
        """The counter of rounds, which a GPU may raise."""
        self._written = 0
        table = memory.tensor(tasks, _TASK_FIELDS * shape.tasks, torch.int64)
        self._tasks: NDArray[np.int64] = table.numpy().reshape(shape.tasks, _TASK_FIELDS)
        self._x = memory.tensor(x, shape.tokens * shape.inputs, dtype)
        self._out = memory.tensor(out, shape.tokens * shape.outputs, dtype)

    def x(self, rows: int, inputs: int) -> torch.Tensor:
        """Return the activations, shape (rows, inputs)."""
        return self._x[: rows * inputs].view(rows, inputs)

    def out(self, rows: int, columns: int) -> torch.Tensor:
        """Return the results, shape (rows, columns)."""
        return self._out[: rows * columns].view(rows, columns)

    # -- the engine --

    def write(self, tasks: NDArray[np.int64]) -> int:
        """Write the tasks of the next round, shape (tasks, fields of `Task`), and return its number."""
        self._tasks[: tasks.shape[0]] = tasks
        self._words[_TASKS] = tasks.shape[0]
        self._written += 1
        return self._written

    def begin(self, number: int) -> None:
        """Let the cores begin a round, whose activations are written."""
        self._words[_ROUND] = number

    def is_done(self, core: int, number: int) -> bool:
        """Return whether a core has computed its tasks of a round."""
        return bool(self._words[_CORES + 2 * _LINE * core] >= number)

    def computed_ns(self, core: int) -> int:
        """Return the time of a core's tasks in its last round."""
        return int(self._words[_CORES + 2 * _LINE * core + _LINE])

    def set_active(self, is_active: bool) -> None:
        """Let cores poll for rounds, or sleep until they are woken."""
        self._words[_IS_ACTIVE] = is_active

    # -- a core --

    def is_active(self) -> bool:
        """Return whether rounds may come."""
        return bool(self._words[_IS_ACTIVE])

    def round(self) -> int:
        """Return the number of the last round."""
        return int(self._words[_ROUND])

    def tasks_of(self, core: int) -> list[Task]:
        """Return the tasks of a core in the last round."""
        tasks = self._tasks[: self._words[_TASKS]]
        return [Task(*row) for row in tasks[tasks[:, 0] == core].tolist()]

    def set_done(self, core: int, number: int, computed_ns: int) -> None:
        """Note the end of a round, after its results are written."""
        self._words[_CORES + 2 * _LINE * core + _LINE] = computed_ns
        self._words[_CORES + 2 * _LINE * core] = number


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
