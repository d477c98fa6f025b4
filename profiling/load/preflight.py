"""Server information before and during a run: models, prompt form, engine settings, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from capplan.errors import InputError
from capplan.http_connection import ConnectionLostError, ConnectionPool
from capplan.profiling.load.client import fetch, open_session
from capplan.profiling.load.requests import PromptForm, PromptWriter, RequestBodies, Target
from capplan.profiling.load.result import ServerSample

_PROBE_TIMEOUT_S: Final = 120.0
"""A server that has just started compiles for its first request."""
_METRICS_TIMEOUT_S: Final = 10.0
_MAX_RESPONSE_BYTES: Final = 16 * 2**20
"""Of lists of models and of metrics: an adapter takes about 250 bytes in either."""
_OK: Final = 200
_SERVER_ERROR: Final = 500
_PROBE_TOKENS: Final = 64
_SALTS: Final = 1 << 30
_SHOWN: Final = 200

METRIC_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
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
        "speed_probes": ("capplan:speed_probe_seconds_count",),
        "speed_probe_s": ("capplan:speed_probe_seconds_sum",),
    }
)
"""Sampled metrics and their names on the servers. ``kv_used`` is a share of the KV tokens; those after it
are counters.
"""
_SERIES: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LORA_INFO: Final = "vllm:lora_requests_info"
_CACHE_INFO: Final = "vllm:cache_config_info"
_CORE_INFO: Final = "capplan:engine_core_info"
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Preflight:
    """Models and prompt form of a server."""

    prompts: PromptWriter
    """Writer of prompts in a form that the server accepts."""
    served: tuple[str, ...]
    """Listed models; empty if the server lists none."""
    max_model_len: int | None
    """Smallest reported limit on prompt and output tokens."""


async def preflight(target: Target, adapters: Sequence[str], form: PromptForm | None = None) -> Preflight:
    """Request the model list, then one token in each prompt form until the server accepts one.

    Raises
    ------
    InputError
        If the server does not answer, does not serve an adapter, or accepts no prompt form.
    """
    async with open_session(target) as session:
        probe = _Probe(session, target)
        served, max_model_len = await probe.models()
        models = {name: target.model_of(name) for name in adapters}
        unlisted = [name for name, model in models.items() if served and model not in served]
        # Otherwise the base model, if listed: a request for an adapter would load it early.
        base = [name for name in (target.base_model, *served[:1]) if name in served]
        probed = [*(models[name] for name in unlisted), *base, *models.values()]
        prompts = await probe.accepted_prompts(probed[0], form)
    return Preflight(prompts, served, max_model_len)


def bodies_for(found: Preflight, target: Target, names: Sequence[str], used: Sequence[str]) -> RequestBodies:
    """Return the request bodies of a run; `names` not in `used` get no model."""
    known = set(used)
    models = [target.model_of(name) if name in known else "" for name in names]
    return RequestBodies(found.prompts, models, target.extra_body)


class _Probe:
    def __init__(self, session: ConnectionPool, target: Target) -> None:
        self._session, self._target = session, target

    async def models(self) -> tuple[tuple[str, ...], int | None]:
        status, document = await self._exchange("/v1/models")
        listed = document.get("data") if status == _OK and isinstance(document, dict) else None
        if listed is not None and not isinstance(listed, list):
            raise InputError("must list models at /v1/models", listed, self._target.shown)
        entries = [each for each in listed or [] if isinstance(each, dict)]
        names = tuple(str(each.get("id")) for each in entries)
        lengths = [n for each in entries if isinstance(n := each.get("max_model_len"), int) and n > 0]
        return names, min(lengths, default=None)

    async def accepted_prompts(self, model: str, form: PromptForm | None) -> PromptWriter:
        salt = secrets.randbelow(_SALTS)
        status, document = 0, None
        for each in tuple(PromptForm) if form is None else (form,):
            prompts = PromptWriter(each, salt=salt)
            status, document = await self._complete(prompts, model)
            if status == _OK and each is PromptForm.TEXT:
                return PromptWriter(each, _extra_tokens(document), salt)
            if status == _OK or status >= _SERVER_ERROR:  # the form is not at fault; the run counts failures
                return prompts
        rule = f"refused a completion with status {status}: {_error_message(document)}"
        raise InputError(rule, location=f"{self._target.shown}: model {model}")

    async def _complete(self, prompts: PromptWriter, model: str) -> tuple[int, Any]:
        bodies = RequestBodies(prompts, [model], self._target.extra_body)
        body = json.loads(bodies.body(0, 0, _PROBE_TOKENS, 1))
        del body["stream"], body["stream_options"]
        if prompts.form is not PromptForm.TEXT:
            body["prompt"][-1] = prompts.highest_id
        return await self._exchange("/v1/completions", json.dumps(body).encode())

    async def _exchange(self, path: str, data: bytes | None = None) -> tuple[int, Any]:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                status, text = await fetch(self._session, self._target.path(path), _MAX_RESPONSE_BYTES, data)
        except TimeoutError:
            rule = f"did not answer within {_PROBE_TIMEOUT_S:g} s"
            raise InputError(rule, location=self._target.shown) from None
        except (ConnectionLostError, OSError) as error:
            message = " ".join(str(error).split())
            raise InputError(f"does not answer: {message}", location=self._target.shown) from None
        try:
            return status, json.loads(text)
        except (ValueError, RecursionError):
            return status, text[:_SHOWN]


def _extra_tokens(document: Any) -> int:
    """Return the tokens that the server adds to a text prompt."""
    usage = document.get("usage") if isinstance(document, dict) else None
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return max(0, counted - _PROBE_TOKENS) if isinstance(counted, int) else 0


def _error_message(document: Any) -> str:
    inner = document.get("error", document) if isinstance(document, dict) else document
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:_SHOWN]


async def fetch_metrics(session: ConnectionPool, target: Target) -> str | None:
    """Return the text of ``/metrics``; None if the server has none."""
    try:
        async with asyncio.timeout(_METRICS_TIMEOUT_S):
            status, text = await fetch(session, target.path("/metrics"), _MAX_RESPONSE_BYTES)
    except (TimeoutError, OSError, ConnectionLostError):
        return None
    return text if status == _OK else None


class MetricsSampler:
    """Samples ``/metrics`` every `interval_s` seconds; never, if it is 0."""

    def __init__(
        self, session: ConnectionPool, target: Target, interval_s: float, clock: Callable[[], float]
    ) -> None:
        self.samples: list[ServerSample] = []
        self._session, self._target = session, target
        self._interval_s, self._clock = interval_s, clock

    async def run(self) -> None:
        """Sample until cancelled."""
        while self._interval_s > 0.0:
            time_s = self._clock()
            text = await fetch_metrics(self._session, self._target)
            if text is not None:
                took_ms = 1e3 * (self._clock() - time_s)
                self.samples.append(ServerSample(time_s=time_s, took_ms=took_ms, values=parse_metrics(text)))
            await asyncio.sleep(self._interval_s)


def parse_metrics(text: str) -> dict[str, float]:
    """Return the values of `METRIC_NAMES` in a text in Prometheus format, summed over label sets.

    ``running_adapters`` is the number of adapters in the most recent series of vLLM's LoRA information.
    """
    wanted = {name: key for key, names in METRIC_NAMES.items() for name in names}
    found: dict[str, float] = {}
    newest, adapters = -math.inf, None
    for match in _SERIES.finditer(text):
        name, labels, value = match.groups()
        if name not in wanted and name != _LORA_INFO:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if name != _LORA_INFO:
            found[wanted[name]] = found.get(wanted[name], 0.0) + number
            continue
        running = dict(_LABEL.findall(labels or "")).get("running_lora_adapters")
        if running is not None and number >= newest:  # the value is the time of the last update
            newest, adapters = number, len({each for each in running.split(",") if each.strip()})
    if adapters is not None:
        found["running_adapters"] = float(adapters)
    return found


@dataclass(frozen=True)
class EngineInfo:
    """Engine settings from ``/metrics``; None if not reported."""

    a_max: int | None = None
    kv_tokens: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    cpus: tuple[int, ...] = ()
    """CPUs of the engine core; empty if not reported."""


async def fetch_engine_info(target: Target) -> EngineInfo:
    """Return the engine settings that a server reports."""
    async with open_session(target) as session:
        return engine_info(await fetch_metrics(session, target) or "")


def engine_info(metrics: str) -> EngineInfo:
    """Return the engine settings in a text in Prometheus format."""
    labels = {name: dict(_LABEL.findall(label_set or "")) for name, label_set, _ in _SERIES.findall(metrics)}
    cache, lora = labels.get(_CACHE_INFO, {}), labels.get(_LORA_INFO, {})
    blocks, size = _positive_int(cache.get("num_gpu_blocks")), _positive_int(cache.get("block_size"))
    tokens = _positive_int(cache.get("kv_cache_size_tokens"))
    if tokens is None and blocks is not None and size is not None:
        tokens = blocks * size
    utilization: float | None = None
    with contextlib.suppress(KeyError, ValueError):
        utilization = float(cache["gpu_memory_utilization"])
    cpus = [int(cpu) for cpu in labels.get(_CORE_INFO, {}).get("cpus", "").split(",") if cpu.isdigit()]
    return EngineInfo(_positive_int(lora.get("max_lora")), tokens, size, utilization, tuple(cpus))


@contextlib.asynccontextmanager
async def beside_engine(target: Target) -> AsyncIterator[None]:
    """Keep this thread off the CPUs of a server's engine core on this machine, as far as others are left."""
    allowed = os.sched_getaffinity(0) if target.is_local and hasattr(os, "sched_getaffinity") else set()
    others = allowed - set((await fetch_engine_info(target)).cpus) if allowed else allowed
    if others:
        os.sched_setaffinity(0, others)
    try:
        yield
    finally:
        if others:
            os.sched_setaffinity(0, allowed)


def _positive_int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None
