"""The engine core as seen from the event loop.

The core runs in a process of its own (`capplan.engine._core_process`). Prompts, cancellations and calls go to
it as messages, which it takes between two steps; the tokens of a step come back in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from capplan.engine import (
    AbortRequests,
    AddRequests,
    Call,
    CoreFailed,
    Ended,
    FinishReason,
    FrameReader,
    NewRequest,
    Refusals,
    Reply,
    StepRecord,
    StepTokens,
    frame,
)
from capplan.errors import InputError
from capplan.server._output_stream import EngineDeadError, RequestOutput, RequestState
from capplan.server._protocol import RETRY, ApiError, bad_request

_PACE_REQUESTS: Final = 64


class StepObserver(Protocol):
    """Observer of the engine, called on the event loop."""

    def on_step(self, record: StepRecord, states: Sequence[RequestState]) -> None:
        """Observe a step and the prompts that got a token in it, before they have it."""
        ...

    def on_ended(self, state: RequestState, ended: Ended) -> None:
        """Observe the end of a prompt that was queued."""
        ...


class AsyncEngine:
    """Client of an engine core; it belongs to the event loop.

    Parameters
    ----------
    connection
        The server's end of a pair of connected sockets.
    clock_start_ns
        Start of the engine's clock on the monotonic clock.

    Attributes
    ----------
    failure
        Why the core has ended; `failed` is set then.
    """

    def __init__(
        self, connection: socket.socket, clock_start_ns: int, observers: Sequence[StepObserver] = ()
    ) -> None:
        self._connection = connection
        self._clock_start_ns = clock_start_ns
        self._observers = observers
        self._transport: asyncio.WriteTransport | None = None
        self._tags = itertools.count()
        self._states: dict[int, RequestState] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._finish_times_s: deque[float] = deque(maxlen=_PACE_REQUESTS)
        self._stopped = False
        self.failure: EngineDeadError | None = None
        self.failed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Number of submitted prompts that have not finished."""
        return len(self._states)

    def finished_per_s(self) -> float:
        """Return the recent rate of finished prompts; 0 if unknown."""
        since_s = time.monotonic() - self._finish_times_s[0] if self._finish_times_s else 0.0
        return len(self._finish_times_s) / since_s if since_s > 0 else 0.0

    async def start(self) -> None:
        """Take messages on the running event loop."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(
            lambda: _Connection(self._take, self._on_end), sock=self._connection.dup()
        )

    def stop(self) -> None:
        """Close the connection, at which the core ends; running prompts are dropped."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def submit(self, states: Iterable[RequestState]) -> None:
        """Queue prompts; their streams receive outputs until each has finished."""
        requests = []
        for state in states:
            state.tag = next(self._tags)
            self._states[state.tag] = state
            stream, prompt = state.stream, array("i", state.prompt).tobytes()
            requests.append(NewRequest(state.tag, prompt, stream.adapter, state.params, stream.arrival_ns))
        self._idle.clear()
        if self.failure is None:
            self._send(AddRequests(requests))
        else:
            self._fail_all()

    def cancel(self, states: Iterable[RequestState], reason: FinishReason = "abort") -> None:
        """Cancel the unfinished ones of some prompts."""
        tags = [state.tag for state in states if state.tag in self._states]
        if tags:
            self._send(AbortRequests(tags, reason))

    def cancel_all(self) -> None:
        """Cancel all prompts."""
        self.cancel(list(self._states.values()))

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the core between two steps and return its result.

        Raises
        ------
        EngineDeadError
            If the core ends, or has ended, before the call.
        """
        if self.failure is not None or self._stopped:
            raise EngineDeadError
        number = next(self._tags)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._send(Call(number, method, arguments))
            return await future
        finally:
            del self._calls[number]

    def post(self, method: str, *arguments: object) -> None:
        """Call a method of the core and ignore the result."""
        if self.failure is None and not self._stopped:
            self._send(Call(next(self._tags), method, arguments))

    async def is_alive(self, timeout_s: float) -> bool:
        """Return whether the core answers within a time."""
        try:
            await asyncio.wait_for(self.call("ping"), timeout_s)
        except (TimeoutError, EngineDeadError):
            return False
        return True

    def now_ns(self) -> int:
        """Return the time of the engine's clock."""
        return time.monotonic_ns() - self._clock_start_ns

    async def wait_idle(self) -> None:
        """Wait until no prompt is in flight."""
        await self._idle.wait()

    def _send(self, message: Any) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    def _take(self, message: Any) -> None:
        if isinstance(message, StepTokens):
            self._on_step(message)
        elif isinstance(message, Refusals):
            self._on_refusals(message.errors)
        elif isinstance(message, Reply):
            self._on_reply(message)
        elif isinstance(message, CoreFailed):
            self._fail(EngineDeadError(message.error))

    def _on_step(self, step: StepTokens) -> None:
        """Deliver the results of a step to their streams."""
        states = [self._states[tag] for tag in step.tags]
        if step.record is not None:
            for observer in self._observers:
                observer.on_step(step.record, states)
            end_ns = step.record.begin_ns + step.record.duration_ns
            for state, token in zip(states, step.tokens, strict=True):
                state.add_token(token, end_ns, step.logprobs.get(state.tag))
                if state.tag in step.prompt_logprobs:
                    state.prompt_logprobs = step.prompt_logprobs[state.tag]
        for state in states:
            if state.tag not in step.ended and not state.final_only:
                state.stream.on_output(state.new_output())
        for tag, ended in step.ended.items():
            self._end(self._states[tag], ended)

    def _end(self, state: RequestState, ended: Ended) -> None:
        for observer in self._observers:
            observer.on_ended(state, ended)
        self._deliver_last(state, state.new_output(ended))

    def _on_refusals(self, errors: Mapping[int, InputError | None]) -> None:
        full = ApiError(429, "The queue is full", code="queue_full", headers=RETRY)
        for tag, error in errors.items():
            reply = full if error is None else bad_request(error)
            state = self._states[tag]
            self._deliver_last(state, RequestOutput(state, finish_reason="error", error=reply))

    def _deliver_last(self, state: RequestState, output: RequestOutput) -> None:
        del self._states[state.tag]
        self._finish_times_s.append(time.monotonic())
        state.stream.on_output(output)
        if not self._states:
            self._idle.set()

    def _on_reply(self, reply: Reply) -> None:
        future = self._calls.get(reply.number)
        if future is None or future.done():  # its caller has gone
            return
        if reply.error is None:
            future.set_result(reply.result)
        else:
            future.set_exception(reply.error)

    def _on_end(self) -> None:
        if not self._stopped:
            self._fail(EngineDeadError("the engine core has ended"))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError())

    def _fail(self, failure: EngineDeadError) -> None:
        if self.failure is None:
            self.failure = failure
            self.failed.set()
            self._fail_all()

    def _fail_all(self) -> None:
        message = "The engine has failed; please try again"
        error = ApiError(503, message, code="instance_failed", headers=RETRY)
        for state in list(self._states.values()):
            self._deliver_last(state, RequestOutput(state, finish_reason="error", error=error))


class _Connection(asyncio.Protocol):
    """Bytes of the core's messages."""

    def __init__(self, take: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._reader = FrameReader()
        self._take = take
        self._on_end = on_end

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._take(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()
