"""Options of `capplan profile engine`."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from capplan.errors import InputError
from capplan.spec import EngineArgs, EngineConfig

MEMORY: Final = "memory"
LOADS: Final = "loads"
STEPS: Final = "steps"
ITERATIONS: Final = "iterations"
SERVED: Final = "served"
STAGES: Final = (MEMORY, LOADS, STEPS, ITERATIONS, SERVED)
"""In the order of measurement."""
_WEIGHTS: Final = MappingProxyType({STEPS: 0.15, ITERATIONS: 0.05, SERVED: 0.8})
"""Time shares of the stages that use all of their time."""
_LIMITS: Final = MappingProxyType(
    {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 2048, "gpu_memory_utilization": 0.9}
)
"""Engine settings that all stages share, with the values of those left open."""
_SHARED: Final = ("device", "dtype", "rules", "lora_kernel", "seed")
"""Further settings of `Engine`, among the options."""


class SlotSetting(NamedTuple):
    """Adapter slots of an engine, and their rank."""

    a_max: int
    s_max: int

    @property
    def name(self) -> str:
        return f"a{self.a_max}-s{self.s_max}"


@dataclass(frozen=True)
class EngineProfilingOptions:
    """Engine, settings and time of a measurement; settings of the engine have its names."""

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    rules: str = "capplan"
    lora_kernel: str | None = None
    a_max: tuple[int, ...] = (8,)
    """Adapter slots; steps are measured with each number and each rank of slots."""
    s_max: tuple[int, ...] = (32,)
    ranks: tuple[int, ...] = (8, 16, 32)
    """Ranks of adapters; each has as many adapters as the largest number of slots."""
    engine: EngineConfig = EngineConfig()
    """Limits of the engine; those left open: batches of 32, steps of 512 tokens, requests of 2048."""
    memory_bytes: int | None = None
    """Memory of a CPU engine; None: weights, the largest slots and 256 MiB of KV."""
    threads: int = 1
    """Threads of PyTorch on a CPU."""
    cpu_affinity: str = "auto"
    """CPUs of the server's engine core, as for `capplan serve`."""
    stages: tuple[str, ...] = STAGES
    budget_s: float = 600.0
    point_s: float = 2.0
    """Time per operating point of the server."""
    tolerance: float = 0.02
    """Relative error on left-out points at which measuring steps ends."""
    seed: int = 0
    """Seed of weights, adapters and the order of points."""

    def __post_init__(self) -> None:
        for name in ("a_max", "s_max", "ranks"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise InputError("must be whole numbers >= 1", values, name)
        if max(self.ranks) > max(self.s_max):
            raise InputError(f"must reach the largest rank, {max(self.ranks)}", max(self.s_max), "s_max")
        if min(self.s_max) < min(self.ranks):
            rule = f"must each hold an adapter: the smallest rank is {min(self.ranks)}"
            raise InputError(rule, min(self.s_max), "s_max")
        for each in self.stages:
            if each not in STAGES:
                raise InputError(f"must be some of {', '.join(STAGES)}", each, "stages")
        if not self.budget_s >= 0.0:
            raise InputError("must be >= 0", self.budget_s, "budget_s")

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    @property
    def limits(self) -> dict[str, Any]:
        """The engine settings that all stages share."""
        return {**_LIMITS, **self.engine.given}

    @property
    def widest(self) -> EngineArgs:
        """The engine settings with the most slots of the largest rank."""
        return self.engine_args(SlotSetting(max(self.a_max), max(self.s_max)))

    def engine_fields(self, **more: Any) -> dict[str, Any]:
        """Return the settings of `Engine` that all stages share, and `more`."""
        return {name: getattr(self, name) for name in _SHARED} | self.limits | more

    def engine_args(self, slots: SlotSetting) -> EngineArgs:
        """Return the engine settings with these slots."""
        return EngineArgs(max_loras=slots.a_max, max_lora_rank=slots.s_max, **self.limits)

    def fitting(self, s_max: int) -> tuple[int, ...]:
        """Return the ranks that fit into slots of this rank, in the given order."""
        return tuple(rank for rank in self.ranks if rank <= s_max)

    def adapters(self, slots: SlotSetting) -> dict[str, int]:
        """Return adapters by name and rank: enough of each fitting rank to fill the slots."""
        return {f"r{rank}-{i}": rank for rank in self.fitting(slots.s_max) for i in range(slots.a_max)}

    def share(self, stage: str) -> float:
        """Return the share of the remaining time for a stage.

        Only requested stages count: the last of those that use all of their time gets the rest. Other stages
        have no limit.
        """
        if stage not in _WEIGHTS:
            return 1.0
        left = STAGES[STAGES.index(stage) :]
        return _WEIGHTS[stage] / sum(
            _WEIGHTS.get(each, 0.0) for each in left if each in self.stages or each == stage
        )
