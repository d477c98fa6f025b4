"""The settings of a server, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capplan.errors import InputError


@dataclass(frozen=True)
class ServerSettings:
    """How an engine is offered to others.

    Parameters
    ----------
    host, port
        Where to listen; port 0 is any free one.
    api_key
        What clients must bring as ``Authorization: Bearer KEY`` to everything under ``/v1/``; None: nothing.
    model_name
        What the base model is called.
    lora_root
        The folder that adapters loaded at run time must be in; None: none can be loaded.
    max_requests
        Most prompts in the engine, running and waiting; further ones are refused with 429.
    max_body_bytes
        Largest request body.
    drain_timeout_s
        How long running requests may go on after SIGTERM.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    lora_root: Path | None = None
    max_requests: int = 1024
    max_body_bytes: int = 8 * 2**20
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise InputError("must be a port from 0 to 65535", self.port, "port")
        if self.max_body_bytes < 1:
            raise InputError("must be >= 1", self.max_body_bytes, "max_body_bytes")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise InputError("must be a finite number >= 0", self.drain_timeout_s, "drain_timeout_s")
        if self.api_key == "":
            raise InputError("must not be empty", location="api_key")
        if not self.model_name:
            raise InputError("must not be empty", location="served_model_name")
        if self.lora_root is not None and not self.lora_root.is_dir():
            raise InputError("must be a folder", str(self.lora_root), "lora_root")
