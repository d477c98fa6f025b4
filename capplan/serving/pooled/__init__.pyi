from ._caches import evict
from ._queue_design import RequestSample, base_model_bytes, clustered_classes, design_queues
from ._refresh import PoolSetup, compile_refresh, new_queues, pool_setup, refresh, set_up, set_up_policies
from ._size_queues import forget_execution, leave_queue
from ._slora import drop_unused
from ._state import GDSF, NO_CACHE, QUEUES, SJF, PooledState, has_pool, with_pool

__all__ = [
    "GDSF",
    "NO_CACHE",
    "QUEUES",
    "SJF",
    "PoolSetup",
    "PooledState",
    "RequestSample",
    "base_model_bytes",
    "clustered_classes",
    "compile_refresh",
    "design_queues",
    "drop_unused",
    "evict",
    "forget_execution",
    "has_pool",
    "leave_queue",
    "new_queues",
    "pool_setup",
    "refresh",
    "set_up",
    "set_up_policies",
    "with_pool",
]
