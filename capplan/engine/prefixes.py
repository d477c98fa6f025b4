"""Names for the beginnings that prompts share, as the scheduler's prefix cache wants them.

The scheduler never sees tokens: it is told that the first so many tokens of a prompt are those of prefix
number so-and-so. Equal numbers are given to equal tokens of one adapter only.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_MOST_NAMES = 2**20


class Prefixes:
    """Numbers of the prefixes of one length seen so far."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._numbers: dict[bytes, int] = {}
        self._renewals: dict[int, int] = {}

    def of(self, prompt: NDArray[np.int32], adapter: int) -> tuple[int, int]:
        """Return (number, shared tokens) of a prompt; shared tokens are 0 where it shares nothing.

        A prompt that is nothing but prefix keeps its last token to itself: what follows such a prompt would
        count as the same for all who ask it, which sampling does not promise.
        """
        if self._tokens == 0 or prompt.size < self._tokens or len(self._numbers) >= _MOST_NAMES:
            return 0, 0
        digest = hashlib.blake2b(prompt[: self._tokens].tobytes(), digest_size=16)
        digest.update(b"%d %d" % (adapter, self._renewals.get(adapter, 0)))
        number = self._numbers.setdefault(digest.digest(), len(self._numbers))
        return number, min(self._tokens, prompt.size - 1)

    def renew(self, adapter: int) -> None:
        """Give new numbers from now on: what is cached under this adapter's number is of no use any more."""
        self._renewals[adapter] = self._renewals.get(adapter, 0) + 1
