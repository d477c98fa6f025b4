"""Which coefficients of a profile a fit to whole runs may change, and where they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from capplan.errors import InputError
from capplan.models.step_latency import (
    ADDITIVE,
    StepFeatures,
    StepRanks,
    coefficient_array,
    latency_code,
    latency_form,
    rank_ms,
    step_ms,
)
from capplan.spec import Coefficient, FittedModel, Profile

PARTS: Final = ("step_latency", "loading", "host")

_TYPICAL: Final = StepFeatures(
    tokens=300.0,
    requests=100.0,
    kv_tokens=36_000.0,
    adapters=20.0,
    a_max=32.0,
    s_max=16.0,
    waiting=500.0,
    slots_per_adapter=0.5,
)
_TYPICAL_RANKS: Final = StepRanks(
    decodes=100.0,
    prefills=1.0,
    lora_decodes=100.0,
    lora_prefills=1.0,
    lora_prefill_tokens=200.0,
    max_rank=16.0,
    decode_rank_sum=1200.0,
    prefill_rank_sum=12.0,
    prefill_rank_tokens=2400.0,
)
_SHARE: Final = 0.02
_OUTSIDE_STEPS: Final = MappingProxyType({"request_ms": 5.0, "client_itl_factor": 1.0, "serving_factor": 1.0})

_BY_DEFAULT: Final = ("base_ms", "ms_per_ktoken", "ms_per_kv_ktoken", "ms_per_adapter", "ms_per_slot_rank16")


@dataclass(frozen=True)
class FreeCoefficient:
    """A coefficient that a fit may change."""

    part: str
    """Of `PARTS`."""
    name: str
    start: float
    """Above 0."""


def free_coefficients(
    base: Profile, names: Sequence[str] | None, *, steps_known: bool, latency_measured: bool
) -> tuple[FreeCoefficient, ...]:
    """Return the coefficients that may change.

    Parameters
    ----------
    base
        The profile that is started from.
    names
        Their names; None: with the steps known from a table, what clients see of them
        (``client_itl_factor``); otherwise base, tokens, KV tokens, adapters and slots of the additive form,
        or all of another form. Where waiting was measured, time outside the steps (``request_ms``) as well.
    steps_known, latency_measured
        Whether they are.

    Raises
    ------
    InputError
        For a name that no part of the profile has, or one given twice.
    """
    if names is None:
        outside = ("request_ms",) if latency_measured else ()
        form = latency_form(base.step_latency.form)
        of_steps = _BY_DEFAULT if form is ADDITIVE else _positive(base.step_latency)
        names = (*(("client_itl_factor",) if steps_known else of_steps), *outside)
    if len(set(names)) < len(names):
        raise InputError("must name each coefficient once", ",".join(names), "--free")
    return tuple(_free(base, name) for name in names)


def _positive(model: FittedModel) -> tuple[str, ...]:
    return tuple(name for name, coefficient in model.coefficients.items() if coefficient.value > 0.0)


def _free(base: Profile, name: str) -> FreeCoefficient:
    """Return a coefficient at its value in the base, or, where that is 0, at a small one."""
    known = {part: _names(base, part) for part in PARTS}
    for part, names in known.items():
        if name in names:
            coefficients = getattr(base, part).coefficients
            value = coefficients[name].value if name in coefficients else 0.0
            return FreeCoefficient(part, name, value if value > 0.0 else _small(base, part, name))
    rule = f"must be one of {', '.join(name for names in known.values() for name in names)}"
    raise InputError(rule, name, "--free")


def _names(base: Profile, part: str) -> tuple[str, ...]:
    if part == "step_latency":
        return latency_form(base.step_latency.form).names
    return tuple(getattr(base, part).coefficients)


def _small(base: Profile, part: str, name: str) -> float:
    """Return a value by which the coefficient adds 2 % to a typical step, or a round number elsewhere."""
    if part != "step_latency":
        return _OUTSIDE_STEPS.get(name, 1.0)
    model = base.step_latency
    form = latency_form(model.form)
    zero = {each: Coefficient(value=0.0) for each in form.names}
    whole = _typical_ms(base, model)
    one = _typical_ms(base, model.replace(coefficients=zero | {name: Coefficient(value=1.0)}))
    return _SHARE * whole / one if one > 0.0 and whole > 0.0 else 1.0


def _typical_ms(base: Profile, model: FittedModel) -> float:
    code, k = latency_code(model.form, base.engine.kernel), coefficient_array(model)
    return step_ms(code, k, _TYPICAL) + rank_ms(code, k, _TYPICAL.s_max, _TYPICAL_RANKS)


def with_coefficients(base: Profile, free: Sequence[FreeCoefficient], values: Sequence[float]) -> Profile:
    """Return the profile with other values of the free coefficients."""
    changed = base
    for part in PARTS:
        own = {
            f.name: Coefficient(value=float(value))
            for f, value in zip(free, values, strict=True)
            if f.part == part and np.isfinite(value)
        }
        if own:
            model = getattr(changed, part)
            changed = changed.replace(**{part: model.replace(coefficients=model.coefficients | own)})
    return changed
