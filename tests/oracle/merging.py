"""Reference of merging: which adapter is merged in a step, by dLoRA's thresholds.

Source: dLoRA-artifact 75f1c43, ``vllm/core/scheduler.py``, without its credits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from capplan.serving import Limits


class Merging:
    """The merged adapter and its history."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.adapter: int | None = None
        self.high, self.low = 1.0, limits.merged_ns / max(1, limits.unmerged_ns)
        self.switches = 0
        """Changes of weights before this step."""
        self.history: list[tuple[int, int, int | None]] = []
        """Of each step since the last switch: requests of a merged batch, of any, and the largest adapter."""

    def serves(self, adapter: int) -> bool:
        """Return whether the step may serve an adapter."""
        return self.adapter in (None, adapter)

    def choose(self, adapters: Sequence[int]) -> None:
        """Choose what is merged, given the adapter of each request in flight."""
        self.switches = 0
        if not self.limits.merged_ns or not adapters:
            return
        most = self.limits.max_num_seqs
        requests, batch = Counter(adapters), min(len(adapters), most)
        largest = min(requests, key=lambda adapter: (-requests[adapter], adapter))
        if self.adapter is not None and requests[self.adapter] >= self.low * batch:
            chosen: int | None = self.adapter
        else:
            chosen = largest if requests[largest] >= self.high * batch else None
        ends = chosen is None and self.adapter is not None
        if chosen not in (None, self.adapter):
            self.switch(chosen)
        served = requests[largest if chosen is None else chosen]
        self.history.append((min(served, most), batch, None if self.adapter is not None else largest))
        if ends:
            # The step that ends a merge counts among its requests, and its time among the next ones.
            self.end(len(self.history) - 1)

    def end(self, steps: int | None = None) -> None:
        """Serve all adapters from this step on; `steps`: those of the merge, or all."""
        self.switch(None, steps)
        self.history = [(0, 0, None)]

    def switch(self, adapter: int | None, steps: int | None = None) -> None:
        """Merge another adapter or none, and move the threshold by what happened since the last switch."""
        steps = len(self.history) if steps is None else steps
        if steps:
            self._move(steps)
        self.history = []
        self.switches += (self.adapter is not None) + (adapter is not None)
        self.adapter = adapter

    def _move(self, steps: int) -> None:
        limits, is_merged = self.limits, self.adapter is not None
        largest = [adapter for _, _, adapter in self.history if adapter is not None]
        changes = sum(a != b for a, b in zip(largest, [None, *largest], strict=False))
        merged_ns = limits.merged_ns * steps + limits.switch_ns * (1 if is_merged else changes)
        unmerged_ns = limits.unmerged_ns * steps + limits.switch_ns * (not is_merged)
        merged = sum(merged for merged, _, _ in self.history) / merged_ns
        unmerged = sum(unmerged for _, unmerged, _ in self.history) / unmerged_ns
        if is_merged and merged > unmerged and self.high - 0.05 > self.low:
            self.high -= 0.05
        elif is_merged and merged < unmerged:
            self.high *= 1.1
        elif not is_merged and unmerged > merged and self.low + 0.05 < self.high:
            self.low += 0.05
        elif not is_merged and unmerged < merged:
            self.low /= 1.1
