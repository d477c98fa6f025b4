"""Reference implementation of queues by request size: requests and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from capplan.serving.pooled._state import DEGREE_1, DEGREE_2, OUTPUT_ONLY
from capplan.spec import Wrs
from tests.oracle.scheduler import ReferenceRequest

_FORMS = {"degree2": DEGREE_2, "degree1": DEGREE_1, "output_only": OUTPUT_ONLY}


@dataclass(eq=False)
class PooledRequest(ReferenceRequest):
    """A request in flight under these rules."""

    arrival: int = 0
    """Its place in the order of arrival."""
    arrival_ns: int = 0
    predicted: int = 0
    """Predicted output tokens."""
    predicted_at_first: int = 0
    """The same at its arrival."""
    queue: int = 0
    admission: int = 0
    """Its place in the order of admission."""
    admitted_ns: int | None = None
    """First admission."""
    execution_ns: int = -1
    """From that to its end; -1: unknown."""
    charge: int = 0
    book: list[int] = field(default_factory=list)
    """Running: its charge by queue."""
    reserved: int = 0
    """Running: reserved blocks."""
    bypassed: PooledRequest | None = None
    """Running: the request that it overtook because of memory."""
    squashed: bool = False
    is_decoding: bool = False
    """Running: whether its known sequence was complete in an earlier step."""


@dataclass
class SizeQueues:
    """Size of a request, and the queues by size."""

    quotas: list[int]
    cuts: list[float]
    """Sizes between the queues, ascending."""
    prompt_weight: float = 0.4
    output_weight: float = 0.6
    form: int = DEGREE_2
    max_prompt: int = 1
    max_output: int = 1
    max_bytes: int = 1

    def size(self, prompt: int, predicted: int, size_bytes: int) -> float:
        """Return the weighted request size."""
        prompt_part = min(prompt / self.max_prompt, 1.0)
        output_part = min(predicted / self.max_output, 1.0)
        adapter_part = min(size_bytes / self.max_bytes, 1.0)
        lengths = self.prompt_weight * prompt_part + self.output_weight * output_part
        if self.form == OUTPUT_ONLY:
            return lengths
        return lengths * adapter_part if self.form == DEGREE_2 else (lengths + adapter_part) / 2

    def queue_of(self, size: float) -> int:
        """Return the queue of a size."""
        return sum(cut <= size for cut in self.cuts)

    @classmethod
    def of(cls, wrs: Wrs, cuts: Sequence[float], quotas: Sequence[int]) -> SizeQueues:
        """Return the queues of a design."""
        return cls(
            quotas=list(quotas),
            cuts=list(cuts),
            prompt_weight=wrs.a,
            output_weight=wrs.b,
            form=_FORMS[wrs.form],
            max_prompt=wrs.max_prompt_tokens,
            max_output=wrs.max_output_tokens,
            max_bytes=wrs.max_adapter_bytes,
        )
