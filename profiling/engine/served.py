"""Step times of the engine behind its server.

Streams over HTTP keep operating points up; the server records its steps. Its processes and their CPUs are
those of `capplan serve`, and the client keeps off the CPUs of the engine core, as in a load test.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from capplan.profiling.engine.memory import BLOCK_TOKENS
from capplan.profiling.engine.options import EngineProfilingOptions, SlotSetting
from capplan.profiling.engine.stepping import COUNTS, PHASES
from capplan.profiling.load.preflight import beside_engine, preflight
from capplan.profiling.load.record import FINISHED
from capplan.profiling.load.requests import BASE, Target
from capplan.profiling.server.closed_loop import (
    LoopError,
    RequestSender,
    ServerBounds,
    ServerPoint,
    closed_loop,
    design,
    first_tokens,
    open_sender,
)
from capplan.profiling.server.process import ServerCommand, engine_words, running_server
from capplan.profiling.tables import OUTPUT_TOKENS

_RAMP_SHARE: Final = 0.3
_PAUSE_S: Final = 0.3
_GROUPS: Final = 3
"""Groups of steps with prompts, by prompt tokens."""
_LEAST_STEPS: Final = 4
_IDLE_PROMPTS: Final = (16, 128)
_IDLE_REPEATS: Final = 15
_TYPICAL_TOKENS: Final = 64
"""Typical prompt and output of the operating points, for a long context."""
_LONGEST_OVER_TYPICAL: Final = 8
"""The longest prompts of a design are four times the typical one and fill half of a short context."""


class Window(NamedTuple):
    """Measured interval of a point on the client's clock, and its load."""

    name: str
    start_s: float
    end_s: float
    streams: float
    """Requests in flight."""
    rate_rps: float
    """Requests that ended per second."""


