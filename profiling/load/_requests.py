"""Requests of a load test: server, duration, arrival times, lengths and prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.spec import Profile, Workload

_VERSION_PATH = "/v1"
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_PATH_CHARACTERS: Final = "/:@!$&'()*+,;=~%"
"""Not escaped in a path, beside letters and digits."""
DEFAULT_MAX_MODEL_LEN: Final = 8192
_NS_PER_S: Final = 1e9
BASE: Final = ""
"""Name of the base model among adapters."""
_POOL_TOKENS: Final = 1 << 16
_NUMBER_TOKENS: Final = 4
_STRIDE: Final = 7919  # a prime, so that neighbours begin far from each other in the pool
_TOY_IDS: Final = range(100, 300)
# Words that the tokenizers of current models take as one token each, after a space.
_WORDS: Final = (
    "the of and to in is that for it was on are as with they be at one have this from by hot but some what "
    "there we can out other were all your when up use word how said an each she which do their time if will "
    "way about many then them would write like so these her long make thing see him two has look more day"
)


@dataclass(frozen=True)
class Target:
    """OpenAI-compatible server, and its model names of adapters."""

    url: str
    """Address; a path may end in ``/v1``; user and password are refused."""
    api_key: str | None = field(default=None, repr=False)
    """Bearer token; never written."""
    base_model: str | None = None
    """Model of requests without an adapter."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Model name by adapter; others keep their own name."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request."""

    def __post_init__(self) -> None:
        rule = "must be the http:// or https:// address of a server"
        try:
            parts = urlsplit(self.url)
            host = parts.hostname or ""
            known = parts.scheme in ("http", "https") and host.encode("idna") and parts.port != 0
            known = known and not any(character <= " " for character in host)
        except ValueError:  # of a port that is no number, half of an IPv6 address, or no name of a host
            known = False
        if "@" in self.url.rpartition("://")[2].partition("/")[0]:  # not shown: it may hold a password
            raise InputError("must hold no user and no password; servers take an API key", location="url")
        if not known:
            raise InputError(rule, self.url, "url")
        if self.api_key is not None and any(character < " " for character in self.api_key):  # not shown
            raise InputError("must be one line without control characters", location="api_key")

    def at(self, path: str) -> str:
        """Return the address of ``path``, such as ``/v1/completions``."""
        parts = urlsplit(self.url)
        root = parts.path.rstrip("/").removesuffix(_VERSION_PATH)
        return urlunsplit((parts.scheme, parts.netloc, root + path, "", ""))

    def path(self, path: str) -> str:
        """Return the path of the address of `path`, escaped as in a request."""
        return escaped_path(urlsplit(self.at(path)).path)

    @property
    def shown(self) -> str:
        """Address without query and fragment."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))

    @property
    def is_local(self) -> bool:
        """Whether the address is of this machine."""
        return urlsplit(self.url).hostname in _LOOPBACK

    def model_of(self, adapter: str) -> str:
        """Return the model name for an adapter; the empty name is the base model."""
        if adapter:
            return self.models.get(adapter, adapter)
        if self.base_model is None:
            raise InputError("is required for requests without an adapter", location="base_model")
        return self.base_model

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


def escaped_path(path: str) -> str:
    """Return a path with its other characters escaped; escapes stay."""
    return quote(path, safe=_PATH_CHARACTERS)


