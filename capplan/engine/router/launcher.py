"""Engine processes: launchers, and the process itself.

``python -m capplan.engine.router.launcher`` reads one line of JSON from standard input and keeps it open: it
exits when its parent does. It writes one line of JSON, ``{"url": ...}`` once it accepts requests, or
``{"error": [rule, value, location]}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, Protocol, cast

from capplan.compile import is_compiled
from capplan.engine.router.instances import InstanceSpec
from capplan.errors import NO_VALUE, CapplanError, InputError, NoValue

_CHILD = (sys.executable, "-m", "capplan.engine.router.launcher")


class LaunchError(CapplanError):
    """An engine process that has ended before it took requests."""


class InstanceHandle(Protocol):
    """An engine process that takes requests."""

    url: str

    async def ended(self) -> str:
        """Wait for its end, and return how it came."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Have it finish and end, within a time; 0: at once."""
        ...


class Launcher(Protocol):
    """Starts engine processes."""

    async def launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        """Start an instance and return when it takes requests.

        Parameters
        ----------
        spec
            What it serves.
        key
            The API key that it asks of the router.

        Raises
        ------
        InputError
            When it refuses its settings.
        LaunchError
            When it ends for another reason.
        """
        ...


class EngineProcess:
    """An engine process on this machine. May be used from several threads.

    Parameters
    ----------
    message
        What it is told; see `InstanceSpec.message`.
    environment
        Variables beside those of this process.
    """

    def __init__(self, message: bytes, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            _CHILD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C in a terminal is for the router, which tells its instances
        )
        self._message = message

    def answer(self) -> dict[str, Any]:
        """Tell the process what to serve, and return its first answer; empty when it ends without any."""
        tell, hear = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        with contextlib.suppress(BrokenPipeError):
            tell.write(self._message)
            tell.flush()
        line = hear.readline()
        return dict(json.loads(line)) if line else {}

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait for the end and return how it came.

        Raises
        ------
        subprocess.TimeoutExpired
            When it does not come in time.
        """
        status = self._process.wait(timeout_s)
        return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"

    def end(self, grace_s: float) -> None:
        """End the process, by force once the time is over."""
        if grace_s > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()


def url_in(answer: dict[str, Any], name: str) -> str:
    """Return where a process listens, from its first answer.

    Raises
    ------
    InputError, LaunchError
        When it does not.
    """
    if "url" in answer:
        return str(answer["url"])
    if "error" in answer:
        rule, value, location = answer["error"]
        raise InputError(rule, value[0] if value else NO_VALUE, f"instance {name}: {location}".rstrip(": "))
    raise LaunchError(f"instance {name} has ended before it took requests")


class LocalLauncher:
    """Starts instances on this machine.

    Parameters
    ----------
    instances
        How many there will be; on a CPU they share its cores.
    """

    def __init__(self, instances: int) -> None:
        threads = max(1, (os.cpu_count() or 1) // max(1, instances))
        self._compiling = asyncio.Lock()
        self._environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}

    async def launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        """See `Launcher`."""
        async with self._compiling:
            if not is_compiled():  # one does it for all
                return await self._launch(spec, key)
        return await self._launch(spec, key)

    async def _launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        process = EngineProcess(spec.message("127.0.0.1", key), self._environment)
        try:
            answer = await in_thread(process.answer)
            return LocalHandle(process, url_in(answer, spec.name))
        except BaseException:  # cancelled, too
            process.end(0)
            raise


class LocalHandle:
    """A process of `LocalLauncher`."""

    def __init__(self, process: EngineProcess, url: str) -> None:
        self.url = url
        self._process = process
        self._ended = in_thread(process.wait)

    async def ended(self) -> str:
        """See `InstanceHandle`."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        """See `InstanceHandle`."""
        await in_thread(self._process.end, grace_s)
        await self.ended()


def in_thread(function: Any, *arguments: Any) -> asyncio.Future[Any]:
    """Return what a function will return that waits, in a thread of its own: pools have an end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except Exception as caught:  # noqa: BLE001 - raised where somebody waits for it
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future


def main() -> int:
    """Serve until told to stop; see `capplan.engine.server.run_instance`."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed must not be taken for an answer

    def answer(document: dict[str, Any]) -> None:
        os.write(answers, json.dumps(document).encode() + b"\n")

    fields = json.loads(_first_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from capplan.engine.server import InstanceConfig, ServerSettings, run_instance

    try:
        adapters = {name: Path(at) if isinstance(at, str) else at for name, at in fields["adapters"].items()}
        instance = InstanceConfig(
            fields["model"], ServerSettings(**fields["server"]), adapters, fields["engine"]
        )
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
