"""A profile: fitted models of a GPU type with one base model and engine version, with their errors.

Tables of a step model: milliseconds over a grid of quantities of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Annotated, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, Strict, model_validator

from capplan.errors import InputError
from capplan.spec._engine_args import DEFAULT_MAX_MODEL_LEN
from capplan.spec._lora_modules import TargetModules, module_sizes
from capplan.spec._validation import Line, Many, SparseModel, SpecModel, rule_error

TABLE_FORM: Final = "table"
"""Name of the form of a step model that has tables."""

TABLE_AXES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"tokens_ms": ("tokens",), "requests_ms": ("requests", "kv_tokens")}
)
"""Tables of that form and their axes, fields of `capplan.models._step_latency.StepFeatures`."""

MAX_POINTS: Final = 512
MAX_VALUES: Final = 16_384

_MIN_GAP: Final = 1e-3
"""Between points, which are counts: smaller ones give slopes beyond any number."""

_Amount = Annotated[float, Strict(), Field(ge=0, le=1e12)]


class TableAxis(SpecModel):
    """One axis of a step table."""

    name: Line = Field(description="Quantity of a step: tokens, requests or kv_tokens.")
    points: Many[_Amount] = Field(description="Grid values, strictly increasing; 2 to 512 of them.")

    @model_validator(mode="after")
    def _increasing(self) -> Self:
        if not 2 <= len(self.points) <= MAX_POINTS:
            raise rule_error(f"must hold 2 to {MAX_POINTS} values", key=("points",), value=len(self.points))
        for at, (before, point) in enumerate(pairwise(self.points), start=1):
            if point <= before:
                raise rule_error(f"must increase, and follows {before:g}", key=("points", at), value=point)
            if point - before < _MIN_GAP:
                words = f"must increase by at least {_MIN_GAP:g}, and follows {before:g}"
                raise rule_error(words, key=("points", at), value=point)
        return self


class StepTable(SpecModel):
    """Milliseconds over a grid of one or two quantities of a step, linear between its points.

    Below the first point of an axis the value there applies. Beyond the last point the last slope goes on.
    """

    axes: Annotated[tuple[TableAxis, ...], Field(min_length=1, max_length=2)] = Field(
        description="Axes of the grid, in the order of `values`."
    )
    values: Many[_Amount] = Field(
        description="Milliseconds at each point of the grid, not decreasing along any axis; the last axis "
        "varies fastest. At most 16,384 of them."
    )

    @classmethod
    def of(cls, axes: Mapping[str, Sequence[float]], values: ArrayLike) -> Self:
        """Return the table of an array of values, whose axes are named in their order.

        Parameters
        ----------
        axes
            Grid values of each axis.
        values
            Milliseconds, of the shape of the grid.

        Raises
        ------
        InputError
            Unless the shapes agree, the axes increase, and the values are finite, not negative and not
            decreasing.
        """
        array = np.asarray(values, float)
        named = tuple(TableAxis(name=name, points=tuple(map(float, points))) for name, points in axes.items())
        shape = tuple(len(axis.points) for axis in named)
        if array.shape != shape:
            raise InputError(f"must have the shape of the axes, {shape}", array.shape, "StepTable.values")
        return cls(axes=named, values=tuple(array.ravel().tolist()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Points of each axis."""
        return tuple(len(axis.points) for axis in self.axes)

    @property
    def grid_ms(self) -> NDArray[np.float64]:
        """Values as an array with one dimension per axis."""
        return np.array(self.values).reshape(self.shape)

    def scaled(self, factor: float) -> Self:
        """Return the table with every time multiplied."""
        return self.replace(values=tuple((factor * self.grid_ms).ravel().tolist()))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = " x ".join(f"{len(axis.points)} {axis.name}" for axis in self.axes)
        if len(self.values) != prod(self.shape):
            words = f"must hold one value per point of {names}"
            raise rule_error(words, key=("values",), value=len(self.values))
        if len(self.values) > MAX_VALUES:
            words = f"must hold at most {MAX_VALUES:,} values"
            raise rule_error(words, key=("values",), value=len(self.values))
        grid_ms = self.grid_ms
        for at, axis in enumerate(self.axes):
            falls = np.argwhere(np.diff(grid_ms, axis=at) < 0.0)
            if falls.size:
                low = tuple(falls[0].tolist())
                high = tuple(low[i] + (i == at) for i in range(len(low)))
                words = f"must not decrease along {axis.name}, and follows {grid_ms[low]:g}"
                position = int(np.ravel_multi_index(high, self.shape))
                raise rule_error(words, key=("values", position), value=float(grid_ms[high]))
        return self


