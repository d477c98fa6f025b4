"""What a server tells of its engine at ``/metrics``: adapter slots, KV memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_CACHE: Final = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LORA: Final = re.compile(r"^vllm:lora_requests_info\{(.*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class EngineInfo:
    """None where the server does not say."""

    a_max: int | None = None
    kv_tokens: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None


def engine_info(metrics: str) -> EngineInfo:
    """Read a text in Prometheus' format."""
    cache, lora = (_labels(pattern, metrics) for pattern in (_CACHE, _LORA))
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
