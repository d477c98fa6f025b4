"""What a validation is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from capplan.errors import InputError


@dataclass(frozen=True)
class Tolerances:
    """Largest SMAPE, in percent, with which prediction and measurement agree."""

    throughput: float = 3.0
    itl: float = 8.0

    def __post_init__(self) -> None:
        for name in ("throughput", "itl"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InputError("must be a number >= 0", getattr(self, name), name)


@dataclass(frozen=True)
class Options:
    """How a plan is validated.

    Attributes
    ----------
    duration_s
        Measured time, and the twin's horizon; both start with an empty engine.
    rate_scale
        What rates are multiplied by.
    seed
        Of arrivals and lengths, for server and twin alike.
    groups
        Groups to validate; none: all.
    urls
        Running servers by group; the groups that are not named get a server of their own.
    model
        What servers that are started run, as `capplan serve` takes it; None: the plan's base model.
    dtype, device, threads, lora_kernel
        Of servers that are started; None: the server's default.
    engine_args
        Engine settings that stand before the plan's, by their names there.
    api_key
        For running servers.
    tolerances
        Up to where both agree.
    """

    duration_s: float = 120.0
    rate_scale: float = 1.0
    seed: int = 0
    groups: tuple[str, ...] = ()
    urls: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    threads: int = 1
    lora_kernel: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    tolerances: Tolerances = field(default_factory=Tolerances)

    def __post_init__(self) -> None:
        for name in ("duration_s", "rate_scale"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InputError("must be a finite number above 0", getattr(self, name), name)
