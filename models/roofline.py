"""A profile of hardware that nobody measured: bytes over bandwidth, operations over arithmetic, launches.

The step model is the additive form with coefficients that follow from datasheets (`Physics` says with which
efficiencies). A step takes the larger of reading the weights and computing its tokens, or rather, since the
form is linear: the chord of that maximum from 0 to `GRAPH_TOKENS` tokens, beyond which it computes. On every
known GPU computing has overtaken reading by then. The chord lies above the maximum in between, where real
engines overlap the two only partly.

Two things are not on any datasheet. Where the engine's LoRA kernels are vLLM's, what they cost per layer,
slot and adapter is carried over from the shipped H100 profiles (`VllmLora`): blocks that each do little take
their time on any GPU. The memory an engine keeps back and its time per request are theirs, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from capplan.errors import InputError
from capplan.models import loading, memory
from capplan.models.roofline_gpus import GpuSheet
from capplan.models.roofline_parts import Physics, VllmLora, host_ms, loads, slots, step
from capplan.models.step_latency import ADDITIVE
from capplan.serving.memory import weight_bytes
from capplan.spec import (
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
)

NOT_MEASURED: Final = "analytic roofline, not measured"


@dataclass(frozen=True)
class EngineChoice:
    """Which engine a profile is of.

    Attributes
    ----------
    lora
        Whether adapters are served at all; without, the profile is of the bare model.
    """

    name: str = "vllm"
    version: str = "0.32.0"
    rules: str = "vllm-0.32-async"
    kernel: Kernel = Kernel.VLLM
    lora: bool = True


@dataclass(frozen=True)
class Assumptions:
    """What is not on a datasheet."""

    physics: Physics = field(default_factory=Physics)
    vllm_lora: VllmLora = field(default_factory=VllmLora)


def roofline_profile(
    sheet: GpuSheet,
    arch: ModelArch,
    engine: EngineChoice | None = None,
    tp: int = 1,
    assumptions: Assumptions | None = None,
    command: str = "capplan profile roofline",
) -> Profile:
    """Return the profile.

    Parameters
    ----------
    sheet
        The GPU.
    arch
        The model; its `dtype_bytes` must be 2.
    engine
        The engine; vLLM unless given.
    tp
        GPUs that share one copy of the model.
    assumptions
        What is not on a datasheet.
    command
        What to record as having made it.

    Raises
    ------
    InputError
        When weights are not of 16 bits, the heads cannot be shared by `tp` GPUs, or the weights alone do not
        fit into the memory.
    """
    engine, given = engine or EngineChoice(), assumptions or Assumptions()
    _check(sheet, arch, tp)
    lora = engine.lora
    carried = given.vllm_lora if lora and engine.kernel is Kernel.VLLM else None
    steps = step(sheet, arch, tp, given.physics, lora=lora, carried=carried)
    source = f"{sheet.source}. {given.physics.in_words()}"
    return Profile(
        name=f"roofline/{sheet.key}/{arch.name.lower()}/{engine.name}-{engine.version}",
        gpu=Gpu(name=sheet.name, memory_bytes=sheet.memory_bytes),
        tp=tp,
        model=arch,
        engine=ProfileEngine(
            name=engine.name, version=engine.version, rules=engine.rules, kernel=engine.kernel
        ),
        step_latency=_model(ADDITIVE.name, steps, source),
        memory=_model(memory.FORM, slots(arch), "kept-back memory of the shipped H100 profiles, rounded"),
        loading=_model(loading.FORM, loads(sheet, arch, tp, given.physics), source),
        host=_model("per-request", host_ms(), "time per request of the shipped H100 profiles, rounded"),
        provenance=Provenance(
            kind=ProvenanceKind.ROOFLINE,
            source=f"{NOT_MEASURED}: {sheet.source}",
            command=command,
            notes=_notes(given, carried),
        ),
    )


def _check(sheet: GpuSheet, arch: ModelArch, tp: int) -> None:
    if arch.dtype_bytes != 2:
        raise InputError(
            "must be 2: datasheets give the arithmetic of 16-bit floats", arch.dtype_bytes, "dtype"
        )
    if tp < 1 or arch.heads % tp or arch.intermediate_size % tp:
        raise InputError(f"must divide the {arch.heads} heads of {arch.name}", tp, "--tp")
    if weight_bytes(arch, tp) >= sheet.memory_bytes:
        size, room = weight_bytes(arch, tp) / 2**30, sheet.memory_bytes / 2**30
        rule = f"must be more: {size:.1f} GiB of weights per GPU do not fit into {room:.1f} GiB"
        raise InputError(rule, tp, "--tp")


def _notes(given: Assumptions, carried: VllmLora | None) -> str:
    text = f"Nothing here was measured on this GPU. {given.physics.in_words()}"
    if carried is not None:
        text += f". {carried.in_words()}"
    return text


def _model(form: str, values: dict[str, float], source: str) -> FittedModel:
    return FittedModel(
        form=form,
        coefficients={name: Coefficient(value=value) for name, value in values.items()},
        fit=Fit(source=source, samples=0, error_formula=f"none: {NOT_MEASURED}", error=0.0),
    )
