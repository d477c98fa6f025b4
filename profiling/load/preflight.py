"""Before a run: is the server there, does it know the models, and how does it take prompts."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from capplan.errors import InputError
from capplan.profiling.load.prompts import Bodies, PromptForm, Prompts
from capplan.profiling.load.session import open_session
from capplan.profiling.load.settings import Target

_TIMEOUT_S: Final = 120.0
"""A server that has just started compiles for its first request."""
_OK: Final = 200
_OWN_FAULT: Final = 500
_WORDS: Final = 64
_LONGEST_SALT: Final = 1 << 30


@dataclass(frozen=True)
class Preflight:
    """What is known of a server before the load."""

    prompts: Prompts
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


def bodies_for(found: Preflight, target: Target, names: Sequence[str], used: Sequence[str]) -> Bodies:
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
    return Bodies.of(found.prompts, models, target.extra_body)


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

    async def accepted(self, model: str, form: PromptForm | None) -> Prompts:
        """Return prompts in the first form that the server takes."""
        salt = secrets.randbelow(_LONGEST_SALT)
        forms = tuple(PromptForm) if form is None else (form,)
        status: int = 0
        document: Any = None
        for each in forms:
            prompts = Prompts(each, salt=salt)
            status, document = await self._ask(prompts, model)
            if status == _OK:
                return self._corrected(prompts, document)
            if status >= _OWN_FAULT:  # no matter of form; the run will tell how often it happens
                return prompts
        rule = f"refused a completion with status {status}: {_message(document)}"
        raise InputError(rule, location=f"{self._target.shown}: model {model}")

    def _corrected(self, prompts: Prompts, document: Any) -> Prompts:
        """Return text prompts so short that they have the asked length with what the server adds."""
        if prompts.form is not PromptForm.TEXT:
            return prompts
        usage = document.get("usage") if isinstance(document, dict) else None
        counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        extra = max(0, counted - _WORDS) if isinstance(counted, int) else 0
        return Prompts(PromptForm.TEXT, extra, prompts.salt)

    async def _ask(self, prompts: Prompts, model: str) -> tuple[int, Any]:
        body = json.loads(Bodies.of(prompts, [model], self._target.extra_body).body(0, 0, _WORDS, 1))
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
