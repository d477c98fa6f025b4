"""Releases of an engine that share their serving rules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from capplan.errors import InputError

_VERSION: Final = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:[^\d.].*|\..*)?")


@dataclass(frozen=True)
class Releases:
    """Releases from `first` to `last`, later patches of `last` included."""

    first: str
    last: str

    def __str__(self) -> str:
        minor = ".".join(map(str, _numbers(self.last)[:2]))
        return self.first if self.first == self.last else f"{self.first} to {minor}"

    def cover(self, version: str) -> bool:
        """Return whether a version is among them; one without a patch number if any patch of it is."""
        return not (self.follow(version) or self.precede(version))

    def follow(self, version: str) -> bool:
        """Return whether all of them are later than a version."""
        numbers = _numbers(version)
        return _numbers(self.first)[: len(numbers)] > numbers

    def precede(self, version: str) -> bool:
        """Return whether all of them are earlier than a version."""
        return _numbers(self.last)[:2] < _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as 0.8.5.post1, without its suffix.

    Raises
    ------
    InputError
        If it does not begin with two numbers.
    """
    found = _VERSION.fullmatch(version)
    if found is None:
        raise InputError("must be a version such as 0.11.0", version, "engine_version")
    return tuple(int(number) for number in found.groups() if number is not None)
