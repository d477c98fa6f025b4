"""Engine settings, named as vLLM's flags."""

from __future__ import annotations

import functools
import re
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, Self, TypeAlias

from pydantic import Field, Strict, model_validator

from capplan.errors import InputError
from capplan.spec._validation import (
    LORA_RANKS,
    Count,
    Flag,
    LoraRank,
    Natural,
    SpecModel,
    rule,
    rule_error,
)

DEFAULT_MAX_NUM_SEQS: Final = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS: Final = 2048
DEFAULT_MAX_MODEL_LEN: Final = 8192
DEFAULT_GPU_MEMORY_UTILIZATION: Final = 0.9
ENGINE_DEFAULTS: Final[MappingProxyType[str, Any]] = MappingProxyType(
    {
        "max_num_seqs": DEFAULT_MAX_NUM_SEQS,
        "max_num_batched_tokens": DEFAULT_MAX_NUM_BATCHED_TOKENS,
        "gpu_memory_utilization": DEFAULT_GPU_MEMORY_UTILIZATION,
    }
)
"""Defaults of settings that do not depend on the model or its adapters."""

_NUMBER: Final = r"(\d{1,9})"
_VERSION: Final = re.compile(
    rf"{_NUMBER}\.{_NUMBER}(?:\.{_NUMBER})?(?:\.\d+)*(?:\.?(?:rc|dev|post)\d+)*(?:\+[\w.]+)?"
)


@functools.cache
def version_numbers(version: str) -> tuple[int, ...]:
    """Return the two or three numbers of a version without its suffix, such as (0, 8, 5) of 0.8.5.post1.

    Raises
    ------
    InputError
        If it is not two or more numbers, with suffixes such as rc1, .dev3, .post1 and +cu128 or without.
    """
    found = _VERSION.fullmatch(version)
    if found is None:
        raise InputError("must be a version such as 0.11.0", version, "engine_version")
    return tuple(int(number) for number in found.groups() if number is not None)


SlotRank: TypeAlias = Annotated[
    int,
    Strict(),
    Field(ge=0, json_schema_extra={"enum": [0, *LORA_RANKS]}),
    rule("must be a whole number >= 0"),
]
Utilization: TypeAlias = Annotated[
    float, Strict(), Field(gt=0, le=1), rule("must be a number above 0 and at most 1, such as 0.9")
]


class EngineArgs(SpecModel):
    """Engine settings of one instance; planner, twin, engine and exporters all take this type.

    A plan holds only ranks that vLLM allows; the twin and the reference engine take any.
    ``max_loras`` 0 is an engine without LoRA, which serves the base model alone.
    """

    max_loras: Natural = Field(description="Adapter slots in GPU memory (A_max); 0: an engine without LoRA.")
    max_lora_rank: SlotRank = Field(description="Rank every slot is sized for (S_max); 0 without slots.")
    max_cpu_loras: Count | None = Field(
        default=None, description="Adapters kept in host memory; unset: all of them."
    )
    max_num_seqs: Count = Field(description="Most requests running at once.")
    max_num_batched_tokens: Count = Field(description="Most tokens computed in one step.")
    gpu_memory_utilization: Utilization = Field(description="Share of GPU memory the engine may use.")
    max_model_len: Count = Field(description="Longest prompt + output, in tokens.")
    enable_prefix_caching: Flag | None = Field(
        default=None,
        description="Whether KV of shared prompt beginnings is kept; null: the engine's default.",
    )

    @model_validator(mode="after")
    def _rank_of_slots(self) -> Self:
        for name, other in (("max_loras", "max_lora_rank"), ("max_lora_rank", "max_loras")):
            if getattr(self, name) == 0 and getattr(self, other) > 0:
                rule = f"must be a whole number >= 1, unless {other} is 0 as well"
                raise rule_error(rule, key=(name,), value=0)
        return self

    def flags(self) -> list[tuple[str, ...]]:
        """Return the settings as flags of `vllm serve` and `capplan serve`, each with its value."""
        found: list[tuple[str, ...]] = []
        for field, value in self:
            if self.max_loras == 0 and field in ("max_loras", "max_lora_rank", "max_cpu_loras"):
                continue
            name = field.replace("_", "-")
            if isinstance(value, bool):
                found.append((f"--{name}" if value else f"--no-{name}",))
            elif value is not None:
                found.append((f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)))
        return found


class EngineLimits(NamedTuple):
    """Engine settings that KV memory and speed depend on, named as in `EngineArgs`; for compiled code too."""

    max_loras: float
    max_lora_rank: float
    max_num_seqs: float
    max_num_batched_tokens: float


def _open(name: str) -> Any:
    return Field(default=None, description=EngineArgs.model_fields[name].description)


class EngineConfig(SpecModel):
    """Engine settings that a workload fixes; an absent one is the planner's choice."""

    max_num_seqs: Count | None = _open("max_num_seqs")
    max_num_batched_tokens: Count | None = _open("max_num_batched_tokens")
    max_model_len: Count | None = _open("max_model_len")
    gpu_memory_utilization: Utilization | None = _open("gpu_memory_utilization")
    max_loras: Count | None = _open("max_loras")
    max_lora_rank: LoraRank | None = _open("max_lora_rank")
    max_cpu_loras: Count | None = _open("max_cpu_loras")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for small, large in (("max_loras", "max_cpu_loras"), ("max_num_seqs", "max_num_batched_tokens")):
            low, high = getattr(self, small), getattr(self, large)
            if low is not None and high is not None and high < low:
                raise rule_error(f"must be at least {small}, which is {low}", key=(large,), value=high)
        return self

    @property
    def given(self) -> dict[str, int | float]:
        """The settings that are fixed, by name."""
        return {name: value for name, value in self if value is not None}

    def complete(
        self,
        max_loras: int = 1,
        max_lora_rank: int = 16,
        max_model_len: int = DEFAULT_MAX_MODEL_LEN,
    ) -> EngineArgs:
        """Return the settings with defaults for those left open.

        A step needs a token for every running request: an open value gives way to a fixed one.

        Parameters
        ----------
        max_loras, max_lora_rank, max_model_len : int
            Slots, their rank, and the limit of prompt and output, if left open.
        """
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        return EngineArgs(
            max_loras=self.max_loras or max_loras,
            max_lora_rank=self.max_lora_rank or max_lora_rank,
            max_cpu_loras=self.max_cpu_loras,
            max_num_seqs=seqs or min(DEFAULT_MAX_NUM_SEQS, tokens or DEFAULT_MAX_NUM_SEQS),
            max_num_batched_tokens=tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, seqs or 0),
            gpu_memory_utilization=self.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION,
            max_model_len=self.max_model_len or max_model_len,
        )
