"""Extrapolations: values of a simulation or plan outside the ranges that a profile was fitted on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from capplan.models import comparable_rows
from capplan.spec import EngineArgs, Profile, ProvenanceKind, Workload
from capplan.twin.instance._metrics import SimulationResult

MODELS: Final = ("step_latency", "memory", "loading", "host")
"""Models of a profile."""

SLACK: Final = 0.05
"""Share beyond an end that counts as inside: ranges hold means over seconds, the twin its maxima."""

Values: TypeAlias = Mapping[str, tuple[float, float]]
"""Smallest and largest value of each quantity, by its name in `FittedModel.fitted_range`."""


class Quantity(NamedTuple):
    """A quantity of `FittedModel.fitted_range` that is compared."""

    label: str
    upper_only: bool = False
    """Whether values below the range are covered: a limit, or a count that every run passes through."""


QUANTITIES: Final[Mapping[str, Quantity]] = MappingProxyType(
    {
        "rank": Quantity("adapters of rank"),
        "a_max": Quantity("adapter slots"),
        "s_max": Quantity("slots of rank"),
        "prompt_tokens": Quantity("mean prompt tokens"),
        "output_tokens": Quantity("mean output tokens"),
        "tp": Quantity("GPUs per instance"),
        "requests": Quantity("running requests"),
        "adapters": Quantity("adapters of running requests"),
        "kv_tokens": Quantity("KV tokens in use", upper_only=True),
        "waiting": Quantity("waiting requests", upper_only=True),
        "tokens": Quantity("tokens of a step", upper_only=True),
        "streams": Quantity("requests in flight", upper_only=True),
        "rate_rps": Quantity("requests per second", upper_only=True),
        "max_num_seqs": Quantity("max_num_seqs", upper_only=True),
        "max_num_batched_tokens": Quantity("max_num_batched_tokens", upper_only=True),
        "max_model_len": Quantity("max_model_len", upper_only=True),
    }
)
"""Quantities by name. A profile states ranges of any of them, in any of its models."""

_NOT_MEASURED: Final = MappingProxyType(
    {
        ProvenanceKind.COMPOSED: "is composed from tables of operators, not measured as a whole",
        ProvenanceKind.CARRIED: "is carried over from another GPU, model or engine, not measured",
        ProvenanceKind.ROOFLINE: "is an analytic roofline, not measured",
    }
)


@dataclass(frozen=True)
class Extrapolation:
    """A quantity outside a fitted range, or models of a profile that were never fitted."""

    profile: str
    models: tuple[str, ...]
    """Models with this range, or without a fit; empty: the whole profile."""
    quantity: str | None = None
    """Name in `QUANTITIES`; None if nothing was fitted."""
    low: float | None = None
    """Smallest value."""
    high: float | None = None
    """Largest value."""
    fitted_low: float | None = None
    fitted_high: float | None = None
    note: str = ""
    """The extrapolation in words, without the groups."""
    groups: tuple[str, ...] = ()
    """Groups of a plan."""
    tables: bool = False
    """Whether the range is that of an axis of step tables, beyond which the last slope goes on."""

    def document(self) -> dict[str, Any]:
        """Return the record as JSON data; lists for tuples."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


def extrapolations(profile: Profile, values: Values) -> tuple[Extrapolation, ...]:
    """Return one record per quantity and range that the values leave, and per model without a fit.

    A profile that was not measured has one record without ranges. Axes of step tables are ranges as well: of
    their upper ends, since below an axis its first value applies.

    Parameters
    ----------
    profile
        Profile with the fitted ranges.
    values
        Values of any `QUANTITIES`; those that the profile has no range of are not compared.
    """
    kind = profile.provenance.kind
    beyond = _beyond_tables(profile, values)
    if kind in _NOT_MEASURED:
        note = f"profile {profile.name} {_NOT_MEASURED[kind]}{_error_in_words(profile)}"
        return (Extrapolation(profile.name, (), note=note), *beyond)
    unfitted = tuple(name for name in MODELS if getattr(profile, name).fit.samples == 0)
    found = []
    if unfitted:
        words = f"profile {profile.name}: {', '.join(unfitted)} assumed, not fitted"
        found.append(Extrapolation(profile.name, unfitted, note=words))
    ranges: dict[tuple[str, tuple[float, float]], list[str]] = {}
    for name in MODELS:
        for quantity, ends in getattr(profile, name).fitted_range.items():
            ranges.setdefault((quantity, ends), []).append(name)
    for (quantity, ends), models in ranges.items():
        if quantity in values and quantity in QUANTITIES and _is_outside(quantity, values[quantity], ends):
            found.append(_outside(profile.name, tuple(models), quantity, values[quantity], ends))
    return (*found, *beyond)


