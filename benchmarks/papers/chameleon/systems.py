"""Systems of Chameleon's evaluation by name: a scheduler and an adapter cache each.

What the paper does not say, fixed before systems were compared: the output predictor is right for 80 % of the
requests (5.4.1); all but S-LoRA admit at every step; shortest-job-first goes by arrival once a request has
waited for the SLO.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.papers.chameleon.setting import SLO_S

Fields = Mapping[str, Any]

PREDICTOR: Final = {"kind": "classes", "accuracy": 0.8}
_CADENCE: Final = 10


@dataclass(frozen=True)
class System:
    """Scheduler and cache as in a workload file."""

    scheduler: Fields
    cache: Fields

    def predicting(self, accuracy: float) -> System:
        return self.replace(predictor={"kind": "classes", "accuracy": accuracy})

    def replace(self, **scheduler: Any) -> System:
        return System({**self.scheduler, **scheduler}, self.cache)


_NONE: Final = {"policy": "none"}
_CACHE: Final = {"policy": "chameleon", "prefetch": "queue"}
_CHAMELEON: Final = {"policy": "chameleon", "predictor": PREDICTOR}
_CHAMELEON_SYSTEM: Final = System(_CHAMELEON, _CACHE)
_OUTPUT_ONLY: Final = _CHAMELEON_SYSTEM.replace(queues={"size": "output_only"})

SYSTEMS: Final[Mapping[str, System]] = {
    "slora": System({"policy": "slora"}, _NONE),
    "slora-every-step": System({"policy": "slora-every-step"}, _NONE),
    "sjf": System(
        {"policy": "sjf", "admit_every": _CADENCE, "ageing_s": SLO_S, "predictor": PREDICTOR}, _NONE
    ),
    "chunked": System({"policy": "fifo", "chunked": True}, _NONE),
    "no-cache": System(_CHAMELEON, _NONE),
    "no-sched": System({"policy": "fifo"}, _CACHE),
    "no-sched-ten-steps": System({"policy": "fifo", "admit_every": _CADENCE}, _CACHE),
    "chameleon": _CHAMELEON_SYSTEM,
    "chameleon-ten-steps": System({**_CHAMELEON, "admit_every": _CADENCE}, _CACHE),
    "chameleon-uncharged": System({**_CHAMELEON, "queues": {"adapter_charge": "none"}}, _CACHE),
    "chameleon-chunked": System({**_CHAMELEON, "chunked": True}, _CACHE),
    "chameleon-lru": System(_CHAMELEON, {**_CACHE, "policy": "lru"}),
    "chameleon-fairshare": System(_CHAMELEON, {**_CACHE, "policy": "fairshare"}),
    "chameleon-gdsf": System(_CHAMELEON, {**_CACHE, "policy": "gdsf"}),
    "chameleon-histogram": System(_CHAMELEON, {**_CACHE, "prefetch": "histogram"}),
    "static": System({**_CHAMELEON, "policy": "static"}, _CACHE),
    "predictor-100": _CHAMELEON_SYSTEM.predicting(1.0),
    "predictor-60": _CHAMELEON_SYSTEM.predicting(0.6),
    "predictor-0": _CHAMELEON_SYSTEM.predicting(0.0),
    "output-only": _OUTPUT_ONLY,
    "output-only-100": _OUTPUT_ONLY.predicting(1.0),
    "output-only-60": _OUTPUT_ONLY.predicting(0.6),
}
