"""Replay of recorded cases through our forms of the rules, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from capplan.serving import NONE, Limits, State, commit, new_state, schedule, submit
from tests.golden.cases import Case, Step, limits_of, usable_blocks
from tests.oracle.scheduler import ReferenceScheduler
from tests.serving.worlds import scheduled

Decided = tuple[list[tuple[int, int]], list[int], int]
"""(request, tokens) as scheduled, preempted requests, free blocks after scheduling."""


class Difference(NamedTuple):
    """Where a replay leaves the recording."""

    case: str
    step: int
    expected: Decided
    found: Decided


class Form(Protocol):
    """One form of the rules, made for one case."""

    def submit(self, request: int, row: list[int]) -> None:
        """Queue a request of the workload."""

    def step(self) -> Decided:
        """Schedule a step, note it, and process the output that arrives."""


class FlatForm:
    """The functions over flat arrays that twin and engine call; compiled or not is numba's setting.

    `check` is called with state, limits and number of blocks after every step.
    """

    def __init__(self, case: Case, check: Callable[[State, Limits, int], None] | None = None) -> None:
        self.limits = limits_of(case)
        self.blocks = usable_blocks(case.config)
        adapters = max(row[3] for row in case.workload)
        self.state = new_state(len(case.workload), adapters, self.blocks, self.limits)
        self.check = check

    def submit(self, request: int, row: list[int]) -> None:
        _, prompt, output, adapter, group, shared = row
        if submit(self.state, self.limits, request, adapter, prompt, output, group, shared) == NONE:
            raise AssertionError(f"request {request} was turned away")

    def step(self) -> Decided:
        state, c = self.state, self.state.counters
        total = int(schedule(state, self.limits))
        tokens = scheduled(state)
        assert sum(n for _, n in tokens) == total == c.step_tokens
        preempted = [int(state.rows.request[row]) for row in state.lists.preempted[: c.n_preempted]]
        free_blocks = int(c.free_blocks)
        commit(state, self.limits)
        if self.check:
            self.check(state, self.limits, self.blocks)
        return tokens, sorted(preempted), free_blocks


class ReferenceForm:
    """The reference implementation of the rules."""

    def __init__(self, case: Case) -> None:
        adapters = max(row[3] for row in case.workload)
        self.scheduler = ReferenceScheduler(limits_of(case), usable_blocks(case.config), adapters)

    def submit(self, request: int, row: list[int]) -> None:
        _, prompt, output, adapter, group, shared = row
        if not self.scheduler.submit(request, adapter, prompt, output, group, shared):
            raise AssertionError(f"request {request} was turned away")

    def step(self) -> Decided:
        step = self.scheduler.schedule()
        self.scheduler.commit()
        return step.tokens, sorted(step.preempted), step.free_blocks


def first_difference(case: Case, form: Form) -> tuple[int, Difference | None]:
    """Replay a case to its end or to the first step that differs; return the steps taken, and that step."""
    upcoming = deque(sorted(range(len(case.workload)), key=lambda number: (case.workload[number][0], number)))
    for taken, step in enumerate(case.steps, start=1):
        while upcoming and case.workload[upcoming[0]][0] <= step.number:
            number = upcoming.popleft()
            form.submit(number, case.workload[number])
        expected, found = _decided(step), form.step()
        if expected != found:
            return taken, Difference(case.name, step.number, expected, found)
    return len(case.steps), None


def _decided(step: Step) -> Decided:
    return step.tokens, step.preempted, step.free_blocks
