from ._affinity import AUTO, bound_to, core_cpus, cpu_model, cpuinfo, device_name, other_cpus
from ._core_process import CoreProcess, is_stopped
from ._engine import Engine
from ._engine_core import StateReport, StepOutput
from ._input_batch import Segment
from ._messages import (
    AbortRequests,
    AddRequests,
    Call,
    CoreFailed,
    CoreReady,
    CoreSettings,
    Ended,
    FrameReader,
    Gauges,
    NewRequest,
    PoolGauges,
    Refusals,
    Reply,
    StepTokens,
    frame,
)
from ._request import Completion, FinishReason, Request, SamplingParams, TokenLogprobs
from ._scheduler_output import Decision
from ._settings import EngineOptions
from ._timing import RecordFile, StepRecord
from ._tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from ._worker import Sizes, free_unused
from .models import ModelConfig

__all__ = [
    "AUTO",
    "AbortRequests",
    "AddRequests",
    "ByteTokenizer",
    "Call",
    "Completion",
    "CoreFailed",
    "CoreProcess",
    "CoreReady",
    "CoreSettings",
    "Decision",
    "Ended",
    "Engine",
    "EngineOptions",
    "FinishReason",
    "FrameReader",
    "Gauges",
    "ModelConfig",
    "NewRequest",
    "PoolGauges",
    "RecordFile",
    "Refusals",
    "Reply",
    "Request",
    "SamplingParams",
    "Segment",
    "Sizes",
    "StateReport",
    "StepOutput",
    "StepRecord",
    "StepTokens",
    "TokenLogprobs",
    "Tokenizer",
    "bound_to",
    "core_cpus",
    "cpu_model",
    "cpuinfo",
    "device_name",
    "frame",
    "free_unused",
    "is_stopped",
    "load_tokenizer",
    "other_cpus",
]
