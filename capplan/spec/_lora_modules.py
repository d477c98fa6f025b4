"""Linear layers that LoRA adapters target, by the names that PEFT gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BeforeValidator

from capplan.spec._validation import rule_error

LORA_MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION_MODULES: Final = LORA_MODULES[:4]
"""Linear layers of a transformer layer; vLLM wraps them all."""

ALL_LINEAR: Final = "all-linear"
"""PEFT's word for all of them."""

ADAPTER_CONFIG: Final = "adapter_config.json"


def module_sizes(hidden: int, inner: int, query: int, kv: int) -> tuple[tuple[int, int], ...]:
    """Return (in, out) of each of `LORA_MODULES`, by the widths of residual stream, MLP, queries and keys."""
    attention = ((hidden, query), (hidden, kv), (hidden, kv), (query, hidden))
    return (*attention, (hidden, inner), (hidden, inner), (inner, hidden))


_RULE: Final = f"must be {ALL_LINEAR} or a list of {', '.join(LORA_MODULES)}, each at most once"


def _target_modules(value: Any) -> tuple[str, ...]:
    if value == ALL_LINEAR:
        return LORA_MODULES
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise rule_error(_RULE)
    for at, name in enumerate(value):
        if name not in LORA_MODULES or name in value[:at]:
            raise rule_error(_RULE, key=(at,), value=name)
    return tuple(name for name in LORA_MODULES if name in value)


TargetModules: TypeAlias = Annotated[
    tuple[str, ...],
    BeforeValidator(_target_modules, json_schema_input_type=list[str] | str),
]
"""Names of `LORA_MODULES` in their order."""


def _target_modules_source(value: Any) -> tuple[str, ...] | str:
    return ADAPTER_CONFIG if value == ADAPTER_CONFIG else _target_modules(value)


TargetModulesSource: TypeAlias = Annotated[
    tuple[str, ...] | str,
    BeforeValidator(_target_modules_source, json_schema_input_type=list[str] | str),
]
"""`TargetModules`, or the name of the file that holds them."""
