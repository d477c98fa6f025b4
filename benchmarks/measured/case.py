"""Measured rows, the deployments that they were measured on, and profiles for these."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from capplan import InputError, Profile
from capplan.datasets import find_gpu, gpu_sheet, model_arch
from capplan.models import Assumptions, Efficiencies, EngineChoice, efficiencies_of, roofline_profile
from capplan.models.compose import SYSTEMS, with_weights
from capplan.spec import Kernel

VARIABLE: Final = "CAPPLAN_MEASURED"
"""Environment variable with the folder of measured data."""

SLORA: Final = "s-lora"
"""Version of a deployment under S-LoRA instead of vLLM."""


@dataclass(frozen=True)
class Deployment:
    """A model on GPUs under one engine version."""

    gpu: str
    """Key of the GPU's data sheet."""
    model: str
    """Hugging Face id."""
    tp: int = 1
    version: str = ""
    """Version of vLLM, empty if not recorded; or `SLORA`."""
    dtype: str = "bfloat16"
    """Of the weights; empty: that of the model's files."""
    kv_cache_dtype: str = "auto"
    rules: str = ""
    """Serving rules, if they are not those of the version by default."""
    expert_parallel: bool = False


_UNSTATED: Final = MappingProxyType(
    {"h100": "h100-80g", "a100": "a100-80g"} | {system.key: system.sheet_key for system in SYSTEMS}
)
"""Sheets of GPUs that sources name without their memory."""


def gpu_key(name: str) -> str:
    """Return the key of a GPU's data sheet by the name in a source; an unknown name as it is."""
    if name.lower() in _UNSTATED:
        return _UNSTATED[name.lower()]
    sheet = find_gpu(name)
    return name if sheet is None else sheet.key  # profiles refuse the name


def require_only(settings: Mapping[str, object], understood: Mapping[str, Collection[object]]) -> None:
    """Check the settings of a row that decide, and that a simulation does not have.

    Raises
    ------
    InputError
        If one is neither absent nor among the values that are understood.
    """
    for name, values in understood.items():
        value = settings.get(name)
        if value is not None and value == value and value not in values:  # a table's gaps are NaN
            words = " or ".join(map(str, values))
            raise InputError(f"is not simulated unless {words}", str(value), name)


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
class RefusedCase:
    """A row that no simulation stands for."""

    name: str
    deployment: Deployment
    reason: InputError
    measured: Mapping[str, float] = field(default_factory=dict)

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Refuse it."""
        raise self.reason


@dataclass(frozen=True)
class LeftOut:
    """Rows that no coefficient of a profile may rest on: those with this value of a key."""

    key: str
    """``gpu``, ``model`` or ``tp``."""
    value: object

    def covers(self, deployment: Deployment) -> bool:
        return bool(getattr(deployment, self.key) == self.value)


ProfileFor = Callable[[Deployment, LeftOut | None], Profile]
"""Profile of a deployment; an `InputError` says why there is none."""

UNRECORDED: Final = "0.8.5"
"""Version of vLLM assumed for rows without one."""


def roofline_for(
    deployment: Deployment, _left_out: LeftOut | None = None, physics: Efficiencies | None = None
) -> Profile:
    """Return the analytic profile; nothing in it was fitted but shares that a data sheet may have."""
    sheet, arch = gpu_sheet(deployment.gpu), model_arch(deployment.model)
    if deployment.dtype not in ("bfloat16", "float16"):
        if sheet.shares is None:
            rule = "must have 16 bits: so has the arithmetic of data sheets"
            raise InputError(rule, deployment.dtype, "dtype")
        arch = with_weights(arch, deployment.dtype)
    if deployment.kv_cache_dtype == "fp8":
        arch = arch.replace(kv_dtype_bytes=1)
    if deployment.version == SLORA:
        engine = EngineChoice(rules="slora", kernel=Kernel.BGMV)
    else:
        version = deployment.version or UNRECORDED
        engine = EngineChoice(version=version, lora=False)
    assumptions = Assumptions(physics=physics or efficiencies_of(sheet))
    return roofline_profile(sheet, arch, engine, deployment.tp, assumptions)


def data_folder(given: Path | None) -> Path:
    """Return the folder of measured data.

    Raises
    ------
    InputError
        If there is none.
    """
    beside = Path(__file__).resolve().parents[3] / "shared" / "reference" / "measured"
    folder = given or Path(os.environ.get(VARIABLE, beside))
    if not folder.is_dir():
        rule = f"must be the folder of measured data (set it by --data or {VARIABLE})"
        raise InputError(rule, str(folder), "--data")
    return folder
