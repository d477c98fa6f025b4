from ._board import BoardShape, Task
from ._crew import CoreTimes, Crew, board_shape, crew_cpus, measured_times, start_crew
from ._lora import Assistance

__all__ = [
    "Assistance",
    "BoardShape",
    "CoreTimes",
    "Crew",
    "Task",
    "board_shape",
    "crew_cpus",
    "measured_times",
    "start_crew",
]
