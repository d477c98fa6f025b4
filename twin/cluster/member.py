"""Memory of the instances of a cluster: one line each, with the arguments of the compiled loop.

All instances have one type, whatever the sizes of their arrays.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, jit
from capplan.serving import Limits, State, new_state
from capplan.serving.lines import is_pooled, line_access, new_lines
from capplan.serving.state import POOLED, VLLM
from capplan.twin.instance.clock import TwinClock, new_clock
from capplan.twin.instance.scenario import Costs
from capplan.twin.instance.trace import TwinTrace, new_trace

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


@functools.cache
def _member_type(pooled: bool) -> Any:
    """Return the compiled type of every member of a cluster."""
    numbers = np.zeros(1, np.int64)
    limits = Limits(1, 1, 1, 1, 1, 1, 0, 0, 0, policy=POOLED if pooled else VLLM)
    costs = Costs(0, np.zeros(1), 1, 1, 1.0, 1, numbers, numbers, numbers, False, False, numbers)
    return _typeof(ClusterMember(new_state(1, 0, 1, limits), limits, costs, new_clock(0), new_trace(1), 1))


if TYPE_CHECKING:

    def load_member(memory: NDArray[np.int64], slot: int) -> ClusterMember:
        """Return the member in a line; for compiled functions only."""

    def _store(memory: NDArray[np.int64], slot: int, member: ClusterMember) -> None: ...

    def _size(memory: NDArray[np.int64]) -> int: ...

else:
    load_member, _store, _size = line_access(_member_type)


@jit
def _write(memory: NDArray[np.int64], slot: int, member: ClusterMember) -> None:
    _store(memory, slot, member)


@jit
def _bytes(memory: NDArray[np.int64]) -> int:
    return _size(memory)


def new_memory(members: int, pooled: bool = False) -> NDArray[np.int64]:
    """Return memory for members, shape (members, words); `pooled`: under the rules for one pool."""
    return new_lines(members, pooled, _bytes)


def store_member(memory: NDArray[np.int64], slot: int, member: ClusterMember) -> None:
    """Store a member; its arrays must stay alive while `memory` is used, and be writable."""
    if _typeof(member) != _member_type(is_pooled(memory)):
        raise TypeError(f"not the type of a member: {_typeof(member)}")
    _write(memory, slot, member)