def check_tables(form: str, tables: Mapping[str, StepTable]) -> None:
    """Check that a model has the tables of its form, with their axes; raise for a validator of `tables`."""
    required = TABLE_AXES if form == TABLE_FORM else {}
    for name in tables:
        if name not in required:
            known = f"one of {', '.join(required)}" if required else f"absent with the form {form!r}"
            raise rule_error(f"must be {known}", key=("tables", name))
    for name, axes in required.items():
        if name not in tables:
            raise rule_error(f"is required by the form {form!r}", key=("tables", name))
        own = tuple(axis.name for axis in tables[name].axes)
        if own != axes:
            words = f"must be the axes {', '.join(axes)} in this order"
            raise rule_error(words, key=("tables", name, "axes"), value=", ".join(own))


NonNegative = Annotated[float, Field(ge=0, le=1e15)]
Count = Annotated[int, Field(ge=1, le=2**40)]
Finite = Annotated[float, Field(ge=-1e15, le=1e15)]
"""Bytes and milliseconds: a petabyte, and more than ages."""


class Kernel(StrEnum):
    """LoRA kernel, by the rank that its time depends on."""

    BGMV = "bgmv"
    """Batch size times the largest rank in the batch (Punica, S-LoRA's padded kernel)."""
    MBGMV = "mbgmv"
    """The sum of the true ranks."""
    VLLM = "vllm"
    """Slots at the configured largest rank, whatever the adapters' own ranks are."""


class ProvenanceKind(StrEnum):
    """Source of the numbers of a profile, best first."""

    MEASURED = "measured"
    PUBLISHED = "published"
    COMPOSED = "composed"
    CARRIED = "carried"
    ROOFLINE = "roofline"


class Experts(SpecModel):
    """Experts that take the place of the MLP in every layer of a mixture of experts."""

    number: Count = Field(description="Experts of a layer.")
    per_token: Count = Field(description="Experts that a token passes.")
    intermediate_size: Count = Field(description="Width of an expert.")
    dtype_bytes: Annotated[float | None, Field(gt=0, le=4)] = Field(
        default=None,
        description="Bytes of a weight of an expert, scales included; null: those of the layers' matrices.",
    )


