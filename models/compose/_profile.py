"""Profiles composed from measured operators: a GPU, a dense model, tensor parallelism, and a vLLM version.

Step tables hold the times of a forward pass on a grid of tokens, requests and KV tokens.

Host terms are the milliseconds per step and request that no operator table holds. They belong to an engine
version and a dtype, and are fitted on measured inter-token latencies (``python -m
benchmarks.fit_host_terms``). Steps of versions in between have those of the nearest fitted version with the
same kind of scheduling, since asynchronous scheduling hides most of the host's work.

LoRA terms are carried over from the measured H100 profiles of vLLM 0.8.5, since no table of vLLM's LoRA
kernels on other GPUs is known. A kernel's time is split by what it depends on, and each part is carried over
by its own ratio:

- launches and exits of blocks, and work per adapter: the time of dense products of LoRA's shapes (inputs or
  outputs of a rank) on this GPU over those on an H100;
- bytes of A and B: elements per layer and rank of this model on one GPU, over memory bandwidth;
- activations per token: their bytes, over memory bandwidth.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.optimize import isotonic_regression

import capplan.datasets
from capplan.datasets import GpuSheet, gpu_sheet, model_arch
from capplan.errors import InputError
from capplan.models._memory import HOST_FORM, assumed_model, memory_model
from capplan.models._roofline import VllmLora, activation_bytes, loading_model, require_weights_fit
from capplan.models._step_latency import GRAPH_TOKENS
from capplan.models._uncertainty import DEFAULT_SCATTER
from capplan.models.compose._decoder import Decoder
from capplan.models.compose._forward import ForwardPass, StepTimes, forward_pass
from capplan.models.compose._operators import EXPERTS_ERROR, operator_tables
from capplan.serving import VLLM_ENGINE, ServingRules, lora_elements_per_rank
from capplan.spec import (
    TABLE_FORM,
    Coefficient,
    Fit,
    FittedModel,
    Gpu,
    Kernel,
    Line,
    ModelArch,
    Profile,
    ProfileEngine,
    Provenance,
    ProvenanceKind,
    SpecModel,
    StepTable,
    Uncertainty,
    version_numbers,
)

FILE: Final = Path(capplan.datasets.__file__).parent / "composed" / "host_terms.json"


class LeftOutError(SpecModel):
    """Error on rows that the fit did not see."""

    left_out: Line = Field(description="Rows left out: all of a GPU or of a model.")
    rows: Annotated[int, Field(ge=1)]
    error_percent: float = Field(description="Mean absolute percentage error of mean ITL on them.")


class HostTerms(SpecModel):
    """Host terms of one engine version and dtype, with their errors."""

    engine_version: Line
    dtype: Line
    parts: Line = Field(
        default="operators", description="Measured parts that the terms go with: operators or layers."
    )
    base_ms: Annotated[float, Field(ge=0)] = Field(description="Milliseconds per step.")
    ms_per_request: Annotated[float, Field(ge=0)] = Field(description="Milliseconds per running request.")
    request_ms: Annotated[float, Field(ge=0)] = Field(description="Milliseconds per request outside steps.")
    std_errors: tuple[float, float] = Field(description="Standard errors of base_ms and ms_per_request.")
    source: Line = Field(description="Rows of the fit.")
    only_for: Line | None = Field(
        default=None, description="GPU and model that the errors hold for; null: those of the rows left out."
    )
    rows: Annotated[int, Field(ge=1)]
    error_percent: float = Field(description="Mean absolute percentage error of mean ITL on these rows.")
    left_out: tuple[LeftOutError, ...] = ()
    scatter: Annotated[float, Field(ge=0)] = Field(
        description="Standard deviation of measured / predicted - 1 on rows left out of the fit."
    )

    @property
    def left_out_error_percent(self) -> float | None:
        """Mean error over all rows left out in turn."""
        rows = sum(each.rows for each in self.left_out)
        return sum(each.rows * each.error_percent for each in self.left_out) / rows if rows else None

    @property
    def spans_hardware(self) -> bool:
        """Whether a GPU or a model was left out: only then do the errors hold for others."""
        return any(each.left_out.startswith(("gpu ", "model ")) for each in self.left_out)

    def in_words(self) -> str:
        """Return rows and errors in one sentence."""
        left = ", ".join(f"{each.left_out} {each.error_percent:.1f} %" for each in self.left_out)
        fitted = (
            "host terms fitted on" if self.base_ms or self.ms_per_request else "no host terms; compared with"
        )
        words = f"{fitted} {self.source}: mean ITL within {self.error_percent:.1f} %"
        return f"{words}; left out in turn: {left}" if left else words


class FittedTerms(SpecModel):
    """Host terms that ship."""

    terms: tuple[HostTerms, ...]


@functools.cache
def fitted_terms() -> tuple[HostTerms, ...]:
    """Return the host terms that ship."""
    return FittedTerms.model_validate_json(FILE.read_bytes()).terms


def host_terms(version: str, dtype: str, parts: str = "operators", is_async: bool | None = None) -> HostTerms:
    """Return the fitted terms of the nearest engine version, in this dtype if there are any.

    Terms of the same scheduling are nearer: asynchronous from vLLM 0.14 on, unless given. Measured layers
    hold the starts of their kernels and the sampler, so that their terms are others.
    """
    major, minor = _numbers(version)
    scheduling = _is_async((major, minor)) if is_async is None else is_async
    of_parts = [each for each in fitted_terms() if each.parts == parts]

    def distance(terms: HostTerms) -> tuple[bool, int]:
        fitted = _numbers(terms.engine_version)
        return _is_async(fitted) != scheduling, abs(100 * (major - fitted[0]) + minor - fitted[1])

    return min([each for each in of_parts if each.dtype == dtype] or of_parts, key=distance)


def composition_terms() -> HostTerms:
    """Return the terms whose errors hold for other GPUs and models: those with most rows of several."""
    return max((each for each in fitted_terms() if each.spans_hardware), key=lambda each: each.rows)


def _is_async(version: tuple[int, int]) -> bool:
    return version >= (0, 14)


def _numbers(version: str) -> tuple[int, int]:
    major, minor, *_ = version_numbers(version)
    return major, minor


Floats = NDArray[np.float64]

CAPTURED: Final = (1, 2, 4, *range(8, 257, 8), *range(272, GRAPH_TOKENS + 1, 16))
"""Sizes of vLLM's CUDA graphs: a step runs at the next one from its tokens up (VLLM_RULES 2)."""

