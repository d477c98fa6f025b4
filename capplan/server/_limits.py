"""Limits of a server: sizes, counts and times of requests and connections."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from capplan.errors import InputError
from capplan.processes import open_file_limit
from capplan.spec import is_printable

_MIB: Final = 2**20
_BYTES_PER_TOKEN: Final = 16
"""Of a request body: a token id in JSON takes up to 8 bytes, a token of escaped text up to 12."""
_BUFFERED_BODIES: Final = 64
_MOST_CONNECTIONS: Final = 8192
"""Default cap: an idle connection costs about 10 kB."""
_RESERVED_FILES: Final = 64
"""For the engine core, libraries, and adapters being loaded."""
OPEN_ADAPTERS: Final = 1000
"""Adapter numbers reserved if adapters come at run time; each costs some dozen bytes."""
_MAX_NAME_LENGTH: Final = 256
NAME_RULE: Final = f"must be 1 to {_MAX_NAME_LENGTH} printable characters"


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server, the same for a single server and a router.

    Parameters
    ----------
    max_body_bytes
        Maximum size of a request body; None: the larger of 1 MiB and 16 bytes per token of ``max_model_len``.
    body_timeout_s
        Maximum time for a whole body.
    max_buffered_bytes
        Maximum size of all requests together that are not complete, or not passed on yet; the oldest
        incomplete ones are refused first. None: 64 bodies, at least 64 MiB.
    max_header_bytes, max_header_count
        Maximum size of request line and headers, and number of headers.
    header_timeout_s
        Maximum time for complete headers, and for the rest of a body that is refused.
    client_buffer_bytes
        Size of a client's buffer. A response that fits into it has ended for the engine, whether or not its
        client reads.
    send_timeout_s
        Maximum time for a client to read three quarters of its full buffer; it is disconnected then.
    max_connections
        Maximum number of open connections; beyond it the one that has waited longest for a request gets 503,
        or is closed if it is idle. None: by the limit of open files, at most 8192.
    chat_template_timeout_s
        Maximum time in which the model's chat template turns a conversation into a prompt.
    lora_timeout_s
        Maximum time to load or unload an adapter.

    Raises
    ------
    InputError
        If a limit is out of range.
    """

    max_body_bytes: int | None = None
    body_timeout_s: float = 60.0
    max_buffered_bytes: int | None = None
    max_header_bytes: int = 64 * 1024
    max_header_count: int = 100
    header_timeout_s: float = 15.0
    client_buffer_bytes: int = 512 * 1024
    send_timeout_s: float = 30.0
    max_connections: int | None = None
    chat_template_timeout_s: float = 2.0
    lora_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s"):
                if not 0 < value < math.inf:
                    raise InputError("must be a finite number > 0", value, field.name)
            elif value is not None and value < 1:
                raise InputError("must be >= 1", value, field.name)
        if (self.max_buffered_bytes or math.inf) < (self.max_body_bytes or _MIB):
            rule = f"must be at least max_body_bytes, {self.max_body_bytes or _MIB}"
            raise InputError(rule, self.max_buffered_bytes, "max_buffered_bytes")

    def body_bytes(self, max_model_len: int) -> int:
        """Return the maximum size of a request body."""
        return self.max_body_bytes or max(_MIB, _BYTES_PER_TOKEN * max_model_len)

    def buffered_bytes(self, max_model_len: int) -> int:
        """Return the maximum size of all incomplete requests together."""
        return self.max_buffered_bytes or _BUFFERED_BODIES * max(_MIB, self.body_bytes(max_model_len))

    def connections(self, files_each: int = 1) -> int:
        """Return the maximum number of connections.

        Parameters
        ----------
        files_each
            Open files of the server per connection: a router has a second one, to the instance.
        """
        available = max(1, (open_file_limit() - _RESERVED_FILES) // files_each)
        return min(available, self.max_connections or _MOST_CONNECTIONS)


def is_name(name: str) -> bool:
    """Return whether a model or adapter may have a name, which metrics, logs and terminals show."""
    return 1 <= len(name) <= _MAX_NAME_LENGTH and is_printable(name)
