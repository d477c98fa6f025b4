from ._catalog import (
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
    require_dense,
    whole_number,
)
from ._nested_config import language_model
from ._profile_files import list_profiles, load_profile, surrogate_path
from ._quantization import WeightFormat, weight_format

__all__ = [
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
    "require_dense",
    "surrogate_path",
    "weight_format",
    "whole_number",
]