@dataclass
class ServedSteps:
    """Rows measured at one engine setting."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    idle: list[dict[str, float]] = field(default_factory=list)
    """First tokens of the idle server, a row per prompt length."""
    failed: list[str] = field(default_factory=list)
    """Points without rows, with the reason."""


def serve_and_measure(
    options: EngineProfilingOptions,
    slots: SlotSetting,
    kv_blocks: int,
    budget_s: float,
    folder: Path,
    done: Callable[[int, int], None],
) -> ServedSteps:
    """Start a server and measure its steps at operating points, as rows of a step table."""
    typical = min(_TYPICAL_TOKENS, options.max_model_len // _LONGEST_OVER_TYPICAL)
    bounds = ServerBounds(
        adapters=slots.a_max,
        a_max=slots.a_max,
        max_streams=options.max_num_seqs,
        longest=options.max_model_len,
        kv_tokens=kv_blocks * BLOCK_TOKENS,
        prompt_tokens=typical,
        output_tokens=typical,
    )
    points = design(bounds)[: max(1, int(budget_s / options.point_s))]
    records = folder / f".records-{slots.name}.parquet"
    client = _Client(options, slots)
    try:
        with running_server(_server_command(options, slots, kv_blocks, records)) as url:
            last_s = asyncio.run(client.measure(Target(url, base_model=options.model), points, done))
        if last_s is not None:
            client.found.steps = _rows(records, client.windows, last_s)
    finally:
        records.unlink(missing_ok=True)
    return client.found


def _server_command(
    options: EngineProfilingOptions, slots: SlotSetting, kv_blocks: int, records: Path
) -> ServerCommand:
    more = {
        "--dtype": options.dtype,
        "--device": options.device,
        "--rules": options.rules,
        "--seed": options.seed,
        "--num-kv-blocks": None if options.on_gpu else kv_blocks,
        "--lora-kernel": options.lora_kernel,
        "--cpu-affinity": options.cpu_affinity,
    }
    flags = engine_words(options.engine_args(slots), more)
    return ServerCommand(options.model, options.adapters(slots), flags, options.threads, records)


class _Client:
    """Closed-loop client of one server."""

    def __init__(self, options: EngineProfilingOptions, slots: SlotSetting) -> None:
        self.found = ServedSteps()
        self.windows: list[Window] = []
        self._options, self._slots = options, slots
        longest = options.max_model_len - OUTPUT_TOKENS
        self._idle_prompts = sorted({min(tokens, longest) for tokens in _IDLE_PROMPTS})

    async def measure(
        self, target: Target, points: Sequence[ServerPoint], done: Callable[[int, int], None]
    ) -> float | None:
        """Measure points; return the time of the engine's last step, or None if it is unknown."""
        names = [BASE, *self._options.adapters(self._slots)]
        found = await preflight(target, names)
        async with beside_engine(target), open_sender(target, found, names, names) as sender:
            try:
                self.found.idle = await first_tokens(
                    sender, [1], self._idle_prompts, _IDLE_REPEATS, lambda: None
                )
            except LoopError as error:
                self.found.failed.append(f"first tokens: {error}")
            last_s = None
            for number, point in enumerate(points):
                done(number, len(points))
                last_s = await self._point(sender, point, number)
            done(len(points), len(points))
            if last_s is not None or not self.windows:
                return last_s
            # The last step of a failed point has no known time, that of one more request does.
            outcome = (await sender.send(0, self._idle_prompts[0], OUTPUT_TOKENS)).outcome
            return outcome.times_s[0] if outcome.kind == FINISHED else None

    async def _point(self, sender: RequestSender, point: ServerPoint, number: int) -> float | None:
        """Measure a point; return the end of its window, at which its streams are cancelled."""
        models, point_s = self._models(point, number), self._options.point_s
        ramp_s = _RAMP_SHARE * point_s
        seed = self._options.seed + number
        try:
            done, start_s, end_s = await closed_loop(sender, point, models, ramp_s, point_s - ramp_s, seed)
        except LoopError as error:
            self.found.failed.append(f"{point.name}: {error}")
            return None
        ended = sum(start_s <= each.outcome.ended_s < end_s for each in done)
        rate_rps = ended / (end_s - start_s)
        self.windows.append(Window(point.name, start_s, end_s, float(point.streams), rate_rps))
        return end_s

    def _models(self, point: ServerPoint, number: int) -> list[int]:
        """Return adapters of one rank or, in turn, of all ranks; the base model without adapters."""
        if point.adapters == 0:
            return [0]
        a_max, ranks = self._slots.a_max, len(self._options.fitting(self._slots.s_max))
        chosen = number % (ranks + 1) if ranks > 1 else 0
        if chosen == ranks:
            return [1 + at % ranks * a_max + at // ranks for at in range(point.adapters)]
        return [1 + chosen * a_max + at for at in range(point.adapters)]


def _rows(records: Path, windows: Sequence[Window], last_s: float) -> list[dict[str, Any]]:
    """Return the rows of all windows.

    The last record gives the offset of the engine's clock from the client's: it is the step before the
    streams were cancelled at the end of the last window, or that of a first token.
    """
    import pandas as pd

    table = recorded_rows(pd.read_parquet(records), _PAUSE_S)
    offset_ms = float(table["begin_ms"].iloc[-1]) - 1e3 * last_s
    found: list[dict[str, Any]] = []
    for window in windows:
        start, end = (1e3 * at + offset_ms for at in (window.start_s, window.end_s))
        own = table[(table["begin_ms"] >= start) & (table["begin_ms"] < end)]
        load = {"streams": window.streams, "rate_rps": window.rate_rps}
        probe = {"probe_ms": float(own["probe_ms"].mean())}  # of the window, since a part of it has few
        found += [{"run": window.name, **load, **row, **probe} for row in grouped(own)]
    return found


def recorded_rows(records: Any, pause_s: float) -> Any:
    """Return rows of a step table from a server's records, a row per step.

    The step time is the interval between the starts of two steps, so it includes waiting for other threads.
    Steps before a pause, and steps after which nothing runs, are left out.
    """
    import pandas as pd

    records = records.astype(np.float64)
    begin_ms = records["begin_ns"] * 1e-6
    decodes, prefills = records["decode_requests"], records["prefill_requests"]
    mean_rank = records["rank_sum"] / (decodes + prefills).clip(lower=1.0)
    lora = (mean_rank > 0.0).astype(float)
    step_ms = np.append(np.diff(begin_ms), np.inf)
    rows = pd.DataFrame(
        {
            "begin_ms": begin_ms,
            "step_ms": step_ms,
            **{name: records[name] for name in COUNTS},
            "load_ms": 0.0,
            "decodes": decodes,
            "prefills": prefills,
            "lora_decodes": decodes * lora,
            "lora_prefills": prefills * lora,
            "lora_prefill_tokens": records["prefill_tokens"] * lora,
            "max_rank": records["max_rank"],
            "decode_rank_sum": decodes * mean_rank,
            "prefill_rank_sum": prefills * mean_rank,
            "prefill_rank_tokens": records["prefill_tokens"] * mean_rank,
            "prefill_mpairs": records["prefill_pairs"] * 1e-6,
            **{name: records[name] for name in PHASES},
            "probe_ms": records["probe_ms"].replace(0.0, np.nan),
        }
    )
    goes_on = records["requests"] + records["waiting"] > records["finished"]
    keep = goes_on & (step_ms < pause_s * 1e3) & (records["loads"] == 0)
    return rows[keep].reset_index(drop=True)


def grouped(steps: Any) -> list[dict[str, float]]:
    """Return mean rows of similar steps: without prompts, and grouped by prompt tokens."""
    prompts = steps["prefills"] > 0
    parts = [steps[~prompts]]
    with_prompts = steps[prompts].sort_values("tokens")
    if len(with_prompts):
        edges = np.linspace(0, len(with_prompts), _GROUPS + 1).astype(int).tolist()
        parts += [with_prompts.iloc[low:high] for low, high in itertools.pairwise(edges)]
    columns = [name for name in steps.columns if name != "begin_ms"]
    return [
        {**{name: float(part[name].mean()) for name in columns}, "seen": float(len(part))}
        for part in parts
        if len(part) >= _LEAST_STEPS
    ]
