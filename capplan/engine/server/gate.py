"""What a request must pass before anything of its body is read: key, size, room in the queue."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capplan.engine.server.api_error import ApiError
from capplan.engine.server.settings import ServerSettings

GENERATING = ("/v1/completions", "/v1/chat/completions")


class Gate:
    """ASGI middleware.

    Parameters
    ----------
    app
        What lies behind it.
    settings
        Key and size.
    refuse
        Raises when no further prompt is taken.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, refuse: Callable[[], None]) -> None:
        self._app = app
        self._most_bytes = settings.max_body_bytes
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"].startswith("/v1/") and not self._has_key(headers):
            raise ApiError(
                401, "A valid API key is required", None, "invalid_api_key", {"WWW-Authenticate": "Bearer"}
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._most_bytes:
            raise self._too_large()
        if scope["method"] == "POST" and scope["path"] in GENERATING:
            self._refuse()

    def _has_key(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Compared in a time that tells nothing of where they differ.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key)

    def _bounded(self, receive: Receive) -> Receive:
        """Return a `receive` that stops a body which grows too large; a length need not be declared."""
        total = 0

        async def bounded() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._most_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body must not be larger than {self._most_bytes} bytes", code="too_large")
