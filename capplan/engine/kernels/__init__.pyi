from ._torch_lora import GroupedLoRA, PaddedLoRA
from ._triton_lora import Kind, TritonLoRA

__all__ = [
    "GroupedLoRA",
    "Kind",
    "PaddedLoRA",
    "TritonLoRA",
]
