"""Axes of figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_TICKS: Final = 5  # about as many as fit


_LARGEST: Final = 1e150  # beyond it, differences and ratios of values may not be numbers


_APART: Final = 0.06  # least distance of given ticks, as a share of the axis


@dataclass(frozen=True)
class Axis:
    """An axis as a caller wants it.

    Attributes
    ----------
    label : str
        Quantity with its unit, such as ``"TTFT p99, s"``.
    log : bool
        Whether equal distances are equal ratios; values that are not positive are then left out.
    low, high : float, optional
        Ends of the axis; by default they follow from the data. A linear axis starts at 0 if the data allow.
    ticks : tuple of float, optional
        Where ticks should be, such as the values that were tried; by default round numbers.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Scale:
    """An axis with its range: where on it, from 0 to 1, a value lies."""

    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def shows(self, value: float) -> bool:
        """Tell whether a value has a place on the axis or beyond its ends."""
        return _can_show(value, log=self.log)

    def at(self, value: float) -> float:
        """Return the place of a value, at most a little beyond the ends."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.05, max(-0.05, share))


def scale_of(
    axis: Axis, values: Iterable[float], *, from_zero: bool = False, round_ends: bool = True
) -> Scale:
    """Return the scale that shows the values.

    Parameters
    ----------
    axis : Axis
        What was asked for.
    values : iterable of float
        What will be drawn; what is not finite does not count.
    from_zero : bool
        Whether a linear axis starts at 0 when no value is negative.
    round_ends : bool
        Whether a linear axis ends on ticks rather than on the data.
    """
    seen = [v for v in values if _can_show(v, log=axis.log)]
    low, high = (min(seen), max(seen)) if seen else (1.0 if axis.log else 0.0, 1.0)
    if from_zero and not axis.log and low > 0:
        low = 0.0
    low = low if axis.low is None else axis.low
    high = high if axis.high is None else axis.high
    if axis.log:
        low, high = (low, high) if high > low else (low / 2, low * 2)
        ticks = _log_ticks(low, high) if axis.ticks is None else ()
    else:
        if not high > low:
            around = abs(low) / 2 or 0.5
            low, high = (low, low + 1.0) if from_zero else (low - around, low + around)
        step = _round_step((high - low) / _TICKS)
        round_ends = round_ends and axis.ticks is None
        if axis.high is None and round_ends:
            high = step * math.ceil(high / step - 1e-9)
        if axis.low is None and round_ends:
            low = step * math.floor(low / step + 1e-9)
        ticks = _linear_ticks(low, high, step) if axis.ticks is None else ()
    scale = Scale(low, high, axis.log, ())
    if axis.ticks is not None:
        ticks = _spaced(scale, [v for v in axis.ticks if low <= v <= high])
    labels = [_label(tick) for tick in ticks] if axis.log else _labels(ticks)
    return Scale(low, high, axis.log, tuple(zip(ticks, labels, strict=True)))


def _can_show(value: float, *, log: bool) -> bool:
    return (value >= 1 / _LARGEST if log else value >= -_LARGEST) and value <= _LARGEST


def _round_step(step: float) -> float:
    """Return 1, 2 or 5 times a power of ten, the least that is not below ``step``."""
    power: float = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def _linear_ticks(low: float, high: float, step: float) -> tuple[float, ...]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(step * k for k in range(first, last + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    decades = math.log10(high / low)
    factors = (1,) if decades > 3 else (1, 3) if decades > 1.5 else (1, 2, 5)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    every = max(1, round(decades / (2 * _TICKS)))
    found = tuple(
        10.0**p * f for p in powers if p % every == 0 for f in factors if low <= 10.0**p * f <= high
    )
    return found or (low, high)


def _spaced(scale: Scale, ticks: Sequence[float]) -> tuple[float, ...]:
    """Leave out ticks that would touch the one before."""
    kept: list[float] = []
    for tick in sorted(ticks):
        if not kept or scale.at(tick) - scale.at(kept[-1]) >= _APART:
            kept.append(tick)
    return tuple(kept)


def _label(tick: float) -> str:
    return f"{tick:,.0f}" if 1 <= tick < 1e6 and tick == round(tick) else f"{tick:g}"


def _labels(ticks: Sequence[float]) -> list[str]:
    """Return the ticks in words: as many decimals as tell them apart, thousands separated."""
    largest = max((abs(t) for t in ticks), default=0.0)
    if largest >= 1e7 or 0 < largest < 1e-3:
        return [f"{t:.3g}" for t in ticks]
    decimals = next(
        (d for d in range(6) if all(math.isclose(t, round(t, d), abs_tol=largest * 1e-9) for t in ticks)), 6
    )
    shared = [f"{t:,.{decimals}f}" for t in ticks]
    return shared if decimals <= 2 else [f"{t:.6g}" for t in ticks]
