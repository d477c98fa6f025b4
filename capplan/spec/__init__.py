"""What the user writes and reads: workloads, plans, profiles, and the rules they must keep."""

from capplan.spec.files import read_text, write_bytes_atomic, write_text_atomic
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
from capplan.spec.settings import EngineConfig, Gpus, Objective, Pool, Slo
from capplan.spec.trace import Trace
from capplan.spec.types import LORA_RANKS, allowed_lora_rank
from capplan.spec.workload import Adapter, Arrivals, Workload
from capplan.spec.workload_file import WorkloadFile

__all__ = [
    "LORA_RANKS",
    "Adapter",
    "Arrivals",
    "Binds",
    "Cache",
    "Coefficient",
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
    "Queues",
    "Slo",
    "Totals",
    "Trace",
    "Verification",
    "Workload",
    "WorkloadFile",
    "Wrs",
    "allowed_lora_rank",
    "load_workload",
    "read_text",
    "write_bytes_atomic",
    "write_text_atomic",
]
