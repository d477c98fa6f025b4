"""Engine thread, driven from the event loop.

Only this thread calls the engine. Commands (submit, cancel, add an adapter) come through one queue and run
between two steps. The outputs of a step go to the event loop in one call. Neither side polls.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol, TypeVar

from capplan.engine.engine import Engine
from capplan.engine.engine_core import StepOutput
from capplan.engine.request import FinishReason, Request
from capplan.engine.server.output_stream import EngineDeadError, RequestOutput, RequestState
from capplan.engine.server.protocol import RETRY, ApiError, bad_request
from capplan.errors import InputError

T = TypeVar("T")

_LOAD_WAIT_S: Final = 0.002
"""Maximum wait for an in-flight adapter load while idle; a request that arrives meanwhile waits as long."""
_PACE_REQUESTS: Final = 64
_STOP_TIMEOUT_S: Final = 30.0


class StepObserver(Protocol):
    """Observer of the engine, called in its thread."""

    def on_step(self, step: StepOutput) -> None:
        """Observe a step."""
        ...

    def on_finished(self, request: Request) -> None:
        """Observe the end of a request, for any reason."""
        ...


class AsyncEngine:
    """An engine that steps in its own thread. Public methods belong to the event loop.

    Attributes
    ----------
    failure
        Exception that ended the thread; `failed` is set then.
    """

    def __init__(self, engine: Engine, observers: Sequence[StepObserver] = ()) -> None:
        self._engine = engine
        self._observers = observers
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        # Event loop:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unfinished: set[RequestState] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._finish_times_s: deque[float] = deque(maxlen=_PACE_REQUESTS)
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        # Engine's thread:
        self._states: dict[int, RequestState] = {}
        self._outputs: list[RequestOutput] = []

    @property
    def in_flight(self) -> int:
        """Number of submitted prompts that have not finished."""
        return len(self._unfinished)

    def finished_per_s(self) -> float:
        """Return the recent rate of finished prompts; 0 if unknown."""
        since_s = time.monotonic() - self._finish_times_s[0] if self._finish_times_s else 0.0
        return len(self._finish_times_s) / since_s if since_s > 0 else 0.0

    def start(self) -> None:
        """Start the thread; outputs are delivered on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it; running requests are dropped."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)  # a hanging daemon thread ends with the process

    def submit(self, states: Iterable[RequestState]) -> None:
        """Queue prompts; their streams receive outputs until each has finished."""
        states = list(states)
        self._unfinished.update(states)
        self._idle.clear()
        if self.failure is None:
            self._commands.put(partial(self._add, states))
        else:
            self._deliver([_engine_dead(state) for state in states])

    def cancel(self, states: Iterable[RequestState], reason: FinishReason = "abort") -> None:
        """Cancel the unfinished ones of some prompts."""
        unfinished = [state for state in states if state in self._unfinished]
        self._commands.put(partial(self._abort, unfinished, reason))

    def cancel_all(self) -> None:
        """Cancel all prompts."""
        self.cancel(self._unfinished)

    async def run(self, function: Callable[[Engine], T]) -> T:
        """Call a function with the engine between two steps and return its result.

        Raises
        ------
        EngineDeadError
            If the engine fails, or has failed, before the call.
        """
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._engine))
                except Exception as error:  # noqa: BLE001 - raised in the caller
                    future.set_exception(error)

        self._commands.put(command)
        answer = asyncio.wrap_future(future)
        failed = asyncio.ensure_future(self.failed.wait())
        try:
            await asyncio.wait((answer, failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
        if not answer.done():
            raise EngineDeadError
        return answer.result()

    async def is_alive(self, timeout_s: float) -> bool:
        """Return whether the thread runs a command within a time."""
        try:
            await asyncio.wait_for(self.run(lambda _: None), timeout_s)
        except (TimeoutError, EngineDeadError):
            return False
        return True

    def now_ns(self) -> int:
        """Return the time of the engine's clock."""
        return self._engine.core.clock.now_ns()

    async def wait_idle(self) -> None:
        """Wait until no prompt is in flight."""
        await self._idle.wait()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._unfinished.discard(output.state)
                self._finish_times_s.append(time.monotonic())
            output.state.stream.on_output(output)
        if not self._unfinished:
            self._idle.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.failed.set()
        self._deliver([_engine_dead(state) for state in self._unfinished])

    # The methods below run in the engine's thread.

    def _run_engine(self) -> None:
        try:
            while self._run_commands():
                step = self._engine.step()
                if step is not None:
                    self._process(step)
                elif not self._wait():
                    return
        except BaseException as error:  # noqa: BLE001 - delivered to all waiting requests
            self._call(self._fail, error)

    def _run_commands(self) -> bool:
        """Run the queued commands; return False if the thread must stop."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _wait(self) -> bool:
        """Wait for an adapter load or a command; return False if the thread must stop."""
        self._flush()
        if self._states:
            if self._engine.core.loader.next_ns(timeout_s=_LOAD_WAIT_S) is None:
                raise RuntimeError("requests wait, but nothing can run")
            return True
        command = self._commands.get()
        if command is not None:
            command()
        return command is not None

    def _add(self, states: Sequence[RequestState]) -> None:
        for state in states:
            error = self._try_add(state)
            if error is not None:
                self._outputs.append(RequestOutput(state, finish_reason="error", error=error))

    def _try_add(self, state: RequestState) -> ApiError | None:
        """Submit a prompt to the engine; return the error if it is refused."""
        engine, stream = self._engine, state.stream
        try:
            request = engine.new_request(state.prompt, stream.adapter, stream.params, stream.arrival_ns)
            if not engine.core.can_run(request):
                rule = "must fit beside its adapter into memory, and into one step"
                return bad_request(InputError(rule, len(state.prompt), "prompt tokens"))
            if not engine.submit(request):
                return ApiError(429, "The queue is full", code="queue_full", headers=RETRY)
        except InputError as error:
            return bad_request(error)
        state.request = request
        self._states[request.number] = state
        return None

    def _abort(self, states: Sequence[RequestState], reason: FinishReason) -> None:
        for state in states:
            request = state.request
            if request is not None and request.number in self._states:
                self._engine.abort(request, reason)
                self._finish(state, request)

    def _process(self, step: StepOutput) -> None:
        """Collect and deliver the outputs of a step."""
        for observer in self._observers:
            observer.on_step(step)
        self._engine.records.clear()
        for request in step.emitted:
            state = self._states[request.number]
            if request.finish_reason is None and not state.final_only:
                self._outputs.append(state.new_output(request))
        for request in step.finished:
            self._finish(self._states[request.number], request)
        self._flush()

    def _finish(self, state: RequestState, request: Request) -> None:
        del self._states[request.number]
        self._outputs.append(state.new_output(request))
        for observer in self._observers:
            observer.on_finished(request)

    def _flush(self) -> None:
        """Deliver collected outputs on the event loop."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._call(self._deliver, outputs)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _engine_dead(state: RequestState) -> RequestOutput:
    message = "The engine has failed; please try again"
    error = ApiError(503, message, code="instance_failed", headers=RETRY)
    return RequestOutput(state, finish_reason="error", error=error)
