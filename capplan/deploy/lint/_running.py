"""Running OpenAI-compatible servers: their models and adapter slots."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from capplan.deploy.lint._parts import RunningServer, mapping, mappings
from capplan.errors import InputError, redacted
from capplan.spec import parse_json

_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 2**26
_SLOTS: Final = (
    re.compile(r'^vllm:lora_requests_info\{[^}]*\bmax_lora="(\d+)"', re.MULTILINE),
    re.compile(r"^sglang:lora_pool_slots_total(?:\{[^}]*\})? (\d+)", re.MULTILINE),
)


def running_server(url: str) -> RunningServer:
    """Return what a server says of itself in ``/v1/models`` and, if it has them, its metrics.

    Raises
    ------
    InputError
        If it cannot be reached, or has no list of models.
    """
    base = url.rstrip("/").removesuffix("/v1")
    models = _models(f"{base}/v1/models")
    try:
        metrics = _fetched(f"{base}/metrics")
    except InputError:  # not every server has metrics
        metrics = ""
    slots = (int(found[1]) for pattern in _SLOTS if (found := pattern.search(metrics)))
    without_parent = [each for each in models if each.get("parent") is None]
    return RunningServer(
        file=redacted(url),
        models=frozenset(str(each.get("id")) for each in models),
        base_models=frozenset(
            str(each[key]) for each in without_parent for key in ("id", "root") if each.get(key)
        ),
        max_loras=next(slots, None),
    )


def _models(url: str) -> list[Any]:
    rule = "is not understood: a URL must be that of an OpenAI-compatible server, with /v1/models"
    try:
        document = mapping(parse_json(_fetched(url), url))
    except InputError as error:
        if "cannot be reached" in error.rule:
            raise
        raise InputError(rule, location=url) from None
    if "data" not in document:
        raise InputError(rule, location=url)
    return [each for _, each in mappings(document["data"])]


def _fetched(url: str) -> str:
    try:
        with urlopen(Request(url, headers={"Accept": "*/*"}), timeout=_TIMEOUT_S) as answer:  # noqa: S310 - http
            content: bytes = answer.read(_MAX_BYTES + 1)
    except HTTPError as error:
        raise InputError(f"must answer, and its status is {error.code}", location=url) from None
    except (URLError, OSError, ValueError) as error:
        raise InputError(f"cannot be reached: {getattr(error, 'reason', error)}", location=url) from None
    if len(content) > _MAX_BYTES:
        raise InputError(f"must answer with at most {_MAX_BYTES >> 20} MiB", location=url)
    return content.decode("utf-8", errors="replace")
