"""Step times of the engine behind its server.

They exceed those of the bare engine, since a thread of the same process writes the answers. Streams over HTTP
keep operating points up; the server records its steps.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from capplan.profiling.engine.memory import BLOCK_TOKENS
from capplan.profiling.engine.options import EngineProfilingOptions
from capplan.profiling.engine.stepping import HOST_PHASES
from capplan.profiling.load.client import CompletionClient, open_session
from capplan.profiling.load.preflight import bodies_for, preflight
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
)
from capplan.profiling.server.process import ServerCommand, engine_words, running_server
from capplan.profiling.tables import OUTPUT_TOKENS

_TIMEOUT_S: Final = 120.0
_RAMP_SHARE: Final = 0.3
_PAUSE_S: Final = 0.3
_GROUPS: Final = 3
"""Groups of steps with prompts, by prompt tokens."""
_LEAST_STEPS: Final = 4
_IDLE_PROMPTS: Final = (16, 128)
_IDLE_REPEATS: Final = 15


@dataclass(frozen=True)
class PointWindow:
    """Measured interval of an operating point on the client's clock."""

    point: ServerPoint
    start_s: float
    end_s: float


@dataclass(frozen=True)
class ServedSteps:
    """Rows measured at one engine setting."""

    steps: list[dict[str, Any]]
    idle: list[dict[str, float]]
    """First tokens of the idle server, a row per prompt length."""
    failed: tuple[str, ...] = ()
    """Points without rows, with the reason."""