LONGEST_CONTEXT: Final = 32_768

MAX_TOKENS: Final = 16_384
_LARGE_STEPS: Final = tuple(int(each) for each in np.geomspace(GRAPH_TOKENS + 1, MAX_TOKENS, 28))

_REQUESTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_KV_TOKENS: Final = (0, *(int(2.0 ** (exponent / 2.0)) for exponent in range(14, 43)))
"""Factors of the square root of 2, from 128 to 2 million."""


def step_tables(times: StepTimes) -> dict[str, StepTable]:
    """Return the tables of the step form ``table`` for a forward pass.

    A step runs at the size of the CUDA graph that holds its tokens, so the table has both ends of every size.
    The sum over a step's operators is made monotone by isotonic regression of its log, since single measured
    products scatter.
    """
    tokens, ms = _tokens_ms(times)
    requests, kv_tokens = np.meshgrid(np.array(_REQUESTS, float), np.array(_KV_TOKENS, float), indexing="ij")
    requests_ms = times.requests_ms(requests, np.maximum(kv_tokens, requests))
    requests_ms = _monotone(np.where(kv_tokens > LONGEST_CONTEXT * requests, np.nan, requests_ms))
    return {
        "tokens_ms": StepTable.of({"tokens": tokens}, np.round(ms, 5)),
        "requests_ms": StepTable.of(
            {"requests": _REQUESTS, "kv_tokens": _KV_TOKENS}, np.round(requests_ms, 5)
        ),
    }


