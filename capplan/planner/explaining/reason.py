"""Why A_max is what it is, in a sentence that the curve bears out."""

from __future__ import annotations

from typing import Final

from capplan.planner.explaining.slot_curve import CurvePoint, SlotCurve
from capplan.planner.problem import Estimate
from capplan.planner.slots import best_slots

_WORTH_SAYING: Final = 0.02
"""Relative difference of what is served, and of the time of a request."""
_MUCH: Final = 0.05
"""The same, of memory and of TTFT p99."""
_EQUAL: Final = 1.005
"""Ratio of times that three figures hardly tell apart."""


def reason(curve: SlotCurve, solver: str, *, fixed: bool) -> str:
    """Return why the plan has this number of slots.

    Parameters
    ----------
    curve
        What the twin says of this number and of others.
    solver
        Who made the plan.
    fixed
        Whether the workload fixes the number.
    """
    best = best_slots({p.a_max: _estimate(p) for p in curve.points if p.fits})
    chosen = curve.chosen_point
    head = f"A_max {curve.chosen}"
    if fixed:
        words = f"{head}: fixed by the workload"
        return _sentence(words, _better(curve, best), _memory(curve))
    if not chosen.holds:
        why = f"breaks {chosen.broken[0]}" if chosen.fits else "does not fit in memory"
        other = "no other number tried holds" if best is None else f"{best} would hold"
        return _sentence(f"{head} {why} {_at(curve)}", other)
    if best != curve.chosen:
        words = f"{head}: holds, chosen by {solver}"
        return _sentence(words, _better(curve, best), _memory(curve))
    return _sentence(f"{head}: {_merit(curve)}", *_neighbours(curve), _memory(curve))


def _merit(curve: SlotCurve) -> str:
    """Return what puts the chosen number, which is the best, before all others."""
    holding = [point for point in curve.points if point.holds]
    if len(holding) == 1 and len(curve.points) > 1:
        merit = f"the only number tried with which every bound holds {_at(curve)}"
    else:
        most = max(point.throughput_tok_s or 0.0 for point in holding)
        serving = (p for p in holding if (p.throughput_tok_s or 0.0) >= most * (1.0 - _WORTH_SAYING))
        shortest = min(point.e2e_mean_s or 0.0 for point in serving)
        own = curve.chosen_point.e2e_mean_s or 0.0
        merit = "of those that serve most, " + (
            f"the shortest mean time from arrival to last token, {own:.3g} s"
            if own <= shortest * _EQUAL
            else f"more slots for bursts, with {own:.3g} s from arrival to last token on average, where the "
            f"shortest is {shortest:.3g} s"
        )
    all_have_one = curve.chosen == curve.adapters
    return f"a slot for each adapter, so that none is loaded twice; {merit}" if all_have_one else merit


def _neighbours(curve: SlotCurve) -> list[str]:
    """Return what speaks against the next number below, and the next above."""
    at = [point.a_max for point in curve.points].index(curve.chosen)
    words = []
    if at > 0:
        words.append(_against(curve, curve.points[at - 1]))
    if at + 1 < len(curve.points):
        words.append(_against(curve, curve.points[at + 1]))
    elif curve.chosen == curve.adapters:
        words.append("more would stay empty")
    return words


def _against(curve: SlotCurve, other: CurvePoint) -> str:
    """Return what speaks against another number of slots."""
    slots = "1 slot" if other.a_max == 1 else f"{other.a_max} slots"
    if not other.fits:
        return f"{slots} do not fit in memory"
    chosen = curve.chosen_point
    words = []
    lost = 1.0 - other.kv_tokens / max(chosen.kv_tokens, 1)
    if lost >= _MUCH:
        words.append(f"{_percent(lost)} fewer KV tokens")
    if (other.loads_per_min or 0.0) - (chosen.loads_per_min or 0.0) >= 1.0:
        words.append(f"{other.loads_per_min:,.0f} loads a minute")
    return f"{slots}: {', '.join([*words, _outcome(chosen, other)])}"


def _outcome(chosen: CurvePoint, other: CurvePoint) -> str:
    if other.broken:
        return f"breaks {other.broken[0]}"
    served = (other.throughput_tok_s or 0.0) / max(chosen.throughput_tok_s or 0.0, 1e-9)
    if served < 1.0 - _WORTH_SAYING:
        return f"serves {_percent(1.0 - served)} less"
    for what, here, there, much in (
        ("s from arrival to last token", chosen.e2e_mean_s, other.e2e_mean_s, _WORTH_SAYING),
        ("s of TTFT p99", chosen.ttft_p99_s, other.ttft_p99_s, _MUCH),
    ):
        if here and there and there > here * (1.0 + much):
            return f"{there:.3g} {what} instead of {here:.3g}"
    return "does as well, with less to spare in bursts" if other.a_max < chosen.a_max else "does no better"


def _better(curve: SlotCurve, best: int | None) -> str:
    """Return what the curve says for another number than the plan's."""
    chosen = curve.chosen_point
    if best is None:
        return f"no number tried holds {_at(curve)}"
    if best == curve.chosen:
        return "no other number tried does better"
    other = next(point for point in curve.points if point.a_max == best)
    if not chosen.fits:
        return f"it does not fit in memory, {best} would"
    if chosen.broken:
        return f"it breaks {chosen.broken[0]} {_at(curve)}, {best} would hold"
    gain = (other.throughput_tok_s or 0.0) / max(chosen.throughput_tok_s or 0.0, 1e-9) - 1.0
    if gain > _WORTH_SAYING:
        return f"on this curve {best} serves {_percent(gain)} more"
    return (
        f"on this curve {best} does as well or better ({other.e2e_mean_s or 0.0:.3g} s from arrival to last "
        f"token, here {chosen.e2e_mean_s or 0.0:.3g} s)"
    )


def _memory(curve: SlotCurve) -> str:
    most = curve.most_slots
    return "" if most is None or most > 4 * curve.adapters else f"memory has room for {most} at most"


def _at(curve: SlotCurve) -> str:
    return "at the planned load" if curve.scale == 1.0 else f"at {curve.scale:.2f} x the planned load"


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"


def _estimate(point: CurvePoint) -> Estimate:
    return Estimate(point.throughput_tok_s or 0.0, bool(point.broken), e2e_s_mean=point.e2e_mean_s or 0.0)


def _sentence(*words: str) -> str:
    return "; ".join(word for word in words if word)
