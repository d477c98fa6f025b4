from ._calibration import calibration_page, kernels_page
from ._comparison import comparison_page
from ._figures import figure_of
from ._measurement import bench_page, observation_page, validation_page
from ._plan import plan_page
from ._reproduction import reproduction_page
from ._simulation import NamedResults, simulation_page
from ._training import training_page

__all__ = [
    "NamedResults",
    "bench_page",
    "calibration_page",
    "comparison_page",
    "figure_of",
    "kernels_page",
    "observation_page",
    "plan_page",
    "reproduction_page",
    "simulation_page",
    "training_page",
    "validation_page",
]
