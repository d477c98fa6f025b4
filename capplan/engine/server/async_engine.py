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
from functools import partial
from typing import Protocol, TypeVar

from capplan.engine.engine import Engine
from capplan.engine.engine_core import StepOutput
from capplan.engine.request import FinishReason, Request
from capplan.engine.server.output_stream import EngineFailed, EngineFull, RequestOutput, RequestState
from capplan.errors import InputError

T = TypeVar("T")

_LOAD_WAIT_S = 0.002
"""So long at most a request that comes while nothing runs waits for an adapter that others wait for."""

_PACE_ENDS = 64

_STOP_S = 30.0


class StepObserver(Protocol):
    """Sees every step and every end, in the driver's thread."""

    def on_step(self, step: StepOutput) -> None:
        """Note a step."""
        ...

    def on_finished(self, request: Request) -> None:
        """Note that a request has ended, for whatever reason."""
        ...


class EngineFailureError(RuntimeError):
    """The engine has broken down, and answers nothing any more."""

    def __init__(self) -> None:
        super().__init__("the engine has failed")


class AsyncEngine:
    """Steps an engine in a thread of its own. All but its private methods belong to the event loop.

    Attributes
    ----------
    failure
        What broke the engine, if anything did; `failed` is set then.
    """

    def __init__(self, engine: Engine, watchers: Sequence[StepObserver] = ()) -> None:
        self._engine = engine
        self._watchers = watchers
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        # Of the event loop:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[RequestState] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ends_s: deque[float] = deque(maxlen=_PACE_ENDS)
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        # Of the thread:
        self._tickets: dict[int, RequestState] = {}
        self._news: list[RequestOutput] = []

    @property
    def in_flight(self) -> int:
        """Prompts submitted of which the end has not been told yet."""
        return len(self._open)

    def ends_per_s(self) -> float:
        """Return how many prompts have ended per second lately; 0 when that is not known."""
        since_s = time.monotonic() - self._ends_s[0] if self._ends_s else 0.0
        return len(self._ends_s) / since_s if since_s > 0 else 0.0

    def start(self) -> None:
        """Begin; the event loop that this is called on is told of everything."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for that; what still runs is dropped."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(_STOP_S)  # a thread that is stuck dies with the process

    def submit(self, tickets: Iterable[RequestState]) -> None:
        """Queue prompts; their listeners hear of each until it has ended."""
        tickets = list(tickets)
        self._open.update(tickets)
        self._idle.clear()
        if self.failure is None:
            self._inbox.put(partial(self._submit, tickets))
        else:
            self._tell([_failure_of(ticket) for ticket in tickets])

    def cancel(self, tickets: Iterable[RequestState], reason: FinishReason = "abort") -> None:
        """End prompts of whose answers nobody wants more; what has ended already is left alone."""
        self._inbox.put(partial(self._cancel, [ticket for ticket in tickets if ticket in self._open], reason))

    def cancel_all(self) -> None:
        """End everything."""
        self.cancel(self._open)

    async def run(self, function: Callable[[Engine], T]) -> T:
        """Have a function done with the engine between two steps, and return or raise what it does.

        Raises
        ------
        EngineFailureError
            When the engine breaks down, or has, before it is done.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def command() -> None:
            try:
                result = function(self._engine)
            except Exception as error:  # noqa: BLE001 - raised where it was asked for
                self._call(_fail_future, answer, error)
            else:
                self._call(_settle_future, answer, result)

        self._inbox.put(command)
        failed = asyncio.ensure_future(self.failed.wait())
        try:
            await asyncio.wait((answer, failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
        if not answer.done():
            raise EngineFailureError
        return answer.result()

    async def answers(self, timeout_s: float) -> bool:
        """Tell whether the thread is there and comes to the end of what it is doing."""
        try:
            await asyncio.wait_for(self.run(lambda _: None), timeout_s)
        except (TimeoutError, EngineFailureError):
            return False
        return True

    def now_ns(self) -> int:
        """Return the time by the engine's clock."""
        return self._engine.core.clock.now_ns()

    async def wait_idle(self) -> None:
        """Return when nothing is in flight."""
        await self._idle.wait()

    def _tell(self, news: list[RequestOutput]) -> None:
        for each in news:
            if each.finish is not None:
                self._open.discard(each.ticket)
                self._ends_s.append(time.monotonic())
            each.ticket.listener.hear(each)
        if not self._open:
            self._idle.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.failed.set()
        self._tell([_failure_of(ticket) for ticket in self._open])

    # What follows runs in the thread.

    def _main(self) -> None:
        try:
            while self._take_commands():
                step = self._engine.step()
                if step is not None:
                    self._report(step)
                elif not self._wait():
                    return
        except BaseException as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._call(self._fail, error)

    def _take_commands(self) -> bool:
        """Do what has been asked for meanwhile; False when that is to stop."""
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _wait(self) -> bool:
        """Wait for an adapter that is being loaded, or else for a command; False when that is to stop."""
        self._send()
        if self._tickets:
            if self._engine.core.loader.next_ns(timeout_s=_LOAD_WAIT_S) is None:
                raise RuntimeError("requests wait, but nothing can run")
            return True
        command = self._inbox.get()
        if command is not None:
            command()
        return command is not None

    def _submit(self, tickets: Sequence[RequestState]) -> None:
        for ticket in tickets:
            refusal = self._refusal(ticket)
            if refusal is not None:
                self._news.append(RequestOutput(ticket, finish="error", error=str(refusal), refusal=refusal))

    def _refusal(self, ticket: RequestState) -> InputError | None:
        """Submit a prompt; return why not, if so."""
        engine = self._engine
        try:
            request = engine.new_request(ticket.prompt, ticket.adapter, ticket.params, ticket.arrival_ns)
            if not engine.core.can_run(request):
                rule = "must fit beside its adapter into memory, and into one step"
                return InputError(rule, len(ticket.prompt), "prompt tokens")
            if not engine.submit(request):
                return EngineFull()
        except InputError as error:
            return error
        ticket.request = request
        self._tickets[request.number] = ticket
        return None

    def _cancel(self, tickets: Sequence[RequestState], reason: FinishReason) -> None:
        for ticket in tickets:
            request = ticket.request
            if request is not None and request.number in self._tickets:
                self._engine.abort(request, reason)
                self._end(ticket, request)

    def _report(self, step: StepOutput) -> None:
        """Note what a step brought, for those who wait for it."""
        for watcher in self._watchers:
            watcher.on_step(step)
        self._engine.records.clear()  # a server runs for weeks
        for request in step.emitted:
            ticket = self._tickets[request.number]
            if request.finish_reason is None and not ticket.whole:
                self._news.append(ticket.news(request))
        for request in step.finished:
            self._end(self._tickets[request.number], request)
        self._send()

    def _end(self, ticket: RequestState, request: Request) -> None:
        del self._tickets[request.number]
        self._news.append(ticket.news(request))
        for watcher in self._watchers:
            watcher.on_finished(request)

    def _send(self) -> None:
        """Tell the event loop what is new."""
        if self._news:
            news, self._news = self._news, []
            self._call(self._tell, news)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _failure_of(ticket: RequestState) -> RequestOutput:
    return RequestOutput(ticket, finish="error", refusal=EngineFailed())


def _settle_future(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail_future(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
