"""Server information: models, accepted prompt forms, and metrics."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import aiohttp

from capplan.errors import InputError
from capplan.profiling.load.client import open_session
from capplan.profiling.load.requests import PromptForm, PromptWriter, RequestBodies
from capplan.profiling.load.settings import Target

_TIMEOUT_S: Final = 120.0
"""A server that has just started compiles for its first request."""
_OK: Final = 200
_OWN_FAULT: Final = 500
_WORDS: Final = 64
_LONGEST_SALT: Final = 1 << 30
_SCRAPE_TIMEOUT_S: Final = 10.0
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
_CACHE_INFO: Final = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LORA_INFO: Final = re.compile(r"^vllm:lora_requests_info\{(.*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Preflight:
    """What is known of a server before the load."""

    prompts: PromptWriter
    served: tuple[str, ...]
    """Models that it lists; empty where it lists none."""
    max_model_len: int | None
    """What it says of the longest request."""


async def preflight(
    target: Target, adapters: Sequence[str], form: PromptForm | None = None, timeout_s: float = _TIMEOUT_S
) -> Preflight:
    """Ask a server what it serves, and for one token in every form of prompt until it takes one.

    Parameters
    ----------
    target
        The server.
    adapters
        Names of the workload's adapters that will be asked for; the empty one is the base model.
    form
        The only form to try; None: lists of ids first, then text.
    timeout_s
        How long one answer may take.

    Raises
    ------
    InputError
        When nobody answers, an adapter is not served, or no form of prompt is taken.
    """
    async with open_session(target) as session:
        probe = _Probe(session, target, timeout_s)
        served, max_model_len = await probe.models()
        models = {name: target.model_of(name) for name in adapters}
        unlisted = [name for name, model in models.items() if served and model not in served]
        # Else the base model, if it is there: asking an adapter would load it before its time.
        base = [name for name in (target.base_model, *served[:1]) if name in served]
        asked = [*(models[name] for name in unlisted), *base, *models.values()]
        prompts = await probe.accepted(asked[0], form)
    return Preflight(prompts, served, max_model_len)


def bodies_for(found: Preflight, target: Target, names: Sequence[str], used: Sequence[str]) -> RequestBodies:
    """Return the writer of a run's requests.

    Parameters
    ----------
    found, target
        The server.
    names
        Adapters of the schedule by number.
    used
        Those that are asked for; the others need no model.
    """
    known = set(used)
    models = [target.model_of(name) if name in known else "" for name in names]
    return RequestBodies.of(found.prompts, models, target.extra_body)


class _Probe:
    def __init__(self, session: aiohttp.ClientSession, target: Target, timeout_s: float) -> None:
        self._session = session
        self._target = target
        self._timeout_s = timeout_s

    async def models(self) -> tuple[tuple[str, ...], int | None]:
        """Return the listed models and the longest request; nothing where the server lists none."""
        status, document = await self._exchange("GET", "/v1/models", None)
        listed = document.get("data") if status == _OK and isinstance(document, dict) else None
        if listed is not None and not isinstance(listed, list):
            raise InputError("must list models at /v1/models", listed, self._target.shown)
        entries = [each for each in listed or [] if isinstance(each, dict)]
        names = tuple(str(each.get("id")) for each in entries)
        lengths = [n for each in entries if isinstance(n := each.get("max_model_len"), int) and n > 0]
        return names, min(lengths, default=None)

    async def accepted(self, model: str, form: PromptForm | None) -> PromptWriter:
        """Return prompts in the first form that the server takes."""
        salt = secrets.randbelow(_LONGEST_SALT)
        forms = tuple(PromptForm) if form is None else (form,)
        status: int = 0
        document: Any = None
        for each in forms:
            prompts = PromptWriter(each, salt=salt)
            status, document = await self._ask(prompts, model)
            if status == _OK:
                return self._corrected(prompts, document)
            if status >= _OWN_FAULT:  # no matter of form; the run will tell how often it happens
                return prompts
        rule = f"refused a completion with status {status}: {_message(document)}"
        raise InputError(rule, location=f"{self._target.shown}: model {model}")

    def _corrected(self, prompts: PromptWriter, document: Any) -> PromptWriter:
        """Return text prompts so short that they have the asked length with what the server adds."""
        if prompts.form is not PromptForm.TEXT:
            return prompts
        usage = document.get("usage") if isinstance(document, dict) else None
        counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        extra = max(0, counted - _WORDS) if isinstance(counted, int) else 0
        return PromptWriter(PromptForm.TEXT, extra, prompts.salt)

    async def _ask(self, prompts: PromptWriter, model: str) -> tuple[int, Any]:
        body = json.loads(RequestBodies.of(prompts, [model], self._target.extra_body).body(0, 0, _WORDS, 1))
        del body["stream"], body["stream_options"]
        if prompts.form is not PromptForm.TEXT:
            body["prompt"][-1] = prompts.highest_id
        return await self._exchange("POST", "/v1/completions", json.dumps(body).encode())

    async def _exchange(self, method: str, path: str, data: bytes | None) -> tuple[int, Any]:
        url = self._target.at(path)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.request(method, url, data=data) as response,
            ):
                text = await response.text("utf-8", "replace")
                status = response.status
        except TimeoutError:
            rule = f"did not answer within {self._timeout_s:g} s"
            raise InputError(rule, location=self._target.shown) from None
        except (aiohttp.ClientError, OSError) as error:
            raise InputError(f"cannot be asked: {error}", location=self._target.shown) from None
        try:
            return status, json.loads(text)
        except (ValueError, RecursionError):
            return status, text[:200]


def _message(document: Any) -> str:
    """Return what an error document says."""
    if isinstance(document, dict):
        inner = document.get("error", document)
        if isinstance(inner, dict):
            return str(inner.get("message", inner))[:200]
        return str(inner)[:200]
    return str(document)[:200]


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
            async with asyncio.timeout(_SCRAPE_TIMEOUT_S), self._session.get(self._url) as response:
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


@dataclass(frozen=True)
class EngineInfo:
    """None where the server does not say."""

    a_max: int | None = None
    kv_tokens: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None


def engine_info(metrics: str) -> EngineInfo:
    """Read a text in Prometheus' format."""
    cache, lora = (_labels(pattern, metrics) for pattern in (_CACHE_INFO, _LORA_INFO))
    blocks, size = _whole(cache.get("num_gpu_blocks")), _whole(cache.get("block_size"))
    tokens = _whole(cache.get("kv_cache_size_tokens"))
    if tokens is None and blocks is not None and size is not None:
        tokens = blocks * size
    try:
        share: float | None = float(cache["gpu_memory_utilization"])
    except (KeyError, ValueError):
        share = None
    return EngineInfo(_whole(lora.get("max_lora")), tokens, size, share)


def _labels(pattern: re.Pattern[str], metrics: str) -> dict[str, str]:
    found = pattern.search(metrics)
    return dict(_LABEL.findall(found[1])) if found else {}


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None
