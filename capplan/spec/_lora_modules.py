"""Layers that LoRA adapters target, by the names that PEFT gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BeforeValidator

from capplan.spec._validation import rule_error

LORA_MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION_MODULES: Final = LORA_MODULES[:4]
"""Linear layers of a transformer layer; vLLM wraps them all."""

EMBEDDING_MODULES: Final = ("embed_tokens", "lm_head")
"""Embedding and output head of a model, beside its layers."""

ALL_MODULES: Final = LORA_MODULES + EMBEDDING_MODULES
"""Everything that an adapter may target, in the order in which it is listed."""

FUSED_MODULES: Final = MappingProxyType({"qkv_proj": LORA_MODULES[:3], "gate_up_proj": LORA_MODULES[4:6]})
"""Parts of the layers that models such as Phi-3 fuse; an adapter of them has one A for a fused layer."""

ALL_LINEAR: Final = "all-linear"
"""PEFT's word for `LORA_MODULES`."""

ADAPTER_CONFIG: Final = "adapter_config.json"


def module_sizes(hidden: int, inner: int, query: int, kv: int) -> tuple[tuple[int, int], ...]:
    """Return (in, out) of each of `LORA_MODULES`, by the widths of residual stream, MLP, queries and keys."""
    attention = ((hidden, query), (hidden, kv), (hidden, kv), (query, hidden))
    return (*attention, (hidden, inner), (hidden, inner), (inner, hidden))


def parts_of_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Return `ALL_MODULES` among names of PEFT, those that a fused layer holds included, in their order."""
    parts = {part for name in names for part in FUSED_MODULES.get(name, (name,))}
    return tuple(name for name in ALL_MODULES if name in parts)


_NAMES: Final = (*ALL_MODULES, *FUSED_MODULES)
_RULE: Final = f"must be {ALL_LINEAR} or a list of {', '.join(_NAMES)}, each at most once"


def _target_modules(value: Any) -> tuple[str, ...]:
    if value == ALL_LINEAR:
        return LORA_MODULES
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise rule_error(_RULE)
    for at, name in enumerate(value):
        if name not in _NAMES or name in value[:at]:
            raise rule_error(_RULE, key=(at,), value=name)
    return parts_of_modules(value)


TargetModules: TypeAlias = Annotated[
    tuple[str, ...],
    BeforeValidator(_target_modules, json_schema_input_type=list[str] | str),
]
"""Names of `ALL_MODULES` in their order; a fused layer is given for its parts."""


def _target_modules_source(value: Any) -> tuple[str, ...] | str:
    return ADAPTER_CONFIG if value == ADAPTER_CONFIG else _target_modules(value)


TargetModulesSource: TypeAlias = Annotated[
    tuple[str, ...] | str,
    BeforeValidator(_target_modules_source, json_schema_input_type=list[str] | str),
]
"""`TargetModules`, or the name of the file that holds them."""