def _tokens_ms(times: StepTimes) -> tuple[list[float], Floats]:
    """Return grid values and milliseconds of steps by tokens."""
    run_at = np.array([*CAPTURED, *_LARGE_STEPS], dtype=float)
    ms = np.exp(isotonic_regression(np.log(times.tokens_ms(run_at))).x)
    points = dict(zip(run_at.tolist(), ms.tolist(), strict=True))
    for smaller, size in pairwise(CAPTURED):
        points.setdefault(smaller + 1.0, points[size])
    tokens = sorted(points)
    return tokens, np.array([points[each] for each in tokens])


def _monotone(times: Floats) -> Floats:
    """Return times that do not decrease along either axis, between the nearest such bounds.

    One long context takes longer than many short ones of the same sum, which are split more evenly. Cells
    that are NaN take the least of those with more requests.
    """
    lower = np.where(np.isnan(times), np.inf, times)
    for axis in (0, 1):
        lower = np.flip(np.minimum.accumulate(np.flip(lower, axis), axis), axis)
    upper = np.where(np.isnan(times), lower, times)
    for axis in (0, 1):
        upper = np.maximum.accumulate(upper, axis)
    return np.asarray(np.sqrt(lower * upper))


ERROR_FORMULA: Final = "100 * mean(|p - a| / a) of mean ITL"
_SPLIT_GRAPHS: Final = (0, 12)
"""Version of vLLM from which on steps without adapters have CUDA graphs of their own (VLLM_RULES 1)."""

_DEFAULT_SCATTER: Final = DEFAULT_SCATTER[ProvenanceKind.COMPOSED]
_LICENCES: Final = {"operators": "Apache-2.0 (operator tables)", "layers": "MIT (layer latencies)"}


def compose_profile(
    gpu: str,
    decoder: Decoder,
    rules: ServingRules,
    version: str,
    *,
    tp: int = 1,
    expert_parallel: bool = False,
    terms: HostTerms | None = None,
    command: str = "capplan profile compose",
) -> Profile:
    """Return the profile of a model on a GPU, composed from the GPU's measured operators.

    Step times are those of `forward_pass`, on the grid of `step_tables`, and host terms. Adapter terms and
    loads are carried over from measured profiles of another GPU, and so marked.

    Parameters
    ----------
    gpu
        GPU with measured operators, by the name of its data sheet or of its tables.
    decoder
        The model.
    rules
        Serving rules of the engine version.
    version
        vLLM version.
    tp
        GPUs per copy of the model.
    expert_parallel
        Whether each of them has some of the experts of a mixture, and not a share of each.
    terms
        Host terms; those of the nearest fitted version by default.
    command
        Recorded in the provenance.

    Raises
    ------
    InputError
        If there are no operators for the GPU, `tp` or the model's dtype, or the weights do not fit.
    """
    times = operator_times(gpu, decoder, tp, expert_parallel=expert_parallel)
    return profile_of_times(times, rules, version, terms=terms, command=command)


def operator_times(gpu: str, decoder: Decoder, tp: int = 1, *, expert_parallel: bool = False) -> ForwardPass:
    """Return the step times of a model by the measured operators of a GPU; see `compose_profile`."""
    return forward_pass(operator_tables(gpu), decoder, tp, expert_parallel=expert_parallel)


