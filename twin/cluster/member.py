"""Memory of the instances of a cluster: one line of words each, addressable by compiled code.

Without numba's runtime compiled code has no list of tuples, and a tuple of instances would have another type
for every length. So the arguments of `capplan.twin.core.advance` are stored in the layout of compiled code:
numbers and addresses of arrays. All instances have one type, whatever the sizes of their arrays. The caller
keeps the arrays of a stored member alive.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from capplan.compile import by_reference, jit
from capplan.serving import Limits, State, new_state
from capplan.serving.state import POOLED, VLLM
from capplan.twin.clock import TwinClock, new_clock
from capplan.twin.scenario import Costs
from capplan.twin.trace import TwinTrace, new_trace

_WORD_BYTES = 8
_typeof: Any = numba.typeof


@by_reference
class ClusterMember(NamedTuple):
    """One instance of a cluster: the state of the twin of one GPU without the requests."""

    state: State
    limits: Limits
    costs: Costs
    clock: TwinClock
    trace: TwinTrace
    max_in_flight: int


_POOLED = np.uint64
"""Type of the words where the rules are those for one pool: the type of a member follows from its memory."""


@functools.cache
def _member_type(pooled: bool) -> Any:
    """Return the compiled type of every member of a cluster."""
    numbers = np.zeros(1, np.int64)
    limits = Limits(1, 1, 1, 1, 1, 1, 0, 0, 0, policy=POOLED if pooled else VLLM)
    costs = Costs(0, np.zeros(1), 1, 1, 1.0, 1, numbers, numbers, numbers, False, False, numbers)
    return _typeof(ClusterMember(new_state(1, 0, 1, limits), limits, costs, new_clock(0), new_trace(1), 1))


def _member_of(memory: Any) -> Any:
    """Return the compiled type of the members in memory of a compiled type."""
    return _member_type(memory.dtype == numba.uint64)


def _line(builder: Any, context: Any, memory: Any, line: Any, memory_type: Any, kind: Any) -> Any:
    """Return a line of `memory` as a pointer to a member."""
    array = context.make_array(memory_type)(context, builder, memory)
    line_bytes = builder.extract_value(array.strides, 0)
    address = builder.add(builder.ptrtoint(array.data, line_bytes.type), builder.mul(line, line_bytes))
    return builder.inttoptr(address, kind)


if TYPE_CHECKING:

    def load_member(memory: NDArray[np.int64], slot: int) -> ClusterMember:
        """Return the member in a line; for compiled functions only."""

    def _store(memory: NDArray[np.int64], slot: int, member: ClusterMember) -> None: ...

    def _size(memory: NDArray[np.int64]) -> int: ...

else:

    @intrinsic
    def load_member(_typing, memory, _slot):
        """Return the member in a line; for compiled functions only."""

        def generate(context, builder, signature, args):
            kind = context.get_value_type(signature.return_type)
            member = builder.load(_line(builder, context, *args, signature.args[0], kind))
            return cgutils.alloca_once_value(builder, member)

        return _member_of(memory)(memory, numba.int64), generate

    @intrinsic
    def _store(_typing, memory, _slot, member):
        def generate(context, builder, signature, args):
            kind = context.get_value_type(signature.args[2])
            line = _line(builder, context, *args[:2], signature.args[0], kind)
            builder.store(builder.load(args[2]), line)
            return context.get_dummy_value()

        return numba.void(memory, numba.int64, member), generate

    @intrinsic
    def _size(_typing, memory):
        def generate(context, _builder, _signature, _args):
            layout = _member_of(memory).layout(context.get_value_type)
            return context.get_constant(numba.int64, context.get_abi_sizeof(layout))

        return numba.int64(memory), generate


@jit
def _write(memory: NDArray[np.int64], slot: int, member: ClusterMember) -> None:
    _store(memory, slot, member)


@jit
def _bytes(memory: NDArray[np.int64]) -> int:
    return _size(memory)


def new_memory(members: int, pooled: bool = False) -> NDArray[np.int64]:
    """Return memory for members, shape (members, words); `pooled`: under the rules for one pool."""
    empty: NDArray[Any] = np.zeros((0, 0), _POOLED if pooled else np.int64)
    return np.zeros((members, -(-_bytes(empty) // _WORD_BYTES)), empty.dtype)


def store_member(memory: NDArray[np.int64], slot: int, member: ClusterMember) -> None:
    """Store a member; its arrays must stay alive while `memory` is used, and be writable."""
    if _typeof(member) != _member_type(memory.dtype == _POOLED):
        raise TypeError(f"not the type of a member: {_typeof(member)}")
    _write(memory, slot, member)
