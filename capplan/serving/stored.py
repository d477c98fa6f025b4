"""Calls of the rules from Python on an engine in memory, which they do not unpack.

The functions have the names and parameters of those of `capplan.serving`, except that the memory returned by
`store_engine` takes the place of state and limits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, jit
from capplan.serving import scheduler
from capplan.serving.lines import is_pooled, line_access, new_lines
from capplan.serving.state import POOLED, VLLM, Limits, State, new_state

_typeof: Any = numba.typeof
_can_run, _submit, _schedule, _commit = (
    scheduler.can_run,
    scheduler.submit,
    scheduler.schedule,
    scheduler.commit,
)


@by_reference
class StoredEngine(NamedTuple):
    """What the calls read."""

    state: State
    limits: Limits


@functools.cache
def _engine_type(pooled: bool) -> Any:
    limits = Limits(1, 1, 1, 1, 1, 1, 0, 0, 0, policy=POOLED if pooled else VLLM)
    return _typeof(StoredEngine(new_state(1, 0, 1, limits), limits))


if TYPE_CHECKING:

    def load_engine(memory: NDArray[np.int64], line: int) -> StoredEngine:
        """Return the engine in a line; for compiled functions only."""

    def _store(memory: NDArray[np.int64], line: int, engine: StoredEngine) -> None: ...

    def _size(memory: NDArray[np.int64]) -> int: ...

else:
    load_engine, _store, _size = line_access(_engine_type)


@jit
def _write(memory: NDArray[np.int64], engine: StoredEngine) -> None:
    _store(memory, 0, engine)


@jit
def _bytes(memory: NDArray[np.int64]) -> int:
    return _size(memory)


def store_engine(state: State, limits: Limits) -> NDArray[np.int64]:
    """Return memory of an engine, whose arrays must stay alive while it is used."""
    memory = new_lines(1, limits.policy == POOLED, _bytes)
    engine = StoredEngine(state, limits)
    if _typeof(engine) != _engine_type(is_pooled(memory)):
        raise TypeError(f"not the type of an engine: {_typeof(engine)}")
    _write(memory, engine)
    return memory


@jit
def can_run(memory: NDArray[np.int64], adapter: int, prompt: int, output: int) -> bool:
    """Return whether an idle engine can run a request."""
    engine = load_engine(memory, 0)
    return _can_run(engine.state, engine.limits, adapter, prompt, output)


@jit
def submit(
    memory: NDArray[np.int64],
    request: int,
    adapter: int,
    prompt: int,
    output: int,
    prefix: int,
    shared_tokens: int,
    predicted: int,
    arrival_ns: int,
) -> int:
    """Queue a request and return its row; NONE if no row is free or the request can never run."""
    engine = load_engine(memory, 0)
    sizes = (adapter, prompt, output, prefix, shared_tokens)
    return _submit(engine.state, engine.limits, request, *sizes, predicted, arrival_ns)


@jit
def schedule(memory: NDArray[np.int64]) -> int:
    """Decide one step and return its number of tokens; 0 if nothing can run."""
    engine = load_engine(memory, 0)
    return _schedule(engine.state, engine.limits)


@jit
def commit(memory: NDArray[np.int64]) -> None:
    """Apply the step that `schedule` decided."""
    engine = load_engine(memory, 0)
    _commit(engine.state, engine.limits)
