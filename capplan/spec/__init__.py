"""What the user writes and reads: workloads, plans, profiles, and the rules they must keep."""

from capplan.spec.arrivals import (
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
from capplan.spec.files import read_text, write_bytes_atomic, write_text_atomic
from capplan.spec.length_pairs import LengthPairs
from capplan.spec.lengths import Lengths
from capplan.spec.load import load_workload
from capplan.spec.plan import Plan
from capplan.spec.plan_parts import (
    Binds,
    Cache,
    EngineArgs,
    Group,
    GroupVerification,
    Move,
    Percentiles,
    PlanAdapter,
    PlanEngine,
    Predicted,
    QueueClass,
    Queues,
    Totals,
    Verification,
    Wrs,
)
from capplan.spec.profile import (
    Coefficient,
    Engine,
    Fit,
    FittedModel,
    Gpu,
    Kernel,
    ModelArch,
    Profile,
    Provenance,
    ProvenanceKind,
)
from capplan.spec.queue_wishes import QueueWishes
from capplan.spec.settings import STARVED_BELOW, EngineConfig, Gpus, Objective, Pool, Slo
from capplan.spec.trace import Trace
from capplan.spec.trace_files import TraceFormat, read_length_pairs, read_trace
from capplan.spec.types import LORA_RANKS, allowed_lora_rank
from capplan.spec.workload import Adapter, Workload
from capplan.spec.workload_file import WorkloadFile

__all__ = [
    "LORA_RANKS",
    "STARVED_BELOW",
    "Adapter",
    "ArrivalProcess",
    "Arrivals",
    "Binds",
    "Burst",
    "Cache",
    "Coefficient",
    "Diurnal",
    "Engine",
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
    "PlanEngine",
    "Pool",
    "Predicted",
    "Profile",
    "Provenance",
    "ProvenanceKind",
    "QueueClass",
    "QueueWishes",
    "Queues",
    "Renewal",
    "ShiftingSkew",
    "Slo",
    "Steps",
    "Stickiness",
    "Totals",
    "Trace",
    "TraceFormat",
    "Unpredictable",
    "Verification",
    "Workload",
    "WorkloadFile",
    "Wrs",
    "allowed_lora_rank",
    "load_workload",
    "read_length_pairs",
    "read_text",
    "read_trace",
    "write_bytes_atomic",
    "write_text_atomic",
]
