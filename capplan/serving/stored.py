"""Calls of the rules from Python on an engine in memory, which they do not unpack.

The functions have the names and parameters of those of `capplan.serving`, except that the memory returned by
`store_engine` takes the place of state and limits.

Named tuples in lines of memory, addressable by compiled code.

Without numba's runtime compiled code has no list of tuples, and a tuple of tuples has another type for every
length. A call from Python unpacks the arrays of its tuples one by one, which takes longer than most rules. So
a tuple is stored in the layout of compiled code: numbers and addresses of arrays. Its type follows from that
of the memory. The caller keeps the arrays of a stored tuple alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numba
import numpy as np
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from capplan._jit import by_reference, jit, note_address
from capplan.serving._scheduler import can_run as _can_run
from capplan.serving._scheduler import commit as _commit
from capplan.serving._scheduler import schedule as _schedule
from capplan.serving._scheduler import submit as _submit
from capplan.serving.state import POOLED, VLLM, Limits, State, new_state

_WORD_BYTES: Final = 8
_POOLED: Final = np.uint64
"""Type of the words under the rules for one pool, whose state has further fields."""


def line_access(type_of: Callable[[bool], Any]) -> tuple[Any, Any, Any]:
    """Return three functions for compiled code: load a tuple from a line, store one, size of one in bytes.

    `type_of` returns the compiled type of the tuples; its argument is whether the rules are those for one
    pool.
    """

    def kind_of(memory: Any) -> Any:
        return type_of(memory.dtype == numba.uint64)

    @intrinsic
    def load(_typing: Any, memory: Any, _line: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = context.get_value_type(signature.return_type)
            stored = builder.load(_address(builder, context, args, signature.args[0], kind))
            return cgutils.alloca_once_value(builder, stored)  # type: ignore[no-untyped-call]

        return kind_of(memory)(memory, numba.int64), generate

    @intrinsic
    def store(_typing: Any, memory: Any, _line: Any, stored: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = context.get_value_type(signature.args[2])
            address = _address(builder, context, args, signature.args[0], kind)
            builder.store(builder.load(args[2]), address)
            note_address(builder, address, address)
            return context.get_dummy_value()

        return numba.void(memory, numba.int64, stored), generate

    @intrinsic
    def size(_typing: Any, memory: Any) -> Any:
        def generate(context: Any, _builder: Any, _signature: Any, _args: Any) -> Any:
            layout = kind_of(memory).layout(context.get_value_type)
            return context.get_constant(numba.int64, context.get_abi_sizeof(layout))

        return numba.int64(memory), generate

    return load, store, size


def _address(builder: Any, context: Any, args: Any, memory_type: Any, kind: Any) -> Any:
    """Return a line as a pointer to a tuple; the first arguments are the memory and the line."""
    memory, line = args[:2]
    array = context.make_array(memory_type)(context, builder, memory)
    line_bytes = builder.extract_value(array.strides, 0)
    address = builder.add(builder.ptrtoint(array.data, line_bytes.type), builder.mul(line, line_bytes))
    return builder.inttoptr(address, kind)


def new_lines(count: int, pooled: bool, size_of: Callable[[NDArray[Any]], int]) -> NDArray[np.int64]:
    """Return memory for `count` tuples, shape (count, words); `pooled`: under the rules for one pool.

    `size_of` is a compiled function that returns the bytes of a tuple in memory of a type.
    """
    empty: NDArray[Any] = np.zeros((0, 0), _POOLED if pooled else np.int64)
    return np.zeros((count, -(-size_of(empty) // _WORD_BYTES)), empty.dtype)


def is_pooled(memory: NDArray[np.int64]) -> bool:
    """Return whether memory is for tuples under the rules for one pool."""
    return bool(memory.dtype == _POOLED)


_typeof: Any = numba.typeof


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