@dataclass(frozen=True)
class LoadSettings:
    """Duration and limits of a load test."""

    duration_s: float
    """Length of the measured window."""
    warm_up_s: float = 0.0
    """Time before the window."""
    timeout_s: float = 600.0
    """Limit on one request, from sending to its last byte."""
    drain_s: float = 30.0
    """Wait for requests in flight after the window."""
    max_in_flight: int | None = None
    """Further requests are not sent but counted as rejected, as in the twin."""
    metrics_interval_s: float = 0.0
    """Interval of samples of ``/metrics``; 0: none. A sample delays vLLM's tokens by some milliseconds."""

    def __post_init__(self) -> None:
        for name in ("duration_s", "timeout_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InputError("must be a finite number above 0", getattr(self, name), name)
        for name in ("warm_up_s", "drain_s", "metrics_interval_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InputError("must be a finite number >= 0", getattr(self, name), name)
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise InputError("must be at least 1", self.max_in_flight, "max_in_flight")

    @property
    def horizon_s(self) -> float:
        """Duration of sending."""
        return self.warm_up_s + self.duration_s


@dataclass(frozen=True, eq=False)
class Schedule:
    """Requests in order of due time; arrays have shape (requests,)."""

    due_s: NDArray[np.float64]
    """Seconds from the start of the run."""
    adapter: NDArray[np.int32]
    """Position in `names`."""
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    names: tuple[str, ...]
    """The base model (empty name), then the adapters of the workload."""
    shared_prefix_tokens: int = 0
    """Common prefix of an adapter's prompts."""

    def __len__(self) -> int:
        return self.due_s.size


def schedule_of(
    workload: Workload,
    horizon_s: float,
    seed: int = 0,
    max_model_len: int = DEFAULT_MAX_MODEL_LEN,
    *,
    rate_scale: float = 1.0,
    profile: Profile | None = None,
) -> Schedule:
    """Draw the requests of a workload as `capplan simulate` does: same seed, same requests.

    `horizon_s` is the twin's ``duration_s``, `rate_scale` the factor of `scaled`. `profile` gives the
    correlation of prompt and output lengths, unless the workload does. A trace is replayed.
    """
    from capplan.workload import draw_requests

    source = scaled(workload, rate_scale)
    drawn_lengths = source.trace is None and source.length_pairs is None
    if profile is not None and drawn_lengths and source.length_correlation is None:
        source = source.model_copy(update={"length_correlation": profile.length_correlation})
    drawn = draw_requests(source, horizon_s, seed, max_model_len, max(1, max_model_len - 1))
    room = np.maximum(max_model_len - drawn.prompt_tokens, 1)
    return Schedule(
        due_s=drawn.arrival_ns / _NS_PER_S,
        adapter=drawn.adapter,
        prompt_tokens=drawn.prompt_tokens,
        output_tokens=np.minimum(drawn.output_tokens, room).astype(np.int32),
        names=(BASE, *(adapter.name for adapter in workload.adapters)),
        shared_prefix_tokens=workload.shared_prefix_tokens,
    )


def scaled(workload: Workload, rate_scale: float) -> Workload:
    """Return the workload with all rates multiplied; a trace is replayed faster."""
    if not 0.0 < rate_scale < float("inf"):
        raise InputError("must be a finite number above 0", rate_scale, "rate_scale")
    if rate_scale == 1.0:
        return workload
    trace = workload.trace
    if trace is not None and len(trace):
        trace = trace.at_rate(rate_scale * len(trace) / trace.duration_s)
    return workload.at_rates_times(rate_scale).model_copy(update={"trace": trace})


class PromptForm(StrEnum):
    """Form of prompts."""

    IDS = "ids"
    """Lists of token ids from 1000 to 9999: exact lengths with any tokenizer."""
    TOY_IDS = "toy-ids"
    """Ids from 100 to 299, for models with small vocabularies."""
    TEXT = "text"
    """Words of one token each, for servers that accept text only."""


def alphabet(form: PromptForm) -> list[str]:
    """Return every token with its separator."""
    if form is PromptForm.TEXT:
        return [f" {word}" for word in _WORDS.split()]
    return [f"{number}," for number in (_TOY_IDS if form is PromptForm.TOY_IDS else range(1000, 10_000))]


class PromptWriter:
    """Writer of prompts of exact lengths, as slices of one long random sequence.

    A prompt starts with digits of its number plus `salt`, after the shared prefix, so that no two prompts
    have a KV block in common. `extra_tokens` are added to text by the server.
    """

    def __init__(self, form: PromptForm = PromptForm.IDS, extra_tokens: int = 0, salt: int = 0) -> None:
        self.form = form
        self.extra_tokens = extra_tokens
        self.salt = salt
        self._alphabet = alphabet(form)
        chosen = np.random.default_rng(0).integers(0, len(self._alphabet), _POOL_TOKENS)
        texts = [self._alphabet[token] for token in chosen.tolist()]
        self._pool = "".join(texts)
        self._starts: list[int] = np.cumsum([0, *map(len, texts)]).tolist()

    @property
    def highest_id(self) -> int:
        """Highest id in prompts of ids."""
        return int(self._alphabet[-1][:-1])

    def written(self, number: int, tokens: int, shared: int = 0) -> str:
        """Return a prompt as JSON; `tokens` includes the shared prefix and what the server adds."""
        wanted = max(1, tokens - self.extra_tokens)
        shared = min(shared, wanted)
        own = min(_NUMBER_TOKENS, wanted - shared)
        at = number * _STRIDE % _POOL_TOKENS
        text = self._slice(0, shared) + self._numbered(number + self.salt, own)
        text += self._slice(at, wanted - shared - own)
        return json.dumps(text) if self.form is PromptForm.TEXT else f"[{text[:-1]}]"

    def _slice(self, at: int, tokens: int) -> str:
        """Return tokens of the circular pool."""
        if at + tokens <= _POOL_TOKENS:
            return self._pool[self._starts[at] : self._starts[at + tokens]]
        rounds, rest = divmod(at + tokens - _POOL_TOKENS, _POOL_TOKENS)
        return self._pool[self._starts[at] :] + self._pool * rounds + self._pool[: self._starts[rest]]

    def _numbered(self, number: int, tokens: int) -> str:
        """Return a number in digits of the alphabet, lowest first."""
        digits = []
        for _ in range(tokens):
            number, digit = divmod(number, len(self._alphabet))
            digits.append(self._alphabet[digit])
        return "".join(digits)


class RequestBodies:
    """Writer of completion requests to models by position, with further JSON fields in `extra`."""

    def __init__(self, prompts: PromptWriter, models: Sequence[str], extra: Mapping[str, Any]) -> None:
        fixed = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "ignore_eos": True,  # an output has the length that was drawn
            **extra,
        }
        self._prompts = prompts
        self._heads = [json.dumps({"model": model, **fixed})[:-1] for model in models]

    def body(self, number: int, model: int, prompt_tokens: int, output_tokens: int, shared: int = 0) -> bytes:
        """Return the JSON of one request."""
        prompt = self._prompts.written(number, prompt_tokens, shared)
        return f'{self._heads[model]}, "max_tokens": {output_tokens}, "prompt": {prompt}}}'.encode()
