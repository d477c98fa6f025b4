"""The best profile of a GPU and a model: a shipped one, or one made from operators or a data sheet."""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass
from typing import Final

from capplan.datasets import (
    GpuSheet,
    find_gpu,
    gpu_names,
    known_arch,
    list_profiles,
    load_profile,
    model_names,
)
from capplan.errors import InputError
from capplan.models._accuracy import comparable_rows
from capplan.models._roofline import Assumptions, EngineChoice, efficiencies_of, roofline_profile
from capplan.models.compose import (
    SYSTEMS,
    Decoder,
    known_decoder,
    operator_times,
    profile_of_times,
    quantized_on_loading,
)
from capplan.serving import VLLM_ENGINE, rules_of_engine
from capplan.spec import Profile, ProvenanceKind, version_numbers

_BEST_FIRST: Final = tuple(ProvenanceKind)
_NEAREST: Final = 3
"""Names that an error about an unknown one lists."""


@dataclass(frozen=True)
class ProfileRoute:
    """A profile, and how to get it.

    Attributes
    ----------
    profile
        The profile.
    command
        Command that makes it; empty: it is shipped under its name.
    without
        Why no better kind is possible, as text; empty if the profile is shipped.
    """

    profile: Profile
    command: str = ""
    without: str = ""

    @property
    def is_shipped(self) -> bool:
        """Whether the profile is shipped."""
        return not self.command

    @property
    def error(self) -> str:
        """Stated error, as text: of the fit, or on the measured engines nearest to a made profile."""
        fit, rows = self.profile.step_latency.fit, comparable_rows(self.profile)
        if rows:
            return rows[0].in_words()
        if not fit.samples:
            return "not fitted to measurements"
        held_out = fit.cross_validated_error
        left = "" if held_out is None else f", {held_out:.2f} % on samples left out"
        return f"{fit.error:.2f} % on {fit.samples:,} samples{left} ({fit.error_formula})"


def best_profile(gpu: str, model: str, tp: int = 1, dtype: str | None = None) -> ProfileRoute:
    """Return the best profile for vLLM: measured, published or composed and shipped, composed, or a roofline.

    Parameters
    ----------
    gpu
        Name of a GPU type, as `capplan.datasets.gpu_sheet` or operator tables spell it.
    model
        Short name or Hugging Face id of a known model.
    tp
        GPUs per copy of the model.
    dtype
        Dtype of the weights; None: that of the model's files.

    Raises
    ------
    InputError
        For an unknown GPU, model or dtype, with the nearest names, or if the weights do not fit.
    """
    sheet = _sheet(gpu)
    _require_known(model)
    decoder = known_decoder(model, dtype)
    shipped = _shipped(sheet, decoder, tp)
    if shipped is not None:
        return ProfileRoute(shipped)
    # In the order in which the commands record their options, so that both make equal files.
    options = {"gpu": sheet.key, "output": "profile.json", "model": model, "dtype": dtype}
    options |= {"tp": None if tp == 1 else str(tp)}
    given = {name: value for name, value in options.items() if value is not None}
    words = " ".join(f"--{name} {shlex.quote(value)}" for name, value in given.items())
    try:
        command = f"capplan profile compose {words}"
        rules, version = rules_of_engine(None, None)
        times = operator_times(sheet.key, decoder, tp)
        return ProfileRoute(profile_of_times(times, rules, version, command=command), command)
    except InputError as error:
        command = f"capplan profile roofline {words}"
        is_measured = sheet.key in {each.sheet_key for each in SYSTEMS}
        without = str(error) if is_measured else "no operators were measured on this GPU"
        return ProfileRoute(_roofline(sheet, decoder, tp, dtype, command), command, without)


def _sheet(gpu: str) -> GpuSheet:
    """Return the data sheet of a GPU type."""
    system = next((each for each in SYSTEMS if each.key == gpu.lower()), None)
    sheet = find_gpu(gpu) if system is None else system.sheet
    if sheet is None:
        raise InputError(f"must be a known GPU{_nearest(gpu, gpu_names())}", gpu, "GPU")
    return sheet


def _require_known(model: str) -> None:
    """Check that a model is known."""
    names = model_names()
    if known_arch([model]) is None and model.lower() not in names:
        hint = _nearest(model.rsplit("/", maxsplit=1)[-1], names)
        others = "`capplan profile compose --model-config FILE` takes others"
        raise InputError(f"must be a known model{hint}; {others}", model, "MODEL")


def _nearest(name: str, known: tuple[str, ...]) -> str:
    """Return the nearest of the known names, as text."""
    low = name.lower()
    begin = [each for each in known if low and each.startswith(low)]
    near = dict.fromkeys([*begin, *difflib.get_close_matches(low, known, n=_NEAREST, cutoff=0.3)])
    return f", such as {', '.join(list(near)[:_NEAREST] or known)}"


def _shipped(sheet: GpuSheet, decoder: Decoder, tp: int) -> Profile | None:
    """Return the best shipped profile, of the newest version of vLLM among equal kinds."""
    folder = f"{sheet.key}/{decoder.arch.name.lower()}/"
    found = [load_profile(name) for name in list_profiles() if name.startswith(folder)]
    fitting = [
        each
        for each in found
        if each.engine.name == VLLM_ENGINE
        and each.tp == tp
        and each.model.linear_dtype_bytes == decoder.arch.linear_dtype_bytes
        and each.model.kv_dtype_bytes == decoder.arch.kv_dtype_bytes
    ]
    newest_first = sorted(fitting, key=lambda each: version_numbers(each.engine.version), reverse=True)
    return min(newest_first, key=lambda each: _BEST_FIRST.index(each.provenance.kind), default=None)


def _roofline(sheet: GpuSheet, decoder: Decoder, tp: int, dtype: str | None, command: str) -> Profile:
    files = known_arch(decoder.arch.hf_ids)
    engine = EngineChoice(quantization=None if files is None else quantized_on_loading(files, dtype))
    assumptions = Assumptions(physics=efficiencies_of(sheet))
    return roofline_profile(sheet, decoder.arch, engine, tp, assumptions, command)
