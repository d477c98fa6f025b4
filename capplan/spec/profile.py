"""A profile: what is known of one GPU type with one model under one engine version, and how well it is known."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from capplan.spec.base import SpecModel

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class Kernel(StrEnum):
    """Which rank a LoRA kernel pays for."""

    BGMV = "bgmv"
    """Batch size times the largest rank in the batch (Punica, S-LoRA's padded kernel)."""
    MBGMV = "mbgmv"
    """The sum of the true ranks."""
    VLLM = "vllm"
    """Slots at the configured largest rank, whatever the adapters' own ranks are."""


class ProvenanceKind(StrEnum):
    """Where the numbers of a profile come from, best first."""

    MEASURED = "measured"
    PUBLISHED = "published"
    ROOFLINE = "roofline"


class ModelArch(SpecModel):
    """The shape of a transformer with grouped-query attention and a gated MLP, as its ``config.json`` gives it."""

    name: str
    hf_ids: Annotated[tuple[str, ...], Field(min_length=1)]
    """Hugging Face ids of models of this very shape; a workload's base_model must be one of them."""
    layers: Count
    hidden_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    intermediate_size: Count
    vocab_size: Count
    tied_embeddings: bool = False
    dtype_bytes: Annotated[int, Field(ge=1, le=4)] = 2
    lora_on_embeddings: bool = False
    """Whether the engine reserves slot space for embedding and output head (vLLM: Llama yes, Qwen2 no)."""


class Gpu(SpecModel):
    """A GPU type."""

    name: str
    memory_bytes: Annotated[int, Field(gt=0)]


class Engine(SpecModel):
    """The engine that was measured."""

    name: str
    version: str
    rules: str
    """Name of its serving rules, such as ``vllm-0.8``."""
    kernel: Kernel = Kernel.VLLM
    block_size: Count = 16
    lora_extra_vocab: Annotated[int, Field(ge=0)] = 0
    """Extra vocabulary rows per slot (vLLM up to 0.11: 256)."""


class Coefficient(SpecModel):
    """One fitted number."""

    value: float
    std_error: Annotated[float | None, Field(ge=0)] = None


class Fit(SpecModel):
    """How a model was fitted and how well it does."""

    source: str
    """What it was fitted on: file and rows."""
    samples: Annotated[int, Field(ge=0)]
    error_formula: str
    error: float
    """Error on the samples it was fitted on, by that formula."""
    cross_validated_error: float | None = None
    """Error on samples left out in turn, by the same formula."""
    max_error: float | None = None


class FittedModel(SpecModel):
    """Coefficients of a named form, the range they were fitted on, and their error."""

    form: str
    coefficients: dict[str, Coefficient]
    fitted_range: dict[str, tuple[float, float]] = {}
    fit: Fit

    def value(self, name: str) -> float:
        """Return the coefficient `name`."""
        return self.coefficients[name].value


class Provenance(SpecModel):
    """Where the numbers of a profile come from."""

    kind: ProvenanceKind
    source: str
    license: str | None = None
    command: str
    """The command of this project that made the profile."""
    notes: str = ""


class Profile(SpecModel):
    """Everything the twin and the planner need to know of (GPU type, model, engine version, tensor parallelism)."""

    schema_version: Annotated[int, Field(ge=1, le=1)] = 1
    name: str
    gpu: Gpu
    tp: Count = 1
    model: ModelArch
    engine: Engine
    step_latency: FittedModel
    memory: FittedModel
    loading: FittedModel
    host: FittedModel
    provenance: Provenance
