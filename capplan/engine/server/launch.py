"""One instance from its settings: load, warm up, listen, serve."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capplan.engine.engine import Engine
from capplan.engine.request import SamplingParams
from capplan.engine.server.process import bind, serve, url_of
from capplan.engine.server.record_file import RecordFile
from capplan.engine.server.service import Service
from capplan.engine.server.settings import ServerSettings

AdapterSources = Mapping[str, str | Path | int]
"""Name to a folder that PEFT wrote, or to the rank of a random adapter."""


@dataclass(frozen=True)
class Instance:
    """One engine with its server, as settings.

    Attributes
    ----------
    model, adapters
        As `Engine` takes them.
    engine
        Fields of `EngineSettings`, but for `max_in_flight`, which follows from the server's.
    server
        The server's.
    records
        Where to write what every step did, as Parquet; None: nowhere.
    """

    model: str
    server: ServerSettings
    adapters: AdapterSources = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    records: Path | None = None


def run_instance(instance: Instance, ready: Callable[[str], None]) -> int:
    """Serve until told to stop.

    Parameters
    ----------
    instance
        What to serve.
    ready
        Called with the URL once requests are taken.

    Returns
    -------
    int
        Exit status: 0 when told to stop, 1 when the engine broke down.
    """
    settings = instance.server
    with contextlib.ExitStack() as stack:
        listener: socket.socket = stack.enter_context(bind(settings.host, settings.port))
        fields = {**instance.engine, "max_in_flight": settings.max_requests}
        engine = stack.enter_context(Engine(instance.model, instance.adapters, **fields))
        warm_up(engine)
        watchers = []
        if instance.records is not None:
            watchers.append(stack.enter_context(RecordFile(instance.records)))
        service = Service(engine, settings, instance.adapters, watchers)
        return serve(service, listener, lambda: ready(url_of(listener)))


def warm_up(engine: Engine) -> None:
    """Capture graphs, and run and end a few requests, so that nobody's first one waits for compilation."""
    engine.loop.prepare()
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, logprobs=1)
    for adapter in (None, *engine.adapters[:1]):
        requests = [engine.new_request([0], adapter, params) for _ in range(4)]
        for request in requests:
            engine.submit(request)
        engine.abort(requests[0])  # while it waits ...
        while engine.step() is not None or engine.wait_for_adapter():
            engine.abort(requests[1])  # ... and while it runs
    engine.records.clear()
