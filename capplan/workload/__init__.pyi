from ._lengths import LengthTable, length_table
from ._load import load_workload
from ._peak import DecidingTime, TraceWindow, busiest_window, deciding_time, is_modulated, trace_windows
from ._predictors import (
    ADAPTERS,
    CLASS_TOKENS,
    FEATURES,
    LengthClasses,
    length_classes,
    numbered_adapters,
    predicted_tokens,
    predictor_features,
    read_predictor,
)
from ._presets import Preset, preset, presets
from ._requests import Requests, draw_requests
from ._sampling import uniform
from ._trace_files import (
    EPOCH_S,
    PER_S,
    UNIT_WORDS,
    WHOLE,
    TimeColumn,
    defined_unit,
    read_length_pairs,
    read_trace,
    read_vllm_result,
    time_unit_of,
)

__all__ = [
    "ADAPTERS",
    "CLASS_TOKENS",
    "EPOCH_S",
    "FEATURES",
    "PER_S",
    "UNIT_WORDS",
    "WHOLE",
    "DecidingTime",
    "LengthClasses",
    "LengthTable",
    "Preset",
    "Requests",
    "TimeColumn",
    "TraceWindow",
    "busiest_window",
    "deciding_time",
    "defined_unit",
    "draw_requests",
    "is_modulated",
    "length_classes",
    "length_table",
    "load_workload",
    "numbered_adapters",
    "predicted_tokens",
    "predictor_features",
    "preset",
    "presets",
    "read_length_pairs",
    "read_predictor",
    "read_trace",
    "read_vllm_result",
    "time_unit_of",
    "trace_windows",
    "uniform",
]
