"""The serving rules: pure functions over flat arrays, which engine and twin call once a step."""

from capplan.serving._memory import adapter_bytes, adapter_pages, kv_bytes_per_token, slot_bytes, weight_bytes
from capplan.serving._rules import RULES, ServingRules, serving_rules
from capplan.serving._scheduler import can_run, commit, finish, schedule, submit
from capplan.serving.state import NONE, Limits, State, new_state
from capplan.serving.vllm._adapter_slots import adapter_loaded

__all__ = [
    "NONE",
    "RULES",
    "Limits",
    "ServingRules",
    "State",
    "adapter_bytes",
    "adapter_loaded",
    "adapter_pages",
    "can_run",
    "commit",
    "finish",
    "kv_bytes_per_token",
    "new_state",
    "schedule",
    "serving_rules",
    "slot_bytes",
    "submit",
    "weight_bytes",
]
