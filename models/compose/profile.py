"""Profiles composed from measured operators: a GPU, a dense model, tensor parallelism, and a vLLM version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from capplan.errors import InputError
from capplan.models.compose.decoder import Decoder
from capplan.models.compose.forward import ForwardPass, StepTimes, forward_pass
from capplan.models.compose.grids import MAX_TOKENS, step_tables
from capplan.models.compose.host_terms import HostTerms, composition_terms, host_terms
from capplan.models.compose.lora import CARRIED_STD_ERROR, lora_coefficients
from capplan.models.compose.tables import operator_tables
from capplan.models.memory import HOST_FORM, assumed_model, memory_model
from capplan.models.roofline import loading_model, require_weights_fit
from capplan.models.uncertainty import DEFAULT_SCATTER
from capplan.serving.rules import VLLM_ENGINE, ServingRules
from capplan.spec import (
    Coefficient,
    Fit,
    FittedModel,
    Gpu,
    Kernel,
    Profile,
    ProfileEngine,
    Provenance,
    ProvenanceKind,
    Uncertainty,
)
from capplan.spec.step_tables import TABLE_FORM

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
    terms
        Host terms; those of the nearest fitted version by default.
    command
        Recorded in the provenance.

    Raises
    ------
    InputError
        If there are no operators for the GPU, `tp` or the model's dtype, or the weights do not fit.
    """
    return profile_of_times(operator_times(gpu, decoder, tp), rules, version, terms=terms, command=command)


def operator_times(gpu: str, decoder: Decoder, tp: int = 1) -> ForwardPass:
    """Return the step times of a model by the measured operators of a GPU; see `compose_profile`."""
    return forward_pass(operator_tables(gpu), decoder, tp)


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
        ),
        step_latency=_step_model(times, terms),
        memory=memory_model(arch, tp, version),
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


def _are_compared(times: StepTimes, terms: HostTerms) -> bool:
    """Return whether the errors of the terms hold for these times: for their dtype and hardware."""
    hardware = f"{times.sheet.key} {times.decoder.arch.name}"
    return terms.dtype == times.decoder.dtype and terms.only_for in (None, hardware)


def _uncertainty(
    coefficients: Mapping[str, Coefficient], carried: Mapping[str, Coefficient], scatter: float
) -> Uncertainty:
    """Return the uncertainty of the coefficients: carried ones err together, by one ratio between GPUs."""
    known = {name: each.std_error for name, each in coefficients.items() if each.std_error}
    errors = np.array(list(known.values()), dtype=float)
    together = np.array([name in carried for name in known])
    covariance = np.outer(errors, errors) * (np.eye(errors.size) + np.outer(together, together) > 0)
    return Uncertainty(names=tuple(known), covariance=tuple(map(tuple, covariance.tolist())), scatter=scatter)


def _notes(times: StepTimes, terms: HostTerms, version: str) -> str:
    """Return in sentences what was fitted, carried over or extrapolated."""
    notes = [terms.in_words()]
    if not _are_compared(times, terms):
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
    if tuple(map(int, version.split(".")[:2])) < _SPLIT_GRAPHS:
        notes.append("steps without adapters cost no slots, as from vLLM 0.12 on")
    notes += [f"beyond the measured operators: {words}" for words in times.beyond(MAX_TOKENS)]
    return ". ".join(note[0].upper() + note[1:] for note in notes)
