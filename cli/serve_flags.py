"""Settings of the reference engine and its server by the flags of `capplan serve` that set them."""

from __future__ import annotations

from typing import Final

from capplan.errors import InputError

_FLAGS: Final = {
    "a_max": "--max-loras",
    "s_max": "--max-lora-rank",
    "served_model_name": "--served-model-name",
    "adapters": "--lora-modules",
}
"""Flags that are not called as the settings that they set."""


def of_flag(error: InputError) -> InputError:
    """Name the flag instead of the setting that it sets."""
    flag = _FLAGS.get(error.location, f"--{error.location.replace('_', '-')}")
    is_setting = error.location.isidentifier()
    return InputError(error.rule, error.value, flag if is_setting else error.location)
