"""Process of the engine core.

``python -m capplan.engine.core_process FD PARENT`` reads `CoreSettings` from the socket FD, builds the
engine, answers `CoreReady` or `CoreRefused`, and runs `CoreLoop` until the other end is closed. The end of
the process PARENT closes it, too; on Linux the kernel then also kills the core, in the midst of a step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from capplan.engine.affinity import bound_to, other_cpus
from capplan.engine.core_loop import AWAKE_S, CoreLoop
from capplan.engine.engine import Engine
from capplan.engine.messages import CoreReady, CoreRefused, CoreSettings, FrameReader, frame
from capplan.engine.request import SamplingParams
from capplan.errors import CapplanError
from capplan.processes import end_by_kernel_with, without_interrupts
from capplan.serving import NONE
from capplan.serving.pooled.refresh import compile_refresh

_COMMAND: Final = (sys.executable, "-m", "capplan.engine.core_process")
_STOP_TIMEOUT_S: Final = 5.0
"""For the current step; a core that is stopped or hangs is killed then."""
_RECEIVE_BYTES: Final = 2**16


class CoreEndedError(CapplanError):
    """The engine core ended while it was starting."""


class CoreProcess:
    """Handle of the engine core's process.

    Parameters
    ----------
    cpus
        CPUs that the core is bound to, before it counts them to choose its threads; none: any.

    Attributes
    ----------
    connection
        The server's end of the pair of sockets; no message is pending.
    ready
        Facts of the engine.

    Raises
    ------
    CapplanError
        If the engine refuses its settings.
    CoreEndedError
        If it ends for another reason.
    """

    def __init__(self, settings: CoreSettings, cpus: Sequence[int] = ()) -> None:
        self.connection, inherited = socket.socketpair()
        with inherited, bound_to(cpus), without_interrupts():
            command = (*_COMMAND, str(inherited.fileno()), str(os.getpid()))
            self._process = subprocess.Popen(command, pass_fds=[inherited.fileno()])  # noqa: S603 - ourselves
        try:
            self.connection.sendall(frame(settings._replace(beside_cpus=other_cpus(cpus) if cpus else ())))
            self.ready: CoreReady = self._first_message()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def stop(self) -> None:
        """Wait for the process, which ends once its connection is closed; kill it after a time."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process, if it still runs, and wait for it."""
        self._process.kill()
        self._process.wait()
        self.connection.close()

    def describe_end(self) -> str:
        """Return how the process ended."""
        status = self._process.wait()
        return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"

    def _first_message(self) -> CoreReady:
        reader = FrameReader()
        while data := self.connection.recv(_RECEIVE_BYTES):
            for message in reader.feed(data):
                if isinstance(message, CoreRefused):
                    raise message.error
                if isinstance(message, CoreReady):
                    return message
        raise CoreEndedError(f"the engine core ended {self.describe_end()} while it was starting")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; False where the system does not tell."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state == "T"


def warm_up(engine: Engine) -> None:
    """Capture graphs, run a few requests and compile the refresh, which would delay the first of each."""
    engine.core.runner.capture_graphs()
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, logprobs=1)
    for adapter in (None, *engine.adapters[:1]):
        # Requests without a time of arrival are in no window from which queues are designed.
        requests = [engine.new_request([0], adapter, params, arrival_ns=NONE) for _ in range(4)]
        for request in requests:
            engine.submit(request)
        engine.abort(requests[0])  # waiting
        while engine.step() is not None or engine.wait_for_adapter():
            engine.abort(requests[1])  # running
    if engine.core.scheduler is not None:
        compile_refresh(engine.core.state, engine.core.limits)
    engine.records.clear()


def run_core(connection: socket.socket) -> None:
    """Build the engine that the first message describes, and serve it until the connection is closed."""
    settings = _settings(connection)
    if settings is None:
        return
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(Engine(settings.model, settings.adapters, **settings.options))
            warm_up(engine)
        except CapplanError as error:
            connection.sendall(frame(CoreRefused(error)))
            return
        gc.collect()
        gc.freeze()  # shorter collections between steps
        if settings.beside_cpus:
            engine.core.loader.bind(settings.beside_cpus)
        loop = CoreLoop(engine, connection, AWAKE_S if settings.beside_cpus else 0.0)
        connection.sendall(frame(loop.ready()))
        loop.run()


def _settings(connection: socket.socket) -> CoreSettings | None:
    reader = FrameReader()
    messages: list[Any] = []
    while not messages:
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            return None
        messages = reader.feed(data)
    settings: CoreSettings = messages[0]
    return settings


def main() -> int:
    """Run the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server drains, and then closes the connection
    end_by_kernel_with(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        run_core(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main())
