"""Limits of what files may name and simulations may cover, against mistakes and hostile files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from capplan.errors import InputError

MAX_SIMULATED_S: Final = 2e9  # 63 years; 2^62 nanoseconds, 146 years, stand for never in the twin
LEAST_S: Final = 1e-9  # the clock counts nanoseconds
MAX_SEEDS: Final = 1000  # the standard error of the mean over them is 3 % of the standard deviation


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """Limits of one process; each is an option of `capplan`, before the name of the command.

    Attributes
    ----------
    max_adapters : int
        Adapters of a workload file; a million takes some GiB.
    max_instances : int
        Instances of a plan.
    max_duration_s : float
        Simulated time, in seconds, up to `MAX_SIMULATED_S`; the default is a leap year.
    max_trace_rows : int
        Requests of a trace; each takes 20 bytes.
    """

    max_adapters: int = 1_000_000
    max_instances: int = 10_000
    max_duration_s: float = 366 * 86_400.0
    max_trace_rows: int = 100_000_000

    def __post_init__(self) -> None:
        for name in ("max_adapters", "max_instances", "max_trace_rows"):
            if getattr(self, name) < 1:
                raise InputError("must be a whole number >= 1", getattr(self, name), name)
        if not 0 < self.max_duration_s <= MAX_SIMULATED_S:
            rule = f"must be a number of seconds above 0, at most {MAX_SIMULATED_S:g}"
            raise InputError(rule, self.max_duration_s, "max_duration_s")


_DEFAULTS: Final = InputLimits()
_LIMITS: Final = ContextVar("input_limits", default=_DEFAULTS)


def input_limits() -> InputLimits:
    """Return the limits in force."""
    return _LIMITS.get()


@contextmanager
def limited(limits: InputLimits) -> Iterator[None]:
    """Put limits in force until the end of the block."""
    before = _LIMITS.set(limits)
    try:
        yield
    finally:
        _LIMITS.reset(before)


def beyond(most: float, what: str, flag: str) -> str:
    """Return the rule that more of something than a limit breaks, with the option that raises it."""
    return f"must be at most {most:,.15g} {what}; capplan {flag} sets another limit"


def require_seed_count(count: int, location: str) -> None:
    """Check a number of seeds.

    Raises
    ------
    InputError
        Unless it is from 1 to `MAX_SEEDS`.
    """
    if count < 1:
        raise InputError("must be >= 1", count, location)
    if count > MAX_SEEDS:
        raise InputError(f"must be at most {MAX_SEEDS}", count, location)


def require_duration(duration_s: float, location: str = "duration_s") -> None:
    """Check a simulated time, in seconds.

    Raises
    ------
    InputError
        Unless it is above 0 and within the limit.
    """
    most_s = input_limits().max_duration_s
    if not 0 < duration_s < float("inf"):
        raise InputError("must be a finite number > 0", duration_s, location)
    if duration_s < LEAST_S:
        raise InputError(f"must be at least {LEAST_S:g} seconds, the unit of the clock", duration_s, location)
    if duration_s > most_s:
        raise InputError(beyond(most_s, "seconds", "--max-duration-s"), duration_s, location)
