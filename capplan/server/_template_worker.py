"""Process that renders chat templates: ``python template_worker.py`` with a socket as standard input.

A template comes with the model and is not trusted. Jinja's sandbox keeps it from files and from Python's
internals, but not from endless loops and large strings, and a thread cannot be ended. This process has a
limit of memory, and the kernel ends it when a template exceeds its time.

A message is JSON after its length in four bytes. The first one has the template, the others a conversation
each; the replies have a `text`, or an `error`. The module imports nothing of capplan, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, BinaryIO, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH_BYTES: Final = 4
_MAX_MEMORY_BYTES: Final = 2**30
_MAX_ERROR: Final = 300  # characters
_NICENESS: Final = 5  # an endless template takes a quarter of a busy core, not half of it


def compiled(source: str) -> Template:
    """Return a template, with the functions that `transformers` provides."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(source)


def rendered(template: Template, context: dict[str, Any], max_characters: int) -> str:
    """Return the text of a template; if it is too long, raise `TemplateError`."""
    parts, characters = [], 0
    for part in template.generate(context):
        parts.append(part)
        characters += len(part)
        if characters > max_characters:
            raise TemplateError(f"its text has more than {max_characters} characters")
    return "".join(parts)


def main() -> None:
    """Answer messages until the other end is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    connection = socket.socket(fileno=0)
    reader = connection.makefile("rb")
    settings = _received(reader)
    if settings is None:
        return
    template: Template | None = None
    message: dict[str, Any] | None = {}
    while message is not None:
        signal.setitimer(signal.ITIMER_REAL, settings["timeout_s"])  # its signal ends the process
        try:
            if template is None:
                template = compiled(settings["source"])
                reply = {"text": ""}
            else:
                reply = {"text": rendered(template, message, settings["max_characters"])}
        except MemoryError:
            reply = {"error": f"it needs more than {_MAX_MEMORY_BYTES} bytes"}
        except Exception as error:  # noqa: BLE001 - of a template that is not trusted
            reply = {"error": (str(error) or type(error).__name__)[:_MAX_ERROR]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.sendall(framed(reply))
        message = _received(reader)


def _received(reader: BinaryIO) -> dict[str, Any] | None:
    """Return the next message; None at the end."""
    size = int.from_bytes(reader.read(LENGTH_BYTES), "big")
    data = reader.read(size)
    is_whole = 0 < size == len(data)
    message: dict[str, Any] | None = json.loads(data) if is_whole else None
    return message


def framed(message: Mapping[str, Any]) -> bytes:
    """Return a message after its length."""
    data = json.dumps(message).encode()
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own filter escapes HTML


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
        sys.exit(1)
