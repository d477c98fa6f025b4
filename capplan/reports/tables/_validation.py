"""Tables of a plan beside measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.reports._console import DASH, Table, number

if TYPE_CHECKING:
    from capplan.profiling.validation import GroupValidation, MetricComparison


_HEAD: Final = (
    *("metric", "measured", "predicted", "SMAPE, %", "tolerance, %", "constant step", "SMAPE, %"),
    *("offered load", "SMAPE, %"),
)


_LABELS: Final = {
    "throughput_tok_s": ("throughput", "tok/s"),
    "itl_ms_mean": ("mean ITL", "ms"),
}
"""Names and units of the metrics with a tolerance."""


_THREE_DECIMALS: Final = ("ttft_s", "e2e_s", "served")


def group_table(group: GroupValidation, *, on_page: bool = False) -> Table:
    """Return one row per metric, and the verdict on starvation."""
    starved, predicted, constant = (
        "yes" if each else "no"
        for each in (group.starved, group.predicted_starved, group.constant_step_starved)
    )
    verdict = ("starved", starved, predicted, "", "equal", constant, "", "no", "")
    head = list(_HEAD)
    if on_page:  # columns become labels on narrow screens
        head[6], head[8] = "SMAPE of constant step, %", "SMAPE of offered load, %"
    return Table(head, [*map(_row, group.comparisons), verdict])


def _row(each: MetricComparison) -> tuple[str, ...]:
    decimals = 3 if each.name.startswith(_THREE_DECIMALS) else 2
    return (
        each.name,
        number(each.measured, decimals),
        number(each.predicted, decimals),
        number(each.error, 2),
        DASH if each.tolerance is None else number(each.tolerance, 1),
        number(each.constant_step, decimals),
        number(each.constant_step_error, 2),
        number(each.offered_load, decimals),
        number(each.offered_load_error, 2),
    )


def heading(group: GroupValidation) -> str:
    """Return the heading of a group's table."""
    scale = "" if group.rate_scale == 1.0 else f", rates times {group.rate_scale:g}"
    return f"group {group.group}: {group.requests:,} requests in {group.duration_s:g} s{scale}"


_FAR: Final = 0.1


def speed_note(group: GroupValidation) -> str | None:
    """Return how fast the machine was, and the predictions without it; None if it is unknown."""
    if group.slowdown is None:
        return None
    known = [each for each in group.comparisons if each.tolerance is not None]
    values = (f"{_valued(each, each.as_profiled)} ({number(each.as_profiled_error, 1)} %)" for each in known)
    note = (
        f"speed: by the engine's probe, steps took {number(group.slowdown, 3)} times as long as profiled, "
        f"which the predictions count; as profiled: {', '.join(values)}"
    )
    return note if abs(group.slowdown - 1.0) <= _FAR else f"{note}; profile the engine again on this machine"


def _valued(each: MetricComparison, value: float) -> str:
    label, unit = _LABELS[each.name]
    return f"{label} {number(value, 1)} {unit}"


def group_verdict(group: GroupValidation) -> str:
    """Return whether a group agrees, the metrics with a tolerance, and the faults of the measurement."""
    bounded = [each for each in group.comparisons if each.tolerance is not None]
    wrong = [_metric_verdict(each) for each in bounded if not each.agrees]
    if group.starved != group.predicted_starved:
        words = {True: "starved", False: "not starved"}
        wrong.append(f"{words[group.starved]} measured, {words[group.predicted_starved]} predicted")
    parts = wrong or [_metric_verdict(each) for each in bounded]
    verdict = "agrees" if group.agrees else "disagrees"
    return "; ".join((f"{verdict}: {', '.join(parts)}", *group.faults))


def _metric_verdict(each: MetricComparison) -> str:
    """Return the values of a metric, its error, and its tolerance."""
    values = f"{_valued(each, each.measured)} measured, {number(each.predicted, 1)} predicted"
    side = "within" if each.agrees else "over"
    return f"{values}: {number(each.error, 1)} % {side} the tolerance of {each.tolerance:g} %"