def _beyond_tables(profile: Profile, values: Values) -> list[Extrapolation]:
    """Return a record for every axis of the step tables that the values exceed."""
    tables = profile.step_latency.tables.values()
    ends = {axis.name: (axis.points[0], axis.points[-1]) for table in tables for axis in table.axes}
    return [
        _outside(profile.name, ("step_latency",), name, values[name], each, tables=True)
        for name, each in ends.items()
        if name in values and values[name][1] > each[1]
    ]


def _error_in_words(profile: Profile) -> str:
    """Return the error on the nearest measured rows; nothing for a kind that was not compared."""
    rows = comparable_rows(profile)
    return f"; nearest measured: {rows[0].in_words()}" if rows else ""


def _is_outside(quantity: str, values: tuple[float, float], ends: tuple[float, float]) -> bool:
    above = values[1] > ends[1] + SLACK * abs(ends[1])
    below = values[0] < ends[0] - SLACK * abs(ends[0])
    return above or (below and not QUANTITIES[quantity].upper_only)


def _outside(
    profile: str,
    models: tuple[str, ...],
    quantity: str,
    values: tuple[float, float],
    ends: tuple[float, float],
    *,
    tables: bool = False,
) -> Extrapolation:
    low, high = values
    is_outside_whole = low > ends[1] or high < ends[0]
    at = _range(low, high) if is_outside_whole else _words(high if high > ends[1] else low)
    fitted = _range(*ends)
    covered = (
        f"tables of {profile} end at {_words(ends[1])}" if tables else f"of {profile} fitted on {fitted}"
    )
    note = f"{QUANTITIES[quantity].label} {at}, {' and '.join(models)} {covered}"
    return Extrapolation(profile, models, quantity, low, high, *ends, note=note, tables=tables)


def _range(low: float, high: float) -> str:
    first, last = _words(low), _words(high)
    return first if first == last else f"{first} to {last}"


def _words(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or float(value).is_integer() else f"{value:.2g}"


def values_of(workload: Workload, args: EngineArgs, tp: int, results: Sequence[SimulationResult]) -> Values:
    """Return the values that one instance uses.

    Settings are those configured; counts of requests and tokens are the least mean and the largest maximum
    that the simulations reached.

    Parameters
    ----------
    workload
        Traffic of the instance.
    args, tp
        Its settings.
    results
        Simulations of it.
    """
    has_slots = all(result.pool is None for result in results) if results else workload.scheduling is None
    slots = args.max_loras if has_slots else len(workload.adapters)
    lengths = [workload.lengths_of(each) for each in workload.traffic.values()]
    each: dict[str, Sequence[float]] = {
        "rank": [adapter.rank for adapter in workload.adapters],
        "a_max": [args.max_loras] if has_slots else [],
        "s_max": [args.max_lora_rank] if args.max_loras else [],  # without slots there is no rank of slots
        "prompt_tokens": [prompt.mean_tokens for prompt, _ in lengths],
        "output_tokens": [output.mean_tokens for _, output in lengths],
        "tp": [tp],
        "rate_rps": [workload.total_rate_rps],
        "max_num_seqs": [args.max_num_seqs],
        "max_num_batched_tokens": [args.max_num_batched_tokens],
        "max_model_len": [args.max_model_len],
    }
    busy = [result for result in results if result.steps > 0]
    if busy:
        each |= {
            "requests": [value for r in busy for value in (r.running_mean, r.running_max)],
            "adapters": [*(r.adapters_mean for r in busy), min(slots, len(workload.adapters))],
            "kv_tokens": [r.kv_tokens_max for r in busy],
            "waiting": [r.waiting_max for r in busy],
            "tokens": [r.step_tokens_max for r in busy],
            "streams": [r.running_max + r.waiting_max for r in busy],
        }
    return {name: (float(min(found)), float(max(found))) for name, found in each.items() if found}


def merged(records: Iterable[tuple[str, Extrapolation]]) -> tuple[Extrapolation, ...]:
    """Return one record for the same quantity and range of several groups; pairs of group and record.

    The note names the value that is farthest outside.
    """
    together: dict[tuple[object, ...], list[tuple[str, Extrapolation]]] = {}
    for group, each in records:
        key = (each.profile, each.models, each.quantity, each.fitted_low, each.fitted_high, each.tables)
        together.setdefault(key, []).append((group, each))
    found = []
    for same in together.values():
        first, groups = same[0][1], tuple(dict.fromkeys(group for group, _ in same))
        if first.quantity is not None:
            lows, highs = ([getattr(each, end) for _, each in same] for end in ("low", "high"))
            ends = (first.fitted_low or 0.0, first.fitted_high or 0.0)
            values = min(lows), max(highs)
            first = _outside(first.profile, first.models, first.quantity, values, ends, tables=first.tables)
        found.append(replace(first, groups=groups))
    return tuple(found)
