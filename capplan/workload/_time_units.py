"""Units of recorded times, by the name of their column, the definition of their format, size and rate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from capplan.errors import InputError
from capplan.spec import NS_PER_S, TimeUnit

PER_S: Final[Mapping[TimeUnit, int]] = MappingProxyType(
    {TimeUnit.S: 1, TimeUnit.MS: 10**3, TimeUnit.US: 10**6, TimeUnit.NS: NS_PER_S}
)
UNIT_WORDS: Final[Mapping[TimeUnit, str]] = MappingProxyType(
    {
        TimeUnit.S: "seconds",
        TimeUnit.MS: "milliseconds",
        TimeUnit.US: "microseconds",
        TimeUnit.NS: "nanoseconds",
    }
)
WHOLE: Final = 1e-6  # rounding of milliseconds that were computed from seconds
EPOCH_S: Final = 1e9  # 2001; ten times as much is 2286, so the unit of a date follows from its size

_UNIT_OF_NAME: Final = re.compile(r"(?:^|[^a-z])(s|ms|us|ns)\W*$")
_LEAST_RPS: Final = 0.01  # public traces have 0.01 to 75 requests per second
_MOST_RPS: Final = 100.0


@dataclass(frozen=True)
class TimeColumn:
    """What is known of a column of times that are numbers.

    Parameters
    ----------
    label
        Its name.
    low, high
        First and last time, as they are.
    count
        Number of times.
    whole
        Whether all are whole numbers.
    format_name, defined
        Format of the file, and its unit by definition; None: it has none.
    firm
        Whether all files of the format have that unit.
    """

    label: str
    low: float
    high: float
    count: int
    whole: bool
    format_name: str = ""
    defined: TimeUnit | None = None
    firm: bool = False


def time_unit_of(column: TimeColumn, location: str, option: str) -> tuple[TimeUnit, str]:
    """Return the unit of times and the reason, which is empty if the name of the column has the unit.

    Parameters
    ----------
    location
        The column, for messages.
    option
        What states the unit otherwise.

    Raises
    ------
    InputError
        If the definition of the format and the values contradict each other, or neither implies a unit.
    """
    low, high = column.low, column.high
    word = _UNIT_OF_NAME.search(column.label.lower())
    named = None if word is None else TimeUnit(word.group(1))
    defined = named or column.defined
    rates = {unit: (column.count - 1) * per_s / (high - low) for unit, per_s in PER_S.items() if high > low}
    dated = next((u for u, per_s in PER_S.items() if EPOCH_S <= low / per_s < 10 * EPOCH_S), None)
    if dated is not None and high / PER_S[dated] >= 10 * EPOCH_S:
        rule = f"must not mix units: the first time is a date in {UNIT_WORDS[dated]}, the last one is not"
        raise InputError(rule, high, location)
    if dated is not None and named in (None, dated):
        return dated, "" if named else "since they are dates by their size"
    if dated is None and defined is not None and (named or column.firm):
        return defined, "" if named else f"the unit of format {column.format_name}"
    plausible = [unit for unit, rate in rates.items() if _LEAST_RPS <= rate <= _MOST_RPS]
    # Published traces in seconds have fractions, those in milliseconds have none.
    contradicted = column.whole is (defined is TimeUnit.S)
    if dated is None and defined is not None:
        agrees = defined in plausible or not plausible
        if agrees and (not contradicted or defined is TimeUnit.S or plausible == [defined]):
            return defined, f"the unit of format {column.format_name}"
        other = TimeUnit.MS if defined is TimeUnit.S else TimeUnit.S
        if contradicted and not agrees and other in plausible:
            numbers = "whole numbers" if column.whole else "fractions"
            reason = f"other than in format {column.format_name}, by their rate and since they are {numbers}"
            return other, reason
    elif dated is None and len(plausible) == 1 and (column.whole or plausible == [TimeUnit.S]):
        return plausible[0], "by their rate"
    said = " or ".join(
        f"{rates[unit]:.3g} requests per second in {UNIT_WORDS[unit]}"
        for unit in (TimeUnit.S, TimeUnit.MS)
        if rates
    )
    rule = f"unit is not clear{f', {said}' if said else ''}; state {option}: s, ms, us or ns"
    raise InputError(rule, location=location)
