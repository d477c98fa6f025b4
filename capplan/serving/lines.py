"""Named tuples in lines of memory, addressable by compiled code.

Without numba's runtime compiled code has no list of tuples, and a tuple of tuples has another type for every
length. A call from Python unpacks the arrays of its tuples one by one, which takes longer than most rules. So
a tuple is stored in the layout of compiled code: numbers and addresses of arrays. Its type follows from that
of the memory. The caller keeps the arrays of a stored tuple alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

_WORD_BYTES: Final = 8
_POOLED: Final = np.uint64
"""Type of the words under the rules for one pool, whose state has further fields."""


def line_access(type_of: Callable[[bool], Any]) -> tuple[Any, Any, Any]:
    """Return three functions for compiled code: load a tuple from a line, store one, size of one in bytes.

    Parameters
    ----------
    type_of
        Returns the compiled type of the tuples; its argument is whether the rules are those for one pool.
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
    """Return memory for `count` tuples, shape (count, words).

    Parameters
    ----------
    pooled
        Whether the rules are those for one pool.
    size_of
        Compiled function that returns the bytes of a tuple in memory of a type.
    """
    empty: NDArray[Any] = np.zeros((0, 0), _POOLED if pooled else np.int64)
    return np.zeros((count, -(-size_of(empty) // _WORD_BYTES)), empty.dtype)


def is_pooled(memory: NDArray[np.int64]) -> bool:
    """Return whether memory is for tuples under the rules for one pool."""
    return bool(memory.dtype == _POOLED)