def serve_and_measure(
    options: EngineProfilingOptions,
    a_max: int,
    s_max: int,
    kv_blocks: int,
    budget_s: float,
    folder: Path,
    done: Callable[[int, int], None],
) -> ServedSteps:
    """Start a server and measure its steps at operating points, as rows of a step table."""
    adapters = options.adapters(a_max, s_max)
    records = folder / f".records-a{a_max}-s{s_max}.parquet"
    command = _server_command(options, a_max, s_max, kv_blocks, records)
    bounds = ServerBounds(
        adapters=a_max,
        a_max=a_max,
        max_streams=options.max_num_seqs,
        longest=options.max_model_len,
        kv_tokens=kv_blocks * BLOCK_TOKENS,
        prompt_tokens=min(64, options.max_model_len // 16),
        output_tokens=min(64, options.max_model_len // 16),
    )
    points = design(bounds)[: max(1, int(budget_s / options.point_s))]
    try:
        with running_server(command) as url:
            target = Target(url, base_model=options.model)
            client = _Client(target, adapters, options.fitting(s_max), options.max_model_len)
            last_s = asyncio.run(client.measure(points, options.point_s, options.seed, done))
        rows = [] if last_s is None else _rows(records, client.windows, last_s)
        return ServedSteps(rows, client.idle, tuple(client.failed))
    finally:
        records.unlink(missing_ok=True)


def _server_command(
    options: EngineProfilingOptions, a_max: int, s_max: int, kv_blocks: int, records: Path
) -> ServerCommand:
    more = {
        "--dtype": options.dtype,
        "--device": options.device,
        "--rules": options.rules,
        "--seed": options.seed,
        "--num-kv-blocks": None if options.on_gpu else kv_blocks,
        "--lora-kernel": options.lora_kernel,
    }
    flags = engine_words(options.engine_args(a_max, s_max), more)
    return ServerCommand(options.model, options.adapters(a_max, s_max), flags, options.threads, records)


class _Client:
    """Closed-loop client of one server."""

    def __init__(
        self, target: Target, adapters: dict[str, int], ranks: tuple[int, ...], longest: int
    ) -> None:
        self.windows: list[PointWindow] = []
        self.idle: list[dict[str, float]] = []
        self.failed: list[str] = []
        self._target = target
        self._idle_prompts = sorted({min(tokens, longest - OUTPUT_TOKENS) for tokens in _IDLE_PROMPTS})
        self._names = [BASE, *adapters]
        self._pools = [
            [at for at, name in enumerate(self._names) if adapters.get(name) == rank] for rank in ranks
        ]

    async def measure(
        self, points: Sequence[ServerPoint], point_s: float, seed: int, done: Callable[[int, int], None]
    ) -> float | None:
        """Measure points; return the time of the engine's last step, or None if it is unknown."""
        found = await preflight(self._target, self._names, None)
        bodies = bodies_for(found, self._target, self._names, self._names)
        async with open_session(self._target) as session:
            client = CompletionClient(session, self._target, _TIMEOUT_S, time.monotonic)
            sender = RequestSender(client, bodies, time.monotonic)
            await self._first_tokens(sender)
            last_s = None
            for number, point in enumerate(points):
                done(number, len(points))
                last_s = await self._point(sender, point, number, point_s, seed)
            done(len(points), len(points))
            return last_s if last_s is not None or not self.windows else await self._one_more(sender)

    async def _first_tokens(self, sender: RequestSender) -> None:
        resident = self._pools[0][:1]
        try:
            self.idle = await first_tokens(sender, resident, self._idle_prompts, _IDLE_REPEATS, lambda: None)
        except LoopError as error:
            self.failed.append(f"first tokens: {error}")

    async def _point(
        self, sender: RequestSender, point: ServerPoint, number: int, point_s: float, seed: int
    ) -> float | None:
        """Measure a point; return the end of its window, at which its streams are cancelled."""
        models = self._models(point, number)
        ramp_s, rest_s = _RAMP_SHARE * point_s, (1.0 - _RAMP_SHARE) * point_s
        try:
            _, start_s, end_s = await closed_loop(sender, point, models, ramp_s, rest_s, seed + number)
        except LoopError as error:
            self.failed.append(f"{point.name}: {error}")
            return None
        self.windows.append(PointWindow(point, start_s, end_s))
        return end_s

    async def _one_more(self, sender: RequestSender) -> float | None:
        """Send one more request after a failed point, whose last step has no known time."""
        outcome = (await sender.send(0, self._idle_prompts[0], OUTPUT_TOKENS)).outcome
        return outcome.times_s[0] if outcome.kind == FINISHED else None

    def _models(self, point: ServerPoint, number: int) -> list[int]:
        """Return adapters of one rank; ranks alternate, so that rank sums of records are unambiguous."""
        if point.adapters == 0:
            return [0]
        return self._pools[number % len(self._pools)][: point.adapters]


def _rows(records: Path, windows: Sequence[PointWindow], last_s: float) -> list[dict[str, Any]]:
    import pandas as pd

    table = recorded_rows(pd.read_parquet(records), _PAUSE_S)
    offset_ms = _offset_ms(table, last_s)
    found: list[dict[str, Any]] = []
    for window in windows:
        start, end = (1e3 * at + offset_ms for at in (window.start_s, window.end_s))
        own = table[(table["begin_ms"] >= start) & (table["begin_ms"] < end)]
        found += [{"run": window.point.name, **row} for row in grouped(own)]
    return found


def recorded_rows(records: Any, pause_s: float) -> Any:
    """Return rows of a step table from a server's records, a row per step.

    The step time is the interval between the starts of two steps, so it includes waiting for other threads.
    Steps before a pause, and steps after which nothing runs, are left out.
    """
    import pandas as pd

    begin_ms = records["begin_ns"].to_numpy(np.float64) * 1e-6
    took_ms = np.append(np.diff(begin_ms), np.inf)
    parts = (records["decode_requests"] + records["prefill_requests"]).to_numpy(np.float64)
    goes_on = (records["requests"] + records["waiting"] - records["finished"]).to_numpy() > 0
    mean_rank = records["rank_sum"].to_numpy(np.float64) / np.maximum(parts, 1.0)
    decodes, prefills, prefill_tokens = (
        records[name].to_numpy(np.float64)
        for name in ("decode_requests", "prefill_requests", "prefill_tokens")
    )
    lora = (mean_rank > 0.0).astype(float)
    rows = pd.DataFrame(
        {
            "begin_ms": begin_ms,
            "step_ms": took_ms,
            **{n: records[n].astype(float) for n in ("tokens", "requests", "kv_tokens", "adapters")},
            "waiting": records["waiting"].astype(float),
            "load_ms": 0.0,
            "decodes": decodes,
            "prefills": prefills,
            "lora_decodes": decodes * lora,
            "lora_prefills": prefills * lora,
            "lora_prefill_tokens": prefill_tokens * lora,
            "max_rank": records["max_rank"].astype(float),
            "decode_rank_sum": decodes * mean_rank,
            "prefill_rank_sum": prefills * mean_rank,
            "prefill_rank_tokens": prefill_tokens * mean_rank,
            **{name: records[name].astype(float) for name in (*HOST_PHASES, "forward_ms")},
        }
    )
    keep = goes_on & (took_ms < pause_s * 1e3) & (records["loads"] == 0).to_numpy()
    return rows[keep].reset_index(drop=True)


def _offset_ms(table: Any, last_s: float) -> float:
    """Return the offset of the engine's clock from the client's, in milliseconds.

    The last record is the step before the streams were cancelled at the end of the last window, or that of a
    first token.
    """
    return float(table["begin_ms"].iloc[-1]) - 1e3 * last_s


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
