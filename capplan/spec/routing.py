"""Routers that workloads and plans name."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator

from capplan.spec.validation import rule_error

PLAN_ROUTER: Final = "smooth-shares"
"""Router of a plan that names none: smooth weighted round robin over the plan's shares."""

STATE_PERIOD_S: Final = 0.25
"""Time between reports of an instance to the router of `capplan serve PLAN`, and of the verification."""

BYTES_PER_TOKEN: Final = 4
"""Bytes of the body of a request per token of its prompt, an estimate before it is tokenized."""

MEAN_LENGTHS: Final = ("mean_prompt_tokens", "mean_output_tokens")
"""Entries of a plan's provenance by which the models of its router are fitted."""

ROUTER_NAMES: Final = (
    *("plan-shares", "smooth-shares", "random", "round-robin", "least-loaded", "least-tokens", "two-choices"),
    *("first-fit", "lora-affinity", "inference-gateway", "dlora", "toppings", "toppings-rank-blind"),
    "least-work-left",
)


def _known(value: Any) -> Any:
    if isinstance(value, str) and value not in ROUTER_NAMES:
        raise rule_error(f"must be one of {', '.join(ROUTER_NAMES)}", value=value)
    return value


RouterName = Annotated[str, BeforeValidator(_known)]

ROUTER: Final = (
    "Router in front of the GPUs, a name in `capplan.serving.routers.ROUTERS`; absent: smooth-shares, the "
    "plan's shares by smooth weighted round robin."
)
