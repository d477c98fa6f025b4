"""The board: shared memory by which the engine gives tasks to CPU cores and gets their results.

The engine writes tasks and activations, then raises the counter of rounds; a GPU writes the activations and
raises the counter itself. A core polls that counter,
computes its tasks, writes the results, then sets its own counter to the round. Nothing is locked, and no
counter has two writers. Each counter has a cache line of its own. Results are read only after the counter
that follows them, which holds where the processor keeps the order of stores (x86-64).
"""

from __future__ import annotations

import platform
from dataclasses import astuple, dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.assist._shared import SharedMemory

ORDERED_STORES: Final = ("x86_64", "AMD64")
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


def has_ordered_stores() -> bool:
    """Return whether counters alone tell that results are there."""
    return platform.machine() in ORDERED_STORES
