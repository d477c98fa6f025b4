"""Measured rows, the deployments that they were measured on, and profiles for these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from capplan import InputError, Profile
from capplan.datasets.catalog import gpu_sheet, known_arch
from capplan.models.roofline import EngineChoice, roofline_profile
from capplan.serving.rules import rules_of_version
from capplan.spec import ModelArch


@dataclass(frozen=True)
class Deployment:
    """A model on GPUs under one engine version."""

    gpu: str
    """Key of the GPU's data sheet."""
    model: str
    """Hugging Face id."""
    tp: int = 1
    version: str = ""
    """Version of vLLM; empty: not recorded."""
    dtype: str = "bfloat16"


class MeasuredCase(Protocol):
    """One measured row."""

    @property
    def name(self) -> str: ...

    @property
    def deployment(self) -> Deployment: ...

    @property
    def measured(self) -> Mapping[str, float]:
        """Measured values by metric, with the unit in the name."""

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Return the simulated values of the same metrics."""


@dataclass(frozen=True)
class LeftOut:
    """Rows that no coefficient of a profile may rest on: those with this value of a key."""

    key: str
    """``gpu`` or ``model``."""
    value: str

    def covers(self, deployment: Deployment) -> bool:
        return bool(getattr(deployment, self.key) == self.value)


ProfileFor = Callable[[Deployment, LeftOut | None], Profile]
"""Profile of a deployment; an `InputError` says why there is none."""

_LLAMA_2: Final = {"vocab_size": 32000, "head_dim": 128, "max_positions": 4096}
_QWEN_3: Final = {"vocab_size": 151936, "head_dim": 128, "kv_heads": 8, "hidden_size": 5120}
_ARCHS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        "Qwen/Qwen3-14B": _QWEN_3 | {"layers": 40, "heads": 40, "intermediate_size": 17408},
        "Qwen/Qwen3-32B": _QWEN_3 | {"layers": 64, "heads": 64, "intermediate_size": 25600},
        "meta-llama/Llama-2-13b-hf": _LLAMA_2
        | {"layers": 40, "hidden_size": 5120, "heads": 40, "kv_heads": 40, "intermediate_size": 13824},
        "meta-llama/Llama-2-70b-hf": _LLAMA_2
        | {"layers": 80, "hidden_size": 8192, "heads": 64, "kv_heads": 8, "intermediate_size": 28672},
    }
)
"""Shapes from ``config.json``, of models that the catalog lacks."""


def arch_of_model(model: str) -> ModelArch:
    """Return the shape of a model by its Hugging Face id."""
    known = known_arch([model])
    if known is not None:
        return known
    if model not in _ARCHS:
        raise InputError("must be a dense decoder of known shape", model, "model")
    return ModelArch.model_validate({"name": model.rsplit("/", 1)[-1], "hf_ids": (model,), **_ARCHS[model]})


def roofline_for(deployment: Deployment, _left_out: LeftOut | None = None) -> Profile:
    """Return the analytic profile; nothing in it was fitted, whatever is left out."""
    if deployment.dtype not in ("bfloat16", "float16"):
        raise InputError("must have 16 bits: so has the arithmetic of data sheets", deployment.dtype, "dtype")
    rules = rules_of_version(deployment.version or "0.11.0")
    engine = EngineChoice(version=deployment.version or "unknown", rules=rules.name, lora=False)
    return roofline_profile(gpu_sheet(deployment.gpu), arch_of_model(deployment.model), engine, deployment.tp)
