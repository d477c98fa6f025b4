from ._board import BoardShape, Task
from ._crew import Crew, board_shape, crew_cpus, start_crew
from ._lora import Assistance
from ._measure import CoreTimes, measured_times

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
