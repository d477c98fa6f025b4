"""Parts of capplan that need more than its base install."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

from capplan.errors import InputError

ENGINE: Final = ("fastapi", "prometheus_client", "safetensors", "tokenizers", "torch", "uvicorn")


def require_extra(extra: str, modules: Sequence[str]) -> None:
    """Check that an extra is installed, without importing anything of it.

    Raises
    ------
    InputError
        When one of its modules is missing; the message says what to install.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise InputError(f"is missing: pip install 'capplan[{extra}]'", missing, f"extra {extra!r}")
