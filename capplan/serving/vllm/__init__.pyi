from ._adapter_slots import release_adapter
from ._admission import decode_step, steps_ahead
from ._running import free_row
from ._waiting_queue import leave_waiting

__all__ = [
    "decode_step",
    "free_row",
    "leave_waiting",
    "release_adapter",
    "steps_ahead",
]
