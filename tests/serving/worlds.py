"""Small random engines and requests with tight limits, and their replay."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from capplan.serving import Limits, State, adapter_loaded, commit, new_state, schedule, submit
from capplan.serving import state as s
from capplan.serving.state import SLORA, VLLM
from capplan.testing._integrity import running_rows

Choose = Callable[[int, int], int]
"""Returns a whole number between two bounds, both included."""


class Request(NamedTuple):
    """`step` is the first step that may see it."""

    step: int
    adapter: int
    prompt: int
    output: int
    prefix: int = 0
    shared: int = 0


@dataclass(frozen=True)
class World:
    """An engine and its requests."""

    limits: Limits
    num_blocks: int
    adapters: int
    requests: tuple[Request, ...]
    pages: tuple[int, ...] = ()

    def new_state(self, rows: int | None = None) -> State:
        """Return the empty engine."""
        state = new_state(rows or max(1, len(self.requests)), self.adapters, self.num_blocks, self.limits)
        state.adapters.pages[1 : 1 + len(self.pages)] = self.pages
        return state

    def fits(self, request: Request) -> bool:
        """Tell whether the engine can ever serve this request."""
        limits = self.limits
        if limits.policy != SLORA or request.prompt >= limits.max_model_len:
            return request.prompt < limits.max_model_len
        tokens = request.prompt + min(request.output, limits.max_model_len - request.prompt)
        pages = self.pages[request.adapter - 1] if request.adapter else 0
        room = (self.num_blocks - pages) * limits.block_size
        return request.prompt <= limits.max_num_batched_tokens and tokens + limits.block_size - 1 < room


def make_world(choose: Choose, max_requests: int = 24) -> World:
    """Return a world; one request of max_model_len always fits, as every engine requires at start-up."""
    adapters = choose(1, 6)
    max_loras = choose(1, 4)
    block_size = choose(1, 5)
    num_blocks = choose(1, 32)
    limits = Limits(
        max_num_seqs=choose(1, 9),
        max_num_batched_tokens=choose(1, 4) if choose(0, 1) else choose(5, 24),
        max_model_len=choose(max(2, num_blocks * block_size // 2), max(2, num_blocks * block_size)),
        max_loras=max_loras,
        max_cpu_loras=choose(max_loras, 7),
        block_size=block_size,
        watermark_blocks=choose(-4, 2),
        long_prefill_tokens=choose(-4, 4),
        reserve_full_sequence=choose(0, 1),
        reverse_skipped=choose(0, 1),
        lone_prefill_exempt=choose(0, 1),
        async_scheduling=choose(0, 1),
        prefix_caching=choose(0, 1),
        unhashed_to_front=choose(0, 1),
        load_beside=int(choose(0, 3) == 0),
        policy=SLORA if choose(0, 5) == 0 else VLLM,
    )
    if limits.load_beside:
        limits = limits._replace(reverse_skipped=0)
    if limits.policy == SLORA:  # no slots, no cached prefixes, one batch at a time
        limits = limits._replace(max_loras=adapters, prefix_caching=0, async_scheduling=0, load_beside=0)
        limits = limits._replace(max_cpu_loras=max(adapters, limits.max_cpu_loras))
        limits = limits._replace(admit_every=choose(1, 12))
    # Half of all worlds go without a watermark or a prefill limit, as most engines do.
    limits = limits._replace(
        watermark_blocks=max(0, limits.watermark_blocks),
        long_prefill_tokens=max(0, limits.long_prefill_tokens),
    )
    step = 0
    requests = []
    for _ in range(choose(0, max_requests)):
        step += choose(-3, 3) if choose(0, 3) else 0
        step = max(step, requests[-1].step if requests else 0)
        requests.append(
            Request(
                step,
                choose(0, adapters),
                choose(1, min(24, limits.max_model_len + 1)),
                choose(1, 18),
                choose(0, 1),
                choose(0, 20),
            )
        )
    blocks_of_one = -(-limits.max_model_len // block_size)
    pages = tuple(choose(0, 4) for _ in range(adapters)) if limits.policy == SLORA else ()
    limits = limits._replace(hold_ending=choose(0, 1))
    return World(limits, max(num_blocks, blocks_of_one), adapters, tuple(requests), pages)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Return a strategy of worlds."""
    return make_world(lambda low, high: draw(st.integers(low, high)))


def seeded(seed: int) -> Choose:
    """Return a chooser that needs no hypothesis."""
    rng = np.random.default_rng(seed)
    return lambda low, high: int(rng.integers(low, high + 1))


class Decision(NamedTuple):
    """One step, requests by their number."""

    tokens: list[tuple[int, int]]
    """(request, tokens) in running order, those without a token left out."""
    preempted: list[int]
    loads: list[tuple[int, bool]]
    first: list[int]
    finished: list[int]
    free_blocks: int
    """After scheduling, before anything finished."""


def play(world: World, max_steps: int = 4000) -> Iterator[tuple[State, Decision]]:
    """Run a world to its end; yields after every commit."""
    state, limits = world.new_state(), world.limits
    c = state.counters
    upcoming = 0
    for step in range(max_steps):
        while upcoming < len(world.requests) and world.requests[upcoming].step <= step:
            request = world.requests[upcoming]
            submit(state, limits, upcoming, *request[1:])
            upcoming += 1
        for adapter in np.flatnonzero(state.adapters.claim == s.LOADING):
            if step % 3 == 0:  # some loads take a few steps
                adapter_loaded(state, adapter)
        total = schedule(state, limits)
        tokens = scheduled(state)
        assert sum(n for _, n in tokens) == total
        preempted, loads, free = (
            _requests(state, "preempted"),
            _loads(state),
            c.free_blocks,
        )
        commit(state, limits)
        first = _requests(state, "first")
        finished = _requests(state, "finished")
        yield state, Decision(tokens, preempted, loads, first, finished, int(free))
        if upcoming == len(world.requests) and c.n_running + c.n_waiting == 0:
            return
    raise AssertionError(f"{world} does not come to an end")


def scheduled(state: State) -> list[tuple[int, int]]:
    """Return (request, tokens) in running order between `schedule` and `commit`."""
    tokens = [(int(state.rows.request[row]), _tokens(state, row)) for row in running_rows(state)]
    return [(request, n) for request, n in tokens if n]


def _tokens(state: State, row: int) -> int:
    if state.rows.since[row] == s.ENDING:
        return 0
    if state.rows.since[row] >= 0:
        return int(state.counters.step_decodes > 0)
    return int(state.rows.tokens[row])


def _requests(state: State, kind: str) -> list[int]:
    rows = state.lists[kind][: state.counters[f"n_{kind}"]]
    return [int(state.rows.request[row]) for row in rows]


def _loads(state: State) -> list[tuple[int, bool]]:
    n = state.counters.n_loads
    pairs = zip(state.adapters.loads[:n].tolist(), state.adapters.load_from_disk[:n].tolist(), strict=True)
    return [(adapter, bool(disk)) for adapter, disk in pairs]
