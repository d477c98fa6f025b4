"""Names for the beginnings that prompts share, as the scheduler's prefix cache wants them.

The scheduler never sees tokens: it is told that the first so many tokens of a prompt are those of prefix
number so-and-so. Equal numbers are given to equal tokens of one adapter only.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

_MOST_NAMES = 2**20


class Prefixes:
    """Numbers of the prefixes of one length seen lately."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0
        self._renewals: dict[int, int] = {}

    def of(self, prompt: NDArray[np.int32], adapter: int) -> tuple[int, int]:
        """Return (number, shared tokens) of a prompt; shared tokens are 0 where it shares nothing.

        A prompt that is nothing but prefix keeps its last token to itself: what follows such a prompt would
        count as the same for all who ask it, which sampling does not promise.
        """
        if self._tokens == 0 or prompt.size < self._tokens:
            return 0, 0
        digest = hashlib.blake2b(prompt[: self._tokens].tobytes(), digest_size=16)
        digest.update(b"%d %d" % (adapter, self._renewals.get(adapter, 0)))
        return self._number(digest.digest()), min(self._tokens, prompt.size - 1)

    def _number(self, name: bytes) -> int:
        """Return a name's number; one that was not asked for in a long time gets a new one."""
        number = self._numbers.get(name)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[name] = number
            if len(self._numbers) > _MOST_NAMES:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(name)
        return number

    def renew(self, adapter: int) -> None:
        """Give new numbers from now on: what is cached under this adapter's number is of no use any more."""
        self._renewals[adapter] = self._renewals.get(adapter, 0) + 1
