from ._caches import evict, make_resident
from ._layer_groups import LayerTimes, copied_before, first_group, layer_groups
from ._merging import switches_ns
from ._queue_design import RequestSample, base_model_bytes, clustered_classes, design_queues
from ._refresh import PoolSetup, compile_refresh, new_queues, pool_setup, refresh, set_up, set_up_policies
from ._size_queues import forget_execution, leave_queue
from ._slora import drop_unused
from ._state import (
    ASSISTED,
    ASYNCHRONOUS,
    GDSF,
    NO_CACHE,
    ON_DEMAND,
    QUEUES,
    RESIDENT,
    SJF,
    PooledState,
    has_pool,
    with_pool,
)

__all__ = [
    "ASSISTED",
    "ASYNCHRONOUS",
    "GDSF",
    "NO_CACHE",
    "ON_DEMAND",
    "QUEUES",
    "RESIDENT",
    "SJF",
    "LayerTimes",
    "PoolSetup",
    "PooledState",
    "RequestSample",
    "base_model_bytes",
    "clustered_classes",
    "compile_refresh",
    "copied_before",
    "design_queues",
    "drop_unused",
    "evict",
    "first_group",
    "forget_execution",
    "has_pool",
    "layer_groups",
    "leave_queue",
    "make_resident",
    "new_queues",
    "pool_setup",
    "refresh",
    "set_up",
    "set_up_policies",
    "switches_ns",
    "with_pool",
]
