"""An engine held in a state for some steps: a batch that decodes, now and then a prompt beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from capplan.engine import Engine
from capplan.engine.engine_core import StepOutput
from capplan.engine.request import Request, SamplingParams
from capplan.profiling.engine.points import MIXED, Point
from capplan.profiling.engine.rows import Row, middle, step_row

DECODES: Final = 9
"""Steps of one state without a prompt."""
PROMPTS: Final = 3
"""Prompts that join the batch, one after the other, with a decode between them."""
GROWTH: Final = DECODES + 2 * PROMPTS + 4


class Stepper:
    """Drives one engine, whose clock must be virtual: loads are then no part of the steps beside them.

    Parameters
    ----------
    engine
        With adapters named as in `ranks`.
    ranks
        Adapter to rank.
    seed
        Of the prompts.
    """

    def __init__(self, engine: Engine, ranks: dict[str, int], seed: int) -> None:
        self.engine = engine
        self._ranks = ranks
        self._rank_of = {at: ranks[name] for at, name in enumerate(engine.adapters, start=1)}
        self._rng = np.random.default_rng(seed)
        self._requests: dict[int, Request] = {}
        engine.loop.decisions = []

    def measure(self, point: Point) -> list[Row]:
        """Return the state's rows: decode, with the prompt, and the prompts that the batch began with."""
        names = self._names(point)
        self.bring_in(name for name in names if name is not None)
        batch = [self._ask(point.context, names[at % len(names)], GROWTH) for at in range(point.batch)]
        begun = self._until_decoding(batch)
        self._ask_behind(point, names)
        rows = [row for row in begun if row["decodes"] == 0.0][:1]
        decodes = [self._row(self._step()) for _ in range(DECODES)]
        pure = [row for row in decodes if row["prefills"] == 0.0]
        if pure:
            rows.append(middle(pure))
        rows += self._with_prompts(point, names)
        self._end()
        return rows

    def iteration_ms(
        self, names: Sequence[str], prompt: int, decodes: int, repeats: int
    ) -> tuple[float, float]:
        """Return medians of whole iterations: prefill of one prompt per name, and decode of all of them."""
        self.bring_in(names)
        prefill, decode = [], []
        for _ in range(repeats):
            requests = [self._ask(prompt, name, decodes + 2) for name in names]
            rows = self._until_decoding(requests)
            prefill.append(sum(row["step_ms"] for row in rows))
            decode += [self._row(self._step())["step_ms"] for _ in range(decodes)]
            self._end()
        return float(np.median(prefill)), float(np.median(decode))

    def bring_in(self, names: Iterable[str]) -> None:
        """Have adapters loaded, so that no step waits for one."""
        for name in dict.fromkeys(names):
            request = self._ask(1, name, 1)
            while request.finish_reason is None:
                self._step()
        self._forget()

    def _names(self, point: Point) -> list[str | None]:
        if point.adapters == 0:
            return [None]
        fitting = [name for name, rank in self._ranks.items() if point.rank in (MIXED, rank)]
        if point.rank == MIXED:  # one of each rank in turn
            by_rank = {rank: [n for n in fitting if self._ranks[n] == rank] for rank in self._ranks.values()}
            fitting = [name for turn in zip(*by_rank.values(), strict=True) for name in turn]
        return [fitting[at] for at in range(point.adapters)]

    def _ask(self, prompt: int, name: str | None, output: int) -> Request:
        tokens = self._rng.integers(0, self.engine.config.vocab_size, max(1, prompt)).tolist()
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        request = self.engine.new_request(tokens, name, params)
        self._requests[request.number] = request
        if not self.engine.submit(request):
            raise RuntimeError(f"a request of {prompt} tokens does not fit")
        return request

    def _ask_behind(self, point: Point, names: Sequence[str | None]) -> None:
        """Let requests queue up behind a full batch."""
        for at in range(point.waiting):
            self._ask(point.context, names[at % len(names)], GROWTH)

    def _with_prompts(self, point: Point, names: Sequence[str | None]) -> list[Row]:
        if point.waiting:
            return []
        mixed = []
        for at in range(PROMPTS):
            self._ask(point.prompt, names[at % len(names)], 1)
            row = self._row(self._step())
            if row["prefills"] == 1.0 and row["decodes"] == point.batch:
                mixed.append(row)
            self._step()
        return [middle(mixed)] if mixed else []

    def _until_decoding(self, requests: Sequence[Request]) -> list[Row]:
        rows = []
        while any(not request.output for request in requests):
            rows.append(self._row(self._step()))
        return rows

    def _step(self) -> StepOutput:
        """Run one step, waiting for adapters if need be."""
        while True:
            step = self.engine.step()
            if step is not None and step.record is not None:
                return step
            if step is None and not self.engine.wait_for_adapter():
                raise RuntimeError("requests wait, but nothing can run")

    def _row(self, step: StepOutput) -> Row:
        decisions = self.engine.loop.decisions
        if step.record is None or not decisions:
            raise RuntimeError("a step left no record")
        emitted = {request.number for request in step.emitted}
        return step_row(step.record, decisions[-1], self._requests, emitted, self._rank_of)

    def _end(self) -> None:
        for request in self._requests.values():
            self.engine.abort(request)
        self._forget()

    def _forget(self) -> None:
        self._requests.clear()
        self.engine.records.clear()
        self.engine.loop.decisions = []
