from ._catalog import (
    MIXTURES,
    GpuSheet,
    arch_of,
    architectures_of,
    find_gpu,
    flag,
    gpu_sheet,
    hf_config,
    known_arch,
    model_arch,
    other_gpu,
    other_model,
    read_arch,
    require_known_experts,
    whole_number,
)
from ._nested_config import language_model
from ._profile_files import list_profiles, load_profile, surrogate_path
from ._quantization import WeightFormat, weight_format

__all__ = [
    "MIXTURES",
    "GpuSheet",
    "WeightFormat",
    "arch_of",
    "architectures_of",
    "find_gpu",
    "flag",
    "gpu_sheet",
    "hf_config",
    "known_arch",
    "language_model",
    "list_profiles",
    "load_profile",
    "model_arch",
    "other_gpu",
    "other_model",
    "read_arch",
    "require_known_experts",
    "surrogate_path",
    "weight_format",
    "whole_number",
]
