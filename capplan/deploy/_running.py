"""Running OpenAI-compatible servers: their models and adapter slots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from capplan.errors import InputError
from capplan.spec import parse_json

_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 2**26
_SLOTS: Final = (
    re.compile(r'^vllm:lora_requests_info\{[^}]*\bmax_lora="(\d+)"', re.MULTILINE),
    re.compile(r"^sglang:lora_pool_slots_total(?:\{[^}]*\})? (\d+)", re.MULTILINE),
)


@dataclass(frozen=True)
class Served:
    """What a running server serves.

    Parameters
    ----------
    models
        Names of all models.
    base_models
        Names and paths of those that are no adapters.
    max_loras
        Adapter slots by its metrics; None: not stated.
    """

    models: frozenset[str]
    base_models: frozenset[str]
    max_loras: int | None

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the models that are adapters."""
        return self.models - self.base_models

    def serves_base(self, base_model: str) -> bool:
        """Tell whether a base model is served; folders of models have its name."""
        return _last_part(base_model) in map(_last_part, self.base_models)


def served_by(url: str) -> Served:
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
    return Served(
        models=frozenset(str(each.get("id")) for each in models),
        base_models=frozenset(
            str(each[key]) for each in without_parent for key in ("id", "root") if each.get(key)
        ),
        max_loras=next(slots, None),
    )


def _models(url: str) -> list[Mapping[str, Any]]:
    rule = "is not understood: a URL must be that of an OpenAI-compatible server, with /v1/models"
    try:
        document = parse_json(_fetched(url), url)
    except InputError as error:
        if "cannot be reached" in error.rule:
            raise
        raise InputError(rule, location=url) from None
    data = document.get("data") if isinstance(document, Mapping) else None
    if not isinstance(data, list):
        raise InputError(rule, location=url)
    return [each for each in data if isinstance(each, Mapping)]


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


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
