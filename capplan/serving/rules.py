"""The serving rules by name: what differs between engine versions is a switch, never a second scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from capplan.errors import InputError


@dataclass(frozen=True)
class ServingRules:
    """The switches of one engine version.

    Parameters
    ----------
    name
        The name that profiles and plans use.
    reserve_full_sequence
        Admit a waiting request only if its whole known sequence fits into free KV blocks now
        (vLLM's ``scheduler_reserve_full_isl``, on since 0.20).
    reverse_set_aside
        Requests that were set aside because their adapter found no slot come back in reversed order
        (vLLM 0.9.2 to 0.13); otherwise they keep their order.
    watermark
        Share of the KV blocks that must stay free when a request is admitted while others run (vLLM 0.27 and
        later).
    long_prefill_tokens
        Most prompt tokens of one request in one step; 0 switches the limit off
        (vLLM's ``long_prefill_token_threshold``).
    """

    name: str
    reserve_full_sequence: bool = False
    reverse_set_aside: bool = False
    watermark: float = 0.0
    long_prefill_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise InputError(rule="must be in [0, 1)", value=self.watermark, location="rules.watermark")
        if self.long_prefill_tokens < 0:
            raise InputError(
                rule="must be >= 0", value=self.long_prefill_tokens, location="rules.long_prefill_tokens"
            )


RULES: tuple[ServingRules, ...] = (
    ServingRules("vllm-0.8"),
    ServingRules("vllm-0.11", reverse_set_aside=True),
)
"""Every named set of rules; sources in the docstring of `capplan.serving.scheduler`."""


def serving_rules(name: str) -> ServingRules:
    """Return the rules called `name`.

    Raises
    ------
    InputError
        When no rules have that name; the message lists the names.
    """
    for rules in RULES:
        if rules.name == name:
            return rules
    raise InputError(rule=f"must be one of {', '.join(r.name for r in RULES)}", value=name, location="rules")
