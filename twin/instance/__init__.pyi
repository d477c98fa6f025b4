from ._core import run
from ._extrapolation import MODELS, SLACK, Extrapolation, extrapolations, merged, values_of
from ._group_metrics import Attainment, GroupMetrics
from ._metrics import PoolMetrics, SimulationResult, bound_value, summarize
from ._paired import PAIRED_SEEDS, PairedOrder, mean_with_error, paired_difference, paired_order
from ._per_request import (
    FINISHED,
    LOST,
    REJECTED,
    STATUSES,
    WAITING,
    request_status,
    several_tables,
    write_parquet,
)
from ._scenario import (
    NS_PER_S,
    Scenario,
    build_scenario,
    choose_policies,
    chosen_rules,
    draw_for,
    with_predictions,
)
from ._simulate import SimulateSettings, engine_args, keywords_of, tpt_attainment
from ._trace import NEVER, STATUS_REJECTED, TwinTrace

__all__ = [
    "FINISHED",
    "LOST",
    "MODELS",
    "NEVER",
    "NS_PER_S",
    "PAIRED_SEEDS",
    "REJECTED",
    "SLACK",
    "STATUSES",
    "STATUS_REJECTED",
    "WAITING",
    "Attainment",
    "Extrapolation",
    "GroupMetrics",
    "PairedOrder",
    "PoolMetrics",
    "Scenario",
    "SimulateSettings",
    "SimulationResult",
    "TwinTrace",
    "bound_value",
    "build_scenario",
    "choose_policies",
    "chosen_rules",
    "draw_for",
    "engine_args",
    "extrapolations",
    "keywords_of",
    "mean_with_error",
    "merged",
    "paired_difference",
    "paired_order",
    "request_status",
    "run",
    "several_tables",
    "summarize",
    "tpt_attainment",
    "values_of",
    "with_predictions",
    "write_parquet",
]
