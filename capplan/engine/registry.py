"""The adapters that an engine knows, by name and by number; number 0 is the base model."""

from __future__ import annotations

from capplan.errors import InputError


class Registry:
    """Names and numbers of adapters; numbers of removed ones are given out again.

    Parameters
    ----------
    capacity
        Most adapters at a time, which is the highest number.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._numbers: dict[str, int] = {}
        self._entries = [0] * (capacity + 1)
        self._last_entry = 0

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of their numbers."""
        return tuple(sorted(self._numbers, key=self._numbers.__getitem__))

    def number(self, name: str | None) -> int:
        """Return the number of an adapter; None is the base model.

        Raises
        ------
        InputError
            When there is none of that name.
        """
        if name is None:
            return 0
        if name not in self._numbers:
            raise InputError(f"must be one of {', '.join(self.names) or 'no adapters'}", name, "adapters")
        return self._numbers[name]

    def entry(self, number: int) -> int:
        """Return what tells the adapter that has a number now from those that had it before or will."""
        return self._entries[number]

    def add(self, name: str) -> int:
        """Enter an adapter and return its number, the lowest that is free.

        Raises
        ------
        InputError
            When the name is taken, empty, or no number is free.
        """
        if not name or name in self._numbers:
            raise InputError("must be a name that no adapter has", name, "adapter")
        if len(self._numbers) >= self.capacity:
            raise InputError(f"must not be more than max_adapters, {self.capacity}", name, "adapter")
        taken = set(self._numbers.values())
        number = next(number for number in range(1, self.capacity + 1) if number not in taken)
        self._numbers[name] = number
        self._last_entry += 1
        self._entries[number] = self._last_entry
        return number

    def remove(self, name: str) -> None:
        """Take an adapter out."""
        self._entries[self._numbers.pop(name)] = 0
