"""What a load test is told: which server, how long, how patient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from capplan.errors import InputError

_VERSION_PATH = "/v1"


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible server and the names it knows adapters by.

    Attributes
    ----------
    url : str
        Where it listens; a path that ends in ``/v1`` is fine, user and password are not.
    api_key : str, optional
        Sent as bearer token; never written anywhere.
    base_model : str, optional
        What requests without an adapter ask for.
    models : mapping of str to str
        Adapter of the workload to model name at the server; those left out go by their own name.
    extra_body : mapping
        Further fields of every request, for servers with flags of their own.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    base_model: str | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rule = "must be the http:// or https:// address of a server"
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of a port that is no number, or half of an IPv6 address
            known = False
        if "@" in self.url.rpartition("://")[2].partition("/")[0]:  # not shown: it may hold a password
            raise InputError("must hold no user and no password; servers take an API key", location="url")
        if not known:
            raise InputError(rule, self.url, "url")

    def at(self, path: str) -> str:
        """Return the address of ``path``, such as ``/v1/completions``."""
        parts = urlsplit(self.url)
        root = parts.path.rstrip("/").removesuffix(_VERSION_PATH)
        return urlunsplit((parts.scheme, parts.netloc, root + path, "", ""))

    @property
    def shown(self) -> str:
        """The address without query and fragment."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))

    def model_of(self, adapter: str) -> str:
        """Return the model name that a request with this adapter asks for; the empty name: none."""
        if adapter:
            return self.models.get(adapter, adapter)
        if self.base_model is None:
            raise InputError("is required for requests without an adapter", location="base_model")
        return self.base_model

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        known = {"Content-Type": "application/json"}
        return known if self.api_key is None else known | {"Authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True)
class LoadSettings:
    """How long and how patiently to measure.

    Attributes
    ----------
    duration_s : float
        Length of the measured window.
    warm_up_s : float
        Time before it in which requests are sent as well.
    timeout_s : float
        How long one request may take, from sending to its last byte.
    drain_s : float
        How long requests may still come to their end after the window.
    max_in_flight : int, optional
        Requests beyond this many at once are not sent but counted as rejected, as in the twin.
    metrics_interval_s : float
        Pause between scrapes of ``/metrics``; 0: none. vLLM writes its metrics in the very loop that hands
        out tokens, so a scrape holds them back for some milliseconds.
    """

    duration_s: float
    warm_up_s: float = 0.0
    timeout_s: float = 600.0
    drain_s: float = 30.0
    max_in_flight: int | None = None
    metrics_interval_s: float = 0.0

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
        """Time in which requests are sent."""
        return self.warm_up_s + self.duration_s