def profile_of_times(
    times: StepTimes,
    rules: ServingRules,
    version: str,
    *,
    terms: HostTerms | None = None,
    command: str = "capplan profile compose",
) -> Profile:
    """Return the profile of composed step times; see `compose_profile` for the parameters.

    Raises
    ------
    InputError
        If the weights do not fit, or for rules of another engine than vLLM.
    """
    sheet, arch, tp = times.sheet, times.decoder.arch, times.tp
    if rules.engine != VLLM_ENGINE:
        raise InputError(
            "must be rules of vLLM, whose operators and host terms were measured", rules.name, "--rules"
        )
    require_weights_fit(sheet, arch, tp)
    if terms is None:
        terms = host_terms(version, times.decoder.dtype, times.parts, rules.async_scheduling)
    kind = times.decoder.dtype.replace("bfloat16", "")
    suffix = "".join(f"-{each}" for each in (f"tp{tp}" if tp > 1 else "", kind) if each)
    host = {"request_ms": terms.request_ms, "client_itl_factor": 1.0}
    return Profile(
        name=f"{sheet.key}/{arch.name.lower()}/{rules.engine}-{version}{suffix}",
        gpu=Gpu(name=sheet.name, memory_bytes=sheet.memory_bytes),
        tp=tp,
        model=arch,
        engine=ProfileEngine(
            name=rules.engine,
            version=version,
            rules=rules.name,
            kernel=Kernel.VLLM,
            lora_extra_vocab=rules.lora_extra_vocab,
            quantization=times.decoder.quantization,
        ),
        step_latency=_step_model(times, terms),
        memory=memory_model(sheet, arch, tp, version),
        loading=loading_model(sheet, arch, tp),
        host=assumed_model(HOST_FORM, host, terms.source, "see step_latency"),
        provenance=Provenance(
            kind=ProvenanceKind.COMPOSED,
            source=times.source,
            license=_LICENCES[times.parts],
            command=command,
            notes=_notes(times, terms, version),
        ),
    )


def _step_model(times: StepTimes, terms: HostTerms) -> FittedModel:
    carried = lora_coefficients(times.sheet, times.decoder.arch, times.tp, times.small_product_ratio)
    coefficients: dict[str, Coefficient] = {
        "base_ms": Coefficient(value=terms.base_ms, std_error=terms.std_errors[0]),
        "ms_per_request": Coefficient(value=terms.ms_per_request, std_error=terms.std_errors[1]),
        "ms_per_prefill_mpair": Coefficient(value=times.ms_per_prefill_mpair),
        **carried,
    }
    errors = terms if terms.spans_hardware else composition_terms()
    compared = _are_compared(times, terms)
    return FittedModel(
        form=TABLE_FORM,
        coefficients=coefficients,
        tables=step_tables(times),
        fit=Fit(
            source=f"{times.source}; {terms.in_words()}",
            samples=terms.rows if compared else 0,
            error_formula=ERROR_FORMULA,
            error=terms.error_percent if compared else 0.0,
            cross_validated_error=errors.left_out_error_percent if compared and not terms.only_for else None,
        ),
        uncertainty=_uncertainty(coefficients, carried, terms.scatter if compared else _DEFAULT_SCATTER),
    )


CARRIED_STD_ERROR: Final = 0.3
"""Relative standard error of carried terms. Terms per layer of the two measured profiles, of one GPU and
version, differ by up to 20 %, those of empty slots by more; ratios between GPUs and versions are assumed to
add as much.
"""

_MEASURED_SHEET: Final = "h100-64g"
_MEASURED_MODEL: Final = "llama-3.1-8b"
_BY_BYTES: Final = frozenset({"us_per_slot_rank16", "us_per_adapter_rank16", "us_per_adapter_small_rank16"})
_BY_HOST: Final = frozenset({"us_per_adapter_queued"})


