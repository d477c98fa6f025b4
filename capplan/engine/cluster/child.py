"""An engine process: told by its parent what to serve, and ending when its parent does.

``python -m capplan.engine.cluster.child`` reads a line of JSON from its standard input and keeps it open:
when the parent dies, however it does, the system closes the other end, and this process ends. It answers with
one line of JSON, ``{"url": ...}`` once requests are taken, or ``{"error": [rule, value, location]}``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from capplan.errors import InputError, NoValue


def main() -> int:
    """Serve until told to stop; see `capplan.engine.server.run_instance`."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed must not be taken for an answer

    def answer(document: dict[str, Any]) -> None:
        os.write(answers, json.dumps(document).encode() + b"\n")

    fields = json.loads(_first_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from capplan.engine.server import Instance, ServerSettings, run_instance  # after somebody watches

    try:
        adapters = {name: Path(at) if isinstance(at, str) else at for name, at in fields["adapters"].items()}
        instance = Instance(fields["model"], ServerSettings(**fields["server"]), adapters, fields["engine"])
        return run_instance(instance, lambda url: answer({"url": url}))
    except InputError as error:
        value = [] if isinstance(error.value, NoValue) else [str(error.value)]
        answer({"error": [error.rule, value, error.location]})
        return error.exit_code


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 2**16)
        if not part:
            sys.exit(1)
        line += part
    return line


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)  # nobody is left who could receive an answer


if __name__ == "__main__":
    sys.exit(main())
