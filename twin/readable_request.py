"""What both readable schedulers work on and answer: requests in flight, and what a step does with them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False)
class ReadableRequest:
    """A request in flight; all lengths in tokens."""

    number: int
    adapter: int
    prompt: int
    target: int
    """Output after which it ends."""
    prefix_group: int
    shared_prefix: int
    """How many tokens of the prompt are those that its group starts with."""
    output: int = 0
    computed: int = 0
    """Tokens with valid KV, those of steps still in flight included."""
    promised: int = 0
    """Output tokens of steps whose output has not been processed."""
    running: bool = False
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    """How many of its blocks can be found by others."""

    @property
    def known(self) -> int:
        """Tokens of the prompt and of the output seen so far."""
        return self.prompt + self.output

    @property
    def draining(self) -> bool:
        """Its last token is on its way, so that it needs no further step."""
        return self.computed == self.prompt + self.target - 1

    def key(self, block: int, block_size: int) -> Hashable:
        """Return what stands for the content of a full block and of all blocks before it.

        Output behind a prompt that is nothing but shared prefix is the same for all who have that prompt.
        """
        if (block + 1) * block_size <= self.shared_prefix:
            return self.adapter, self.prefix_group, block
        if self.shared_prefix < self.prompt:
            return "own", self.number, block
        return self.adapter, self.prefix_group, self.prompt, block


class ReadableStep(NamedTuple):
    """What one step does, requests by their number."""

    tokens: list[tuple[int, int]]
    """(request, tokens) in the order in which they were scheduled."""
    admitted: list[int]
    """The last of them: those that were waiting."""
    preempted: list[int]
    loads: list[tuple[int, bool]]
    """(adapter, from disk)"""
    free_blocks: int
    """After scheduling."""


class ReadableOutput(NamedTuple):
    """What one step computes, requests by their number."""

    first: list[int]
    """Requests whose first token it is."""
    later: list[int]
    """Requests that get another one."""
    finished: list[int]
    """Those of both that need no more; in asynchronous scheduling they hold their blocks one step longer."""
