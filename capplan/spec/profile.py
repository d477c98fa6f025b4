"""A profile: what is known of a GPU type with one model under one engine version, and how well."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from capplan.errors import InputError
from capplan.spec.validation import SpecModel

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
    """A transformer with grouped-query attention and a gated MLP, by the numbers in its ``config.json``."""

    name: str
    hf_ids: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="Hugging Face ids of models of this shape; a workload's base_model must be among them"
    )
    layers: Count
    hidden_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    intermediate_size: Count
    vocab_size: Count
    tied_embeddings: bool = False
    dtype_bytes: Annotated[int, Field(ge=1, le=4)] = 2
    lora_on_embeddings: bool = Field(
        default=False,
        description="whether slots hold space for embedding and output head (vLLM: Llama yes, Qwen2 no)",
    )


class Gpu(SpecModel):
    """A GPU type."""

    name: str
    memory_bytes: Annotated[int, Field(gt=0)]


class ProfileEngine(SpecModel):
    """The engine that was measured."""

    name: str
    version: str
    rules: str = Field(description="name of its serving rules, such as vllm-0.8")
    kernel: Kernel = Field(default=Kernel.VLLM, description="which rank its LoRA kernels pay for")
    block_size: Count = Field(default=16, description="tokens of one KV block")
    prefix_caching: bool | None = Field(
        default=None, description="whether it kept KV of shared prompt beginnings; absent: as its rules do"
    )
    lora_extra_vocab: Annotated[int, Field(ge=0)] = Field(
        default=0, description="extra vocabulary rows per slot (vLLM up to 0.11: 256)"
    )


class Coefficient(SpecModel):
    """One fitted number."""

    value: float
    std_error: Annotated[float | None, Field(ge=0)] = None


class Fit(SpecModel):
    """How a model was fitted and how well it does."""

    source: str = Field(description="what it was fitted on: file and rows")
    samples: Annotated[int, Field(ge=0)]
    error_formula: str
    error: float = Field(description="error on the samples it was fitted on, by that formula")
    cross_validated_error: float | None = Field(
        default=None, description="error on samples left out in turn, by the same formula"
    )
    max_error: float | None = Field(
        default=None, description="largest relative error of a sample, in percent"
    )


class FittedModel(SpecModel):
    """Coefficients of a named form, the range they were fitted on, and their error."""

    form: str = Field(description="name of the formula")
    coefficients: dict[str, Coefficient]
    fitted_range: dict[str, tuple[float, float]] = Field(
        default_factory=dict, description="smallest and largest value of each input on which the fit rests"
    )
    fit: Fit

    def value(self, name: str) -> float:
        """Return the coefficient `name`."""
        try:
            return self.coefficients[name].value
        except KeyError:
            rule = f"must hold {name!r}, which the form {self.form!r} needs"
            raise InputError(rule, location="profile: coefficients") from None


class Provenance(SpecModel):
    """Where the numbers of a profile come from."""

    kind: ProvenanceKind
    source: str
    license: str | None = None
    command: str = Field(description="the command of this project that made the profile")
    notes: str = ""


class Profile(SpecModel):
    """All that twin and planner need to know of (GPU type, model, engine version, tensor parallelism)."""

    schema_version: Annotated[int, Field(ge=1, le=1)] = 1
    name: str
    gpu: Gpu
    tp: Count = Field(default=1, description="GPUs that share one copy of the model")
    model: ModelArch
    engine: ProfileEngine
    step_latency: FittedModel = Field(description="milliseconds of one engine step")
    memory: FittedModel = Field(description="KV tokens beside weights and adapter slots")
    loading: FittedModel = Field(description="milliseconds until an adapter is on the host and in a slot")
    host: FittedModel = Field(description="milliseconds a request spends outside engine steps")
    length_correlation: Annotated[float, Field(gt=-1, lt=1)] = Field(
        default=0.0,
        description="correlation of prompt and output length (normal scores) in the requests it was measured "
        "with; taken where a workload does not state its own",
    )
    provenance: Provenance

    def require_model(self, base_model: str) -> None:
        """Check that the profile is for a workload's base model.

        Raises
        ------
        InputError
            When it is not; the message lists the models it is for.
        """
        if base_model not in self.model.hf_ids:
            models = ", ".join(self.model.hf_ids)
            rule = f"must be a model that profile {self.name} is for: {models}"
            raise InputError(rule, base_model, "base_model")