class ModelArch(SpecModel):
    """A transformer with grouped-query attention and a gated MLP, by the numbers in its ``config.json``."""

    name: Line = Field(description="Name of the architecture.")
    hf_ids: Annotated[tuple[Line, ...], Field(min_length=1)] = Field(
        description="Hugging Face ids of models of this shape; a workload's base_model must be among them."
    )
    layers: Count = Field(description="Transformer layers.")
    hidden_size: Count = Field(description="Width of the residual stream.")
    heads: Count = Field(description="Query heads.")
    kv_heads: Count = Field(description="Key and value heads.")
    head_dim: Count = Field(description="Width of a head.")
    intermediate_size: Count = Field(description="Width of the MLP.")
    vocab_size: Count = Field(description="Rows of the embedding.")
    tied_embeddings: bool = Field(
        default=False, description="Whether the output head is the embedding, transposed."
    )
    dtype_bytes: Annotated[int, Field(ge=1, le=4)] = Field(
        default=2, description="Bytes of a weight, and of an activation."
    )
    linear_dtype_bytes: Annotated[float | None, Field(gt=0, le=4)] = Field(
        default=None,
        description="Bytes of a weight of the layers' matrices where they are quantized, scales included; "
        "null: dtype_bytes.",
    )
    experts: Experts | None = Field(default=None, description="Experts of every layer; null: a dense model.")
    kv_dtype_bytes: Annotated[int | None, Field(ge=1, le=4)] = Field(
        default=None, description="Bytes of an element of keys and values; null: dtype_bytes."
    )
    other_weight_bytes: Annotated[int, Field(ge=0, le=2**40)] = Field(
        default=0, description="Bytes of weights beside the language model, such as those of a vision tower."
    )
    lora_on_embeddings: bool = Field(
        default=False,
        description="Whether slots hold space for embedding and output head (vLLM: Llama yes, Qwen2 no).",
    )
    fused_layers: bool = Field(
        default=False,
        description="Whether q, k and v are one matrix, and gate and up as well, so that adapters and slots "
        "have one A for all parts (Phi-3).",
    )
    qk_norm: bool = Field(default=False, description="Whether queries and keys are normalized per head.")
    sliding_window: Count | None = Field(
        default=None,
        description="Most tokens that a layer with a window attends to; null: every layer attends to all.",
    )
    window_layers: Count | None = Field(
        default=None, description="Layers with a window, in a model that has one; null: all of them."
    )
    max_positions: Count | None = Field(
        default=None, description="Most tokens of prompt and output (max_position_embeddings); null: unknown."
    )

    @property
    def default_max_model_len(self) -> int:
        """Limit of prompt and output, in tokens, if none is set."""
        return min(DEFAULT_MAX_MODEL_LEN, self.max_positions or DEFAULT_MAX_MODEL_LEN)

    @property
    def kv_layers(self) -> int:
        """Layers whose keys and values a token takes in vLLM's blocks, padding included.

        Layers with and without a window are in groups of equal size, so that one block serves a group: as
        many as the rarer kind has, or as the other if it is less than a quarter larger. A group that is not
        full takes as much (vLLM since 0.9.2, ``kv_cache_utils.py``).
        """
        windowed = self.window_layers
        if self.sliding_window is None or windowed is None or windowed == self.layers:
            return self.layers
        fewer, more = sorted((windowed, self.layers - windowed))
        size = more if more < 1.25 * fewer else fewer
        return size * (-(-fewer // size) + -(-more // size))

    @property
    def module_sizes(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of each of `ALL_MODULES`."""
        query, kv = (heads * self.head_dim for heads in (self.heads, self.kv_heads))
        outside = (self.vocab_size, self.hidden_size), (self.hidden_size, self.vocab_size)
        return (*module_sizes(self.hidden_size, self.intermediate_size, query, kv), *outside)

    def require_positions(self, max_model_len: int, location: str = "max_model_len") -> None:
        """Check that the model has positions for a limit of prompt and output.

        Raises
        ------
        InputError
            If it has fewer.
        """
        if self.max_positions is not None and max_model_len > self.max_positions:
            rule = f"must be at most {self.max_positions}, the positions of {self.name}"
            raise InputError(rule, max_model_len, location)


class Gpu(SpecModel):
    """A GPU type."""

    name: Line = Field(description="Name of the GPU type.")
    memory_bytes: Annotated[int, Field(gt=0, le=2**53)] = Field(description="Memory of one GPU, in bytes.")


class ProfileEngine(SparseModel):
    """The engine that was measured."""

    _optional_keys = ("quantization", "sgmv_from_tokens")

    name: Line = Field(description="Name of the engine, such as vllm.")
    version: Line = Field(description="Version of the engine.")
    rules: Line = Field(description="Name of its serving rules, such as vllm-0.8.")
    kernel: Kernel = Field(default=Kernel.VLLM, description="LoRA kernel, by the rank it depends on.")
    block_size: Count = Field(default=16, description="Tokens of one KV block.")
    prefix_caching: bool | None = Field(
        default=None, description="Whether it kept KV of shared prompt beginnings; absent: as its rules do."
    )
    lora_extra_vocab: Annotated[int, Field(ge=0, le=2**40)] = Field(
        default=0, description="Extra vocabulary rows per slot (vLLM up to 0.11: 256)."
    )
    target_modules: TargetModules | None = Field(
        default=None,
        description="Linear layers that the engine adapts, for which slots hold space; absent: all, and the "
        "embeddings of models with lora_on_embeddings.",
    )
    fully_sharded_loras: bool = Field(
        default=False,
        description="Whether tensor parallelism shards both matrices of every layer "
        "(vLLM: --fully-sharded-loras), not only the one on the side that the layer itself shards.",
    )
    quantization: Line | None = Field(
        default=None,
        description="Dtype into which the engine quantizes the weights of the base model on loading, such as "
        "fp8; absent: weights are as in the files of the base model.",
    )
    sgmv_from_tokens: Count | None = Field(
        default=None,
        description="Mean tokens per adapter in a step from which LoRA kernels in tiles of tokens (SGMV) "
        "take less time than token-wise ones (MBGMV), as measured; absent: not measured.",
    )


class Coefficient(SpecModel):
    """One fitted number."""

    value: Finite = Field(description="Fitted value.")
    std_error: Annotated[float | None, Field(ge=0)] = Field(
        default=None, description="Standard error; null if not fitted, or at a bound."
    )


class Fit(SpecModel):
    """Data of a fit, and its errors."""

    source: Line = Field(description="Data of the fit: file and rows.")
    samples: Annotated[int, Field(ge=0)] = Field(description="Number of samples.")
    error_formula: Line = Field(description="Definition of the error.")
    error: float = Field(description="Error on the samples of the fit, by that formula.")
    cross_validated_error: float | None = Field(
        default=None, description="Error on samples left out in turn, by the same formula."
    )
    max_error: float | None = Field(
        default=None, description="Largest relative error of a sample, in percent."
    )
    probe_ms: float | None = Field(
        default=None,
        description="Milliseconds of the reference engine's speed probe when the fit's times were measured.",
    )


class Uncertainty(SpecModel):
    """Uncertainty of a fit: covariance of its coefficients, and differences between runs beyond them."""

    names: tuple[str, ...] = Field(default=(), description="Coefficients of the covariance, in order.")
    covariance: tuple[tuple[float, ...], ...] = Field(
        default=(), description="Covariance of the coefficients; residuals of one run may correlate."
    )
    scatter: NonNegative = Field(
        default=0.0,
        description="Standard deviation over runs of measured / predicted - 1 in a run left out of the fit.",
    )

    @model_validator(mode="after")
    def _square(self) -> Self:
        if any(len(row) != len(self.names) for row in (self.covariance, *self.covariance)):
            raise rule_error("must have a row and a column per name", key=("covariance",))
        return self


class FittedModel(SparseModel):
    """Coefficients of a named form, the range they were fitted on, and their error."""

    _optional_keys = ("tables",)

    form: Line = Field(description="Name of the formula.")
    coefficients: dict[str, Coefficient] = Field(description="Coefficients of the formula by name.")
    fitted_range: dict[str, tuple[float, float]] = Field(
        default_factory=dict,
        description="Smallest and largest value of each input in the samples, and of other conditions of the "
        "measurement: rank, prompt_tokens (of one prompt), tokens (of one step), max_num_seqs, "
        "max_num_batched_tokens, rate_rps, streams (requests in flight). Values outside are reported as "
        "extrapolations.",
    )
    tables: dict[str, StepTable] = Field(
        default_factory=dict,
        description="Tables of the form 'table' of a step model: tokens_ms over tokens, requests_ms over "
        "requests and kv_tokens. Their milliseconds are added to the terms of the coefficients.",
    )
    fit: Fit = Field(description="Data of the fit, and its errors.")
    uncertainty: Uncertainty | None = Field(
        default=None, description="Uncertainty of the fit; null: a default by the kind of provenance."
    )

    @model_validator(mode="after")
    def _tables_of_form(self) -> Self:
        check_tables(self.form, self.tables)
        return self

    def value(self, name: str) -> float:
        """Return the coefficient `name`."""
        try:
            return self.coefficients[name].value
        except KeyError:
            rule = f"must hold {name!r}, which the form {self.form!r} needs"
            raise InputError(rule, location="profile: coefficients") from None


class Provenance(SpecModel):
    """Source of the numbers of a profile."""

    kind: ProvenanceKind = Field(description="How the numbers were obtained.")
    source: Line = Field(description="Measurement, publication or datasheet.")
    license: Line | None = Field(default=None, description="Licence of the source.")
    command: Line = Field(description="Command of this project that made the profile.")
    notes: Line = Field(default="", description="Remarks.")


class CpuLora(SpecModel):
    """CPU cores that compute the part of an adapter that is not on the GPU yet (Toppings, section 4.2).

    A task is the product of some tokens with both matrices of one projection in one layer, on one core.
    """

    workers: Count = Field(description="CPU cores, each with a process of its own.")
    tokens_per_task: Count = Field(description="Most tokens of a task.")
    task_base_ms: NonNegative = Field(description="Milliseconds of a task beside its products.")
    ms_per_mmac: NonNegative = Field(
        description="Milliseconds per million multiplications of a task: tokens x rank x (inputs + outputs)."
    )
    signal_ms: NonNegative = Field(
        description="Milliseconds of a layer with tasks for transfers and signals, which nothing overlaps."
    )
    provenance: Provenance = Field(description="Source of the numbers.")


class Profile(SparseModel):
    """Models of a GPU type with one model, engine version and tensor parallelism, for twin and planner."""

    _optional_keys = ("cpu_lora",)

    schema_version: Annotated[int, Field(ge=1, le=1)] = Field(
        default=1, description="Version of this format."
    )
    name: Line = Field(description="Name of the profile.")
    gpu: Gpu = Field(description="GPU type.")
    tp: Count = Field(default=1, description="GPUs that share one copy of the model.")
    model: ModelArch = Field(description="Architecture of the base model.")
    engine: ProfileEngine = Field(description="Serving engine.")
    step_latency: FittedModel = Field(description="Milliseconds of one engine step.")
    memory: FittedModel = Field(description="KV tokens beside weights and adapter slots.")
    loading: FittedModel = Field(description="Milliseconds to load an adapter to the host and to a slot.")
    host: FittedModel = Field(description="Milliseconds of a request outside engine steps.")
    cpu_lora: CpuLora | None = Field(
        default=None, description="CPU cores that assist the loading of adapters; null if not measured."
    )
    length_correlation: Annotated[float, Field(gt=-1, lt=1)] = Field(
        default=0.0,
        description="Correlation of prompt and output length (normal scores) in the requests of the "
        "measurement; used if a workload does not state its own.",
    )
    provenance: Provenance = Field(description="Source of the numbers.")

    def require_model(self, base_model: str) -> None:
        """Check that the profile is for a workload's base model.

        Raises
        ------
        InputError
            When it is not; the message lists the models it is for.
        """
        if base_model not in self.model.hf_ids:
            models = ", ".join(self.model.hf_ids)
            rule = (
                f"must be a model that profile {self.name} is for: {models}; "
                f"`capplan profiles --model {base_model.rpartition('/')[2]}` lists those of that one"
            )
            raise InputError(rule, base_model, "base_model")
