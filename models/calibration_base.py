"""A profile to start from where there is none: the model's shape is read, everything else assumed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan.errors import InputError
from capplan.models import loading, memory
from capplan.models.step_latency import ADDITIVE
from capplan.serving.memory import adapter_bytes, kv_bytes_per_token, weight_bytes
from capplan.spec import (
    Coefficient,
    Engine,
    Fit,
    FittedModel,
    Gpu,
    ModelArch,
    Profile,
    Provenance,
    ProvenanceKind,
    read_text,
)
from capplan.spec.plan import parse_json

ASSUMED: Final = "assumed, not measured"

_READ_BYTES_PER_MS: Final = 2e9  # of GPU memory, about what data-centre GPUs of 2023 do
_FLOP_PER_MS: Final = 3e11
_PCIE_BYTES_PER_MS: Final = 1e7
_DISK_BYTES_PER_MS: Final = 1e6
_RESERVED_BYTES: Final = 4e9
_REQUEST_MS: Final = 5.0
_WITH_EMBEDDING_ADAPTERS: Final = ("LlamaForCausalLM", "MistralForCausalLM")
"""Models whose slots hold embedding and output head, too (vLLM: ``embedding_modules``)."""


@dataclass(frozen=True)
class Hardware:
    """What a profile is of, besides the model."""

    gpu: str
    gpu_memory_bytes: int
    tp: int = 1
    engine: str = "vllm"
    engine_version: str = "0.8.5"
    rules: str = "vllm-0.8"


def read_arch(path: str | os.PathLike[str], hf_id: str) -> ModelArch:
    """Return the shape of a model from the ``config.json`` that Hugging Face models come with.

    Raises
    ------
    InputError
        When the file cannot be read, lacks a size, or holds one that is no whole number above 0.
    """
    name = os.fspath(path)
    config = parse_json(read_text(path), name)
    if not isinstance(config, Mapping):
        raise InputError("must hold a mapping, as config.json of a Hugging Face model does", location=name)
    heads = _size(config, "num_attention_heads", name)
    hidden = _size(config, "hidden_size", name)
    architectures = config.get("architectures") or []
    return ModelArch(
        name=hf_id.rsplit("/", maxsplit=1)[-1],
        hf_ids=(hf_id,),
        layers=_size(config, "num_hidden_layers", name),
        hidden_size=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", name, heads),
        head_dim=_size(config, "head_dim", name, hidden // heads),
        intermediate_size=_size(config, "intermediate_size", name),
        vocab_size=_size(config, "vocab_size", name),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        lora_on_embeddings=any(each in _WITH_EMBEDDING_ADAPTERS for each in architectures),
    )


def _size(config: Mapping[str, Any], key: str, location: str, otherwise: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = otherwise
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError("must be a whole number above 0", value, f"{location}: {key}")
    return value


def assumed_profile(arch: ModelArch, hardware: Hardware) -> Profile:
    """Return a profile of round numbers, from which a calibration can start and whose rest it replaces."""
    weights, per_rank = weight_bytes(arch, hardware.tp), adapter_bytes(arch, 1)
    step = dict.fromkeys(ADDITIVE.coefficients, 0.0) | {
        "base_ms": weights / _READ_BYTES_PER_MS,
        "ms_per_ktoken": 1e3 * weights / arch.dtype_bytes * 2 / _FLOP_PER_MS,
        "ms_per_kv_ktoken": 1e3 * kv_bytes_per_token(arch, hardware.tp) / _READ_BYTES_PER_MS,
        "ms_per_adapter": 0.2,
    }
    slots = {
        "reserved_bytes": _RESERVED_BYTES,
        "slot_factor": 1.0,
        "slot_overhead_bytes": 0.0,
        "bytes_per_seq": 0.0,
        "seqs_in_reserve": 0.0,
    }
    loads = {
        "serving_factor": 1.0,
        "gpu_base_ms": 3.0,
        "gpu_ms_per_rank": per_rank / _PCIE_BYTES_PER_MS,
        "gpu_padding_ms": 0.0,
        "disk_base_ms": 10.0,
        "disk_ms_per_rank": per_rank / _DISK_BYTES_PER_MS,
    }
    engine = Engine(name=hardware.engine, version=hardware.engine_version, rules=hardware.rules)
    return Profile(
        name=f"local/{arch.name}/{engine.name}-{engine.version}",
        gpu=Gpu(name=hardware.gpu, memory_bytes=hardware.gpu_memory_bytes),
        tp=hardware.tp,
        model=arch,
        engine=engine,
        step_latency=_assumed(ADDITIVE.name, step),
        memory=_assumed(memory.FORM, slots),
        loading=_assumed(loading.FORM, loads),
        host=_assumed("per-request", {"request_ms": _REQUEST_MS, "client_itl_factor": 1.0}),
        provenance=Provenance(kind=ProvenanceKind.ROOFLINE, source=ASSUMED, command="capplan calibrate"),
    )


def _assumed(form: str, values: Mapping[str, float]) -> FittedModel:
    return FittedModel(
        form=form,
        coefficients={name: Coefficient(value=value) for name, value in values.items()},
        fit=Fit(source=ASSUMED, samples=0, error_formula="none: nothing was measured", error=0.0),
    )