def lora_coefficients(
    sheet: GpuSheet, arch: ModelArch, tp: int, small_product_ratio: float
) -> dict[str, Coefficient]:
    """Return LoRA terms of the step model in milliseconds, with standard errors.

    `small_product_ratio` is the time of products of LoRA's shapes over that on an H100.
    """
    carried, measured = VllmLora(), gpu_sheet(_MEASURED_SHEET)
    bandwidth = measured.bytes_per_s / sheet.bytes_per_s
    elements = _elements_per_layer(arch, tp) / _elements_per_layer(model_arch(_MEASURED_MODEL), 1)
    values = {}
    for name, us in vars(carried).items():
        if not name.startswith("us_"):
            continue
        ratio = (
            elements * bandwidth if name in _BY_BYTES else 1.0 if name in _BY_HOST else small_product_ratio
        )
        values[f"ms_{name.removeprefix('us_')}"] = arch.layers * us * ratio / 1e3
    activations_ms = activation_bytes(arch, tp) / (sheet.bytes_per_s / 1e3)
    values["ms_per_lora_ktoken"] = 1e3 * carried.traffic * activations_ms
    return {name: Coefficient(value=v, std_error=CARRIED_STD_ERROR * v) for name, v in values.items()}


def _elements_per_layer(arch: ModelArch, tp: int) -> float:
    """Return what a token's adapter reads in a layer: of experts, those that the token passes."""
    if arch.experts is not None:
        arch = arch.replace(experts=arch.experts.replace(number=arch.experts.per_token))
    return lora_elements_per_rank(arch, tp) / arch.layers


def _are_compared(times: StepTimes, terms: HostTerms) -> bool:
    """Return whether the errors of the terms hold for these times: for their dtype and hardware."""
    decoder = times.decoder
    is_fitted = terms.dtype == decoder.dtype and decoder.arch.experts is None
    return is_fitted and terms.only_for in (None, f"{times.sheet.key} {decoder.arch.name}")


def _uncertainty(
    coefficients: Mapping[str, Coefficient], carried: Mapping[str, Coefficient], scatter: float
) -> Uncertainty:
    """Return the uncertainty of the coefficients: carried ones err together, by one ratio between GPUs."""
    known = {name: each.std_error for name, each in coefficients.items() if each.std_error}
    errors = np.array(list(known.values()), dtype=float)
    together = np.array([name in carried for name in known])
    covariance = np.outer(errors, errors) * (np.eye(errors.size) + np.outer(together, together) > 0)
    return Uncertainty(names=tuple(known), covariance=tuple(map(tuple, covariance.tolist())), scatter=scatter)


_FP8_ERROR: Final = (
    "mean TPOT of models in fp8: 2.8 to 8.4 % off on loops of Llama-3.1-70B on H100 and B200, to which "
    "nothing was fitted; 8 to 45 % off on Qwen3-32B, whose engines state no concurrency"
)
"""``benchmarks.measured_check --only silicon``, by GPU and tensor parallelism."""


def _notes(times: StepTimes, terms: HostTerms, version: str) -> str:
    """Return in sentences what was fitted, carried over or extrapolated."""
    notes = [terms.in_words()]
    if times.decoder.arch.experts is not None:
        notes.append(EXPERTS_ERROR)
    elif times.decoder.dtype.startswith("fp8"):
        notes.append(_FP8_ERROR)
    elif not _are_compared(times, terms):
        notes.append("no measured engine of this dtype or hardware was compared")
    elif not terms.spans_hardware and not terms.only_for:
        notes.append(f"error on other GPUs and models: {composition_terms().in_words()}")
    if (terms.engine_version, terms.dtype) != (version, times.decoder.dtype):
        fitted = f"vLLM {terms.engine_version} in {terms.dtype}"
        notes.append(f"host terms are those of {fitted}, the nearest that were fitted")
    notes.append(
        "adapter terms are carried over from the H100-64G profiles of vLLM 0.8.5 by times of small products "
        f"({times.small_product_ratio:.2f} of the H100's), bytes and bandwidth, with a standard error of "
        f"{100 * CARRIED_STD_ERROR:.0f} %"
    )
    if version_numbers(version)[:2] < _SPLIT_GRAPHS:
        notes.append("steps without adapters cost no slots, as from vLLM 0.12 on")
    notes += [f"beyond the measured operators: {words}" for words in times.beyond(MAX_TOKENS)]
    return ". ".join(note[0].upper() + note[1:] for note in notes)
