"""Messages between the server and the engine core, and their encoding.

The two sides are processes joined by a pair of connected sockets: one reader and one writer each, in order,
and the kernel reports the end of either. A message is a named tuple, pickled, after its length. Tokens of a
step are two arrays, so that a step with hundreds of requests is one short message.
"""

from __future__ import annotations

import pickle
import socket
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from capplan.engine._request import FinishReason, SamplingParams, TokenLogprobs
from capplan.engine.models import ModelConfig
from capplan.errors import CapplanError, InputError
from capplan.spec import EngineArgs

if TYPE_CHECKING:
    from capplan.engine._timing import StepRecord

_LENGTH_BYTES: Final = 4
_RECEIVE_BYTES: Final = 2**18


class CoreSettings(NamedTuple):
    """Arguments of the engine, the first message to the core; fields as for `Engine`."""

    model: str
    adapters: Mapping[str, str | Path | int]
    options: Mapping[str, Any]
    beside_cpus: tuple[int, ...] = ()
    """CPUs beside those that the core is bound to; none: it is bound to none."""


class CoreReady(NamedTuple):
    """Facts of an engine that is ready for requests, the first message of the core."""

    config: ModelConfig
    folder: Path | None
    dtype: torch.dtype
    args: EngineArgs
    clock_start_ns: int
    """Start of the engine's clock on the monotonic clock, which all processes share."""
    device: str
    """Name of the GPU or processor."""
    cpus: Sequence[int]
    """That the core may run on."""
    pid: int
    """Process of the core."""
    max_adapters: int
    """Adapters that it can have at a time."""


class CoreRefused(NamedTuple):
    """The core cannot start."""

    error: CapplanError


class NewRequest(NamedTuple):
    """Prompt to run."""

    tag: int
    """Number of the prompt at the server."""
    prompt: bytes
    """Token ids as int32."""
    adapter: str | None
    params: SamplingParams
    arrival_ns: int


class AddRequests(NamedTuple):
    """Prompts of one HTTP request."""

    requests: Sequence[NewRequest]


class AbortRequests(NamedTuple):
    """Prompts to cancel; those that have ended are ignored."""

    tags: Sequence[int]
    reason: FinishReason


class Call(NamedTuple):
    """Call of a method of `CoreLoop` by name; answered by a `Reply`."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


class Reply(NamedTuple):
    """Result of a `Call`, or of a command to a worker."""

    number: int
    result: Any
    error: Exception | None


class Refusals(NamedTuple):
    """Prompts that were not queued; without an error, the queue is full."""

    errors: Mapping[int, InputError | None]


class Ended(NamedTuple):
    """End of a prompt."""

    reason: FinishReason
    error: str | None
    admitted_ns: int | None


class StepTokens(NamedTuple):
    """Results of one step, and of prompts that ended since the last one."""

    record: StepRecord | None
    """None if no step ran."""
    tags: array[int]
    """Prompts with a new token."""
    tokens: array[int]
    logprobs: Mapping[int, TokenLogprobs]
    """By prompt, for those that requested them."""
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]]
    """Of the tokens after the first one, with the first new token of a prompt that requested them."""
    ended: Mapping[int, Ended]


class QueueGauges(NamedTuple):
    """State of one queue by request size."""

    waiting: int
    quota_tokens: int
    outstanding_tokens: int
    """Tokens of its quota that admitted requests hold."""


class PoolGauges(NamedTuple):
    """State of a scheduler whose adapters and KV share the memory."""

    queues: Sequence[QueueGauges]
    """By ascending size."""
    cached_adapters: int
    """Adapters in memory that no request uses."""
    counts: Mapping[str, int]
    """Totals since the start, by their names in `capplan.serving.pooled._state`."""


class Gauges(NamedTuple):
    """State of the scheduler between two steps."""

    running: int
    waiting: int
    kv_used: float
    """Share of the KV blocks in use; in a shared pool with the adapters in use, without idle ones."""
    running_adapters: Sequence[str] = ()
    waiting_adapters: Sequence[str] = ()
    pool: PoolGauges | None = None
    """None under rules without a shared pool."""


class CoreFailed(NamedTuple):
    """The core has failed; its traceback is on standard error."""

    error: str


def frame(message: Any) -> bytes:
    """Return the bytes of a message with its length."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class FrameReader:
    """Messages in a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add bytes and return the messages that they complete."""
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            end = body + int.from_bytes(self._buffer[start:body], "little")
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(memoryview(self._buffer)[body:end]))  # noqa: S301 - as above
            start = end
        del self._buffer[:start]
        return messages


def received(connection: socket.socket) -> Iterator[Any]:
    """Yield the messages that come through a socket until its other end is closed."""
    reader = FrameReader()
    while data := connection.recv(_RECEIVE_BYTES):
        yield from reader.feed(data)
