"""Documents: workloads, plans, profiles, and their validation rules."""

from capplan.spec.durable import write_bytes_atomic, write_text_atomic
from capplan.spec.engine_args import EngineArgs, EngineConfig
from capplan.spec.files import read_text
from capplan.spec.lengths import LengthPairs, Lengths
from capplan.spec.plan import (
    Binds,
    Group,
    GroupVerification,
    Move,
    Plan,
    PlanAdapter,
    PlanBase,
    PlanEngine,
    Totals,
    Verification,
)
from capplan.spec.predicted import Percentiles, Predicted, SchedulingPrediction, SizePrediction
from capplan.spec.profile import (
    Coefficient,
    Fit,
    FittedModel,
    Gpu,
    Kernel,
    ModelArch,
    Profile,
    ProfileEngine,
    Provenance,
    ProvenanceKind,
    Uncertainty,
)
from capplan.spec.queues import QueueClass, QueueConfig, Queues, Wrs
from capplan.spec.rebalance import RebalanceSettings
from capplan.spec.routing import RouterOptions
from capplan.spec.scheduling import Cache, Predictor, Scheduler
from capplan.spec.slo import STARVED_BELOW, Gpus, Objective, Pool, Slo
from capplan.spec.step_tables import StepTable, TableAxis
from capplan.spec.trace import TimeUnit, Trace, TraceFormat
from capplan.spec.traffic import (
    ArrivalProcess,
    Arrivals,
    Burst,
    Diurnal,
    Renewal,
    ShiftingSkew,
    Steps,
    Stickiness,
    Unpredictable,
)
from capplan.spec.validation import LORA_RANKS, allowed_lora_rank
from capplan.spec.workload import Adapter, BaseTraffic, Workload
from capplan.spec.workload_file import WorkloadFile

__all__ = [
    "LORA_RANKS",
    "STARVED_BELOW",
    "Adapter",
    "ArrivalProcess",
    "Arrivals",
    "BaseTraffic",
    "Binds",
    "Burst",
    "Cache",
    "Coefficient",
    "Diurnal",
    "EngineArgs",
    "EngineConfig",
    "Fit",
    "FittedModel",
    "Gpu",
    "Gpus",
    "Group",
    "GroupVerification",
    "Kernel",
    "LengthPairs",
    "Lengths",
    "ModelArch",
    "Move",
    "Objective",
    "Percentiles",
    "Plan",
    "PlanAdapter",
    "PlanBase",
    "PlanEngine",
    "Pool",
    "Predicted",
    "Predictor",
    "Profile",
    "ProfileEngine",
    "Provenance",
    "ProvenanceKind",
    "QueueClass",
    "QueueConfig",
    "Queues",
    "RebalanceSettings",
    "Renewal",
    "RouterOptions",
    "Scheduler",
    "SchedulingPrediction",
    "ShiftingSkew",
    "SizePrediction",
    "Slo",
    "StepTable",
    "Steps",
    "Stickiness",
    "TableAxis",
    "TimeUnit",
    "Totals",
    "Trace",
    "TraceFormat",
    "Uncertainty",
    "Unpredictable",
    "Verification",
    "Workload",
    "WorkloadFile",
    "Wrs",
    "allowed_lora_rank",
    "read_text",
    "write_bytes_atomic",
    "write_text_atomic",
]
