"""What a server says of itself at ``/metrics`` now and then: requests running and waiting, KV, adapters."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import aiohttp

from capplan.profiling.load.settings import Target

_TIMEOUT_S: Final = 10.0
_OK: Final = 200

NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "running": (
            "vllm:num_requests_running",
            "sglang:num_running_reqs",
            "lorax_batch_current_size",
        ),
        "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "lorax_queue_size"),
        "kv_used": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
        "preemptions": ("vllm:num_preemptions_total",),
        "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
        "output_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
        "steps": ("vllm:iteration_tokens_total_count",),
        "step_tokens": ("vllm:iteration_tokens_total_sum",),
    }
)
"""What is kept, and what servers call it. The last five only ever grow. ``kv_used`` is a share of the KV
tokens; ``steps`` and ``step_tokens`` count the engine's steps and the tokens computed in them.
"""

_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LORA: Final = "vllm:lora_requests_info"
_RUNNING_LORAS: Final = re.compile(r'running_lora_adapters="([^"]*)"')


@dataclass(frozen=True)
class Scrape:
    """One look at the metrics."""

    time_s: float
    """On the clock of the run, when it was asked for."""
    took_ms: float
    values: Mapping[str, float]
    """By the keys of `NAMES`, those that the server has; also ``running_adapters``."""


@dataclass(frozen=True)
class Scrapes:
    """All looks of a run."""

    interval_s: float
    """Pause between them; 0: nobody looked."""
    samples: tuple[Scrape, ...] = ()
    failed: int = 0


def parse_metrics(text: str) -> dict[str, float]:
    """Return the values of `NAMES` that a text in Prometheus' format holds, summed over label sets."""
    wanted = {name: key for key, names in NAMES.items() for name in names}
    found: dict[str, float] = {}
    newest, adapters = -math.inf, None
    for match in _SAMPLE.finditer(text):
        name, labels, value = match.groups()
        if name not in wanted and name != _LORA:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if name == _LORA:  # one series per combination ever seen; its value is when it was seen last
            running = _RUNNING_LORAS.search(labels or "")
            if running is not None and number >= newest:
                newest, adapters = number, len({each for each in running[1].split(",") if each.strip()})
        else:
            found[wanted[name]] = found.get(wanted[name], 0.0) + number
    if adapters is not None:
        found["running_adapters"] = float(adapters)
    return found


class Scraper:
    """Asks for the metrics again and again.

    Parameters
    ----------
    session, target
        Whom to ask.
    interval_s
        Pause between scrapes; 0: `repeat` does nothing.
    clock
        Seconds on the clock of the run.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._session = session
        self._url = target.at("/metrics")
        self._interval_s = interval_s
        self._clock = clock
        self._samples: list[Scrape] = []
        self._failed = 0

    async def repeat(self) -> None:
        """Scrape until cancelled."""
        while self._interval_s > 0.0:
            await self.once()
            await asyncio.sleep(self._interval_s)

    async def once(self) -> Scrape | None:
        """Scrape now; None where the server would not say."""
        time_s = self._clock()
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._session.get(self._url) as response:
                text = await response.text("utf-8", "replace")
                if response.status != _OK:
                    raise aiohttp.ClientError(f"status {response.status}")
        except (TimeoutError, OSError, aiohttp.ClientError):
            self._failed += 1
            return None
        sample = Scrape(time_s, 1e3 * (self._clock() - time_s), parse_metrics(text))
        self._samples.append(sample)
        return sample

    def scrapes(self) -> Scrapes:
        """Return what was seen so far."""
        return Scrapes(self._interval_s, tuple(self._samples), self._failed)
