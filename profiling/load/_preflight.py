"""Server information before and during a run: models, prompt form, engine settings, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from capplan.errors import InputError
from capplan.http_connection import ConnectionLostError, ConnectionPool
from capplan.profiling.load._client import fetch, open_session
from capplan.profiling.load._requests import PromptForm, PromptWriter, RequestBodies, Target
from capplan.profiling.load._result import ServerSample

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
"""Sampled metrics and their names on the servers, the preferred one first: a server may report one quantity
under several. ``kv_used`` is a share of the KV tokens; those after it are counters.
"""
_SHARES: Final = ("kv_used",)
_RANK_LABELS: Final = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Labels of processes that run the same requests together."""
_STRING: Final = r'"(?:[^"\\\n]++|\\.)*+"'
_SERIES: Final = re.compile(
    rf'^[ \t]*([a-zA-Z_:][\w:]*)[ \t]*(?:\{{((?:[^"}}\n]++|{_STRING})*+)\}})?[ \t]*([^\s#]+)', re.MULTILINE
)
_LORA_INFO: Final = "vllm:lora_requests_info"
_CACHE_INFO: Final = "vllm:cache_config_info"
_CORE_INFO: Final = "capplan:engine_core_info"
_ENGINE_INFO: Final = "capplan:engine_info"
_ENGINES: Final = ("capplan", "vllm", "sglang")
"""Engines by the prefix of their metrics; capplan's reference engine has vLLM's as well."""
_LABEL: Final = re.compile(rf"(\w+)[ \t]*=[ \t]*({_STRING})")
_ESCAPED: Final = re.compile(r"\\(.)")
_ADAPTER_LABELS: Final = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")


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

    Raise `InputError` if the server does not answer, does not serve an adapter, or accepts no prompt form.
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
    return await _fetch_text(session, target, "/metrics")


async def _fetch_text(session: ConnectionPool, target: Target, path: str) -> str | None:
    try:
        async with asyncio.timeout(_METRICS_TIMEOUT_S):
            status, text = await fetch(session, target.path(path), _MAX_RESPONSE_BYTES)
    except (TimeoutError, OSError, ConnectionLostError):
        return None
    return text if status == _OK else None


async def sample_metrics(
    session: ConnectionPool,
    target: Target,
    interval_s: float,
    clock: Callable[[], float],
    samples: list[ServerSample],
) -> None:
    """Append samples of ``/metrics`` every `interval_s` seconds until cancelled; none, if it is 0."""
    while interval_s > 0.0:
        time_s = clock()
        text = await fetch_metrics(session, target)
        if text is not None:
            took_ms = 1e3 * (clock() - time_s)
            samples.append(ServerSample(time_s=time_s, took_ms=took_ms, values=parse_metrics(text)))
        await asyncio.sleep(interval_s)


Labels = frozenset[tuple[str, str]]


def _series(text: str, names: Collection[str]) -> dict[str, dict[Labels, float]]:
    """Return the finite values of metrics in a text in Prometheus or OpenMetrics format, by labels."""
    found: dict[str, dict[Labels, float]] = {}
    for name, labels, value in _SERIES.findall(text):
        if name not in names:
            continue
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(value)):
                found.setdefault(name, {})[frozenset(_labels(labels).items())] = number
    return found


def _labels(text: str) -> dict[str, str]:
    """Return labels by name, without escapes."""
    if "\\" not in text:
        return {name: value[1:-1] for name, value in _LABEL.findall(text)}
    return {
        name: _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], value[1:-1])
        for name, value in _LABEL.findall(text)
    }


def parse_metrics(text: str) -> dict[str, float]:
    """Return the values of `METRIC_NAMES` in a text in Prometheus format, over all engines.

    Counts add over engines, which labels tell apart; shares are averaged. ``running_adapters`` is the number
    of different adapters in vLLM's LoRA information.
    """
    wanted = {name for names in METRIC_NAMES.values() for name in names}
    series = _series(text, {*wanted, _LORA_INFO})
    found: dict[str, float] = {}
    for key, names in METRIC_NAMES.items():
        values: dict[Labels, float] = {}
        reporting: set[str] = set()
        for name in names:  # behind a router, servers of several versions may report under several names
            known = {
                frozenset(each for each in labels if each[0] not in _RANK_LABELS): value
                for labels, value in series.get(name, {}).items()
                if _instance(labels) not in reporting
            }
            reporting |= set(map(_instance, known))
            values |= known
        if values:
            found[key] = sum(values.values()) / (len(values) if key in _SHARES else 1)
    if lora := series.get(_LORA_INFO):
        engines = {each for name in wanted for labels in series.get(name, ()) for each in _engines_of(labels)}
        found["running_adapters"] = float(len(_running_adapters(lora, engines)))
    return found


def _instance(labels: Labels) -> str:
    return dict(labels).get("instance", "")


def _engines_of(labels: Labels) -> set[tuple[str, str]]:
    found = dict(labels)
    return {(found.get("instance", ""), found["engine"])} if "engine" in found else set()


def _running_adapters(lora: Mapping[Labels, float], engines: Collection[tuple[str, str]]) -> set[str]:
    """Return the running adapters of all engines.

    vLLM keeps a series per combination of adapters, whose value is the time when an engine had it last; the
    latest is the present one. Engines of one vLLM server share the series without a label of their own, so as
    many of the latest count as there are engines.
    """
    by_server: dict[Labels, list[tuple[float, str]]] = {}
    for labels, time_s in lora.items():
        server = frozenset(each for each in labels if each[0] not in _ADAPTER_LABELS)
        by_server.setdefault(server, []).append((time_s, dict(labels).get("running_lora_adapters", "")))
    adapters: set[str] = set()
    for server, states in by_server.items():
        named = "engine" in dict(server)
        count = 1 if named else sum(instance == _instance(server) for instance, _ in engines)
        states.sort(reverse=True)
        for _, running in states[: max(1, count)]:
            adapters |= {each.strip() for each in running.split(",") if each.strip()}
    return adapters


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
    """Return the engine settings in a text in Prometheus format; KV tokens add over engines."""
    series = _series(metrics, (_CACHE_INFO, _LORA_INFO, _CORE_INFO))
    cache, lora, core = (
        [dict(each) for each in series.get(n, ())] for n in (_CACHE_INFO, _LORA_INFO, _CORE_INFO)
    )
    tokens = [_kv_tokens(each) for each in cache]
    slots = [n for each in lora if (n := _positive_int(each.get("max_lora"))) is not None]
    utilization: float | None = None
    with contextlib.suppress(KeyError, ValueError, IndexError):
        utilization = float(cache[0]["gpu_memory_utilization"])
    return EngineInfo(
        a_max=min(slots, default=None),
        kv_tokens=None if None in tokens or not tokens else sum(filter(None, tokens)),
        block_size=_positive_int(cache[0].get("block_size")) if cache else None,
        gpu_memory_utilization=utilization,
        cpus=tuple(int(cpu) for each in core for cpu in each.get("cpus", "").split(",") if cpu.isdigit()),
    )


def _kv_tokens(cache: Mapping[str, str]) -> int | None:
    """Return the KV tokens of an engine by the labels of its cache."""
    blocks, size = _positive_int(cache.get("num_gpu_blocks")), _positive_int(cache.get("block_size"))
    tokens = _positive_int(cache.get("kv_cache_size_tokens"))
    return blocks * size if tokens is None and blocks is not None and size is not None else tokens


@dataclass(frozen=True)
class ServerInfo:
    """Model, engine and device of a server by its own account; None or empty if not reported."""

    settings: EngineInfo = EngineInfo()
    engine: str | None = None
    version: str | None = None
    device: str | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    """Models that are no adapters, by name: what they were loaded from."""
    max_model_len: int | None = None
    prefix_caching: bool | None = None
    replicas: int = 1
    """Engines behind the address."""


async def fetch_server_info(target: Target) -> ServerInfo:
    """Return what a server reports of itself in ``/metrics``, ``/v1/models`` and ``/version``."""
    async with open_session(target) as session:
        metrics = await fetch_metrics(session, target) or ""
        models, version = [await _fetch_document(session, target, p) for p in ("/v1/models", "/version")]
    series = _series(metrics, (_CACHE_INFO, _ENGINE_INFO, "vllm:num_requests_running"))
    cache, own = (dict(next(iter(series.get(name, ())), ())) for name in (_CACHE_INFO, _ENGINE_INFO))
    listed = [each for each in _list_of(models, "data") if isinstance(each, dict)]
    lengths = [n for each in listed if isinstance(n := each.get("max_model_len"), int)]
    base = [each for each in listed if not each.get("parent")]
    told = version.get("version") if isinstance(version, dict) else None
    return ServerInfo(
        settings=engine_info(metrics),
        engine=next((each for each in _ENGINES if re.search(rf"^{each}:", metrics, re.MULTILINE)), None),
        version=own.get("version") or (told if isinstance(told, str) else None),
        device=own.get("device"),
        models={str(each["id"]): str(each.get("root") or "") for each in base if "id" in each},
        max_model_len=min(lengths, default=None),
        prefix_caching={"True": True, "False": False}.get(cache.get("enable_prefix_caching", "")),
        replicas=max(1, len(series.get("vllm:num_requests_running", ()))),
    )


async def _fetch_document(session: ConnectionPool, target: Target, path: str) -> Any:
    """Return a JSON document; None if the server has none."""
    try:
        return json.loads(await _fetch_text(session, target, path) or "null")
    except (ValueError, RecursionError):
        return None


def _list_of(document: Any, key: str) -> list[Any]:
    value = document.get(key) if isinstance(document, dict) else None
    return value if isinstance(value, list) else []


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
