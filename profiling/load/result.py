"""The result of a load test as a document."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue

from capplan.spec import STARVED_BELOW, read_text, write_text_atomic
from capplan.spec.files import parse_json
from capplan.spec.validation import SpecModel, format_key, validate_document

Number = float | None
"""Null where there was nothing to measure."""


class Stats(SpecModel):
    """Mean and percentiles, interpolated linearly."""

    mean: Number = None
    p50: Number = None
    p90: Number = None
    p95: Number = None
    p99: Number = None


class LoadMetrics(SpecModel):
    """What the requests of an adapter, or all, got; names as in `capplan simulate`."""

    name: str = Field(description="Adapter; empty: the base model.")
    submitted: int = Field(description="Requests due from the start of the run to the end of the window.")
    completed: int = Field(description="Requests that completed within the window.")
    failed: int = Field(description="Requests that failed, from the start of the run.")
    rejected: int = Field(description="Requests not sent because as many were in flight as may be.")
    executing: int = Field(description="Requests that had a token, but not all, at the end of the window.")
    waiting: int = Field(description="Requests without a token at the end of the window.")
    throughput_tok_s: float = Field(description="Input and output tokens completed in the window per second.")
    input_tok_s: float
    output_tok_s: float
    offered_tok_s: float = Field(description="Tokens of the requests that were due in the window per second.")
    request_rate_rps: float = Field(description="Requests completed in the window per second.")
    served_fraction: float = Field(
        description="Tokens of completed over tokens of submitted requests, those executing left out of both."
    )
    starved: bool = Field(description=f"served_fraction below {STARVED_BELOW}.")
    ttft_s: Stats = Field(description="From when a request was due to its first token.")
    ttft_sent_s: Stats = Field(description="From when a request was sent to its first token.")
    ttft_s_mean_charged: Number = Field(
        None, description="Of requests due in the window; one that did not finish is charged all of it."
    )
    e2e_s: Stats = Field(description="From when a request was due to its last token.")
    tpot_ms: Stats = Field(description="(E2E - TTFT) / (output tokens - 1).")
    tpt_ms: Stats = Field(description="E2E / output tokens.")
    itl_ms: Stats = Field(description="Gaps between tokens as a client sees them; the mean: of completed.")
    token_gap_ms_mean: Number = Field(
        None,
        description="First to last token over tokens - 1: shorter than itl_ms where tokens come together.",
    )


class ClientHealth(SpecModel):
    """Whether the client sent in time."""

    lag_ms: Stats = Field(description="From when a request was due to when it was sent.")
    lag_ms_max: Number = None
    loop_lag_ms_p99: Number = Field(None, description="How late the event loop was, at 50 looks a second.")
    kept_up: bool | None = Field(description="Lag and loop within their limits; null: not known.")


class Failure(SpecModel):
    """Requests that failed in one way."""

    kind: str
    requests: int
    message: str = Field("", description="What the first of them said.")


class ServerSample(SpecModel):
    """One scrape of the server's metrics."""

    time_s: float
    took_ms: float
    values: dict[str, float]


class BenchResult(SpecModel):
    """A load test."""

    schema_version: Literal[1] = 1
    created_by: str
    started_at: str = Field(description="ISO 8601, UTC.")
    source: str = Field("capplan bench", description="What measured.")
    url: str
    base_model: str
    workload_digest: str | None = None
    settings: dict[str, JsonValue] = Field({}, description="Everything that was asked for.")
    partial: bool = Field(False, description="Whether the run was stopped before its time.")
    warm_up_s: float = Field(description="Time before the window.")
    duration_s: float = Field(description="Length of the window.")
    overall: LoadMetrics
    adapters: tuple[LoadMetrics, ...] = ()
    failures: tuple[Failure, ...] = ()
    client: ClientHealth
    server: Annotated[tuple[ServerSample, ...], Field(description="Scrapes of /metrics.")] = ()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the result as JSON text, and write it to ``path`` if given: all of it or nothing."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        if path is not None:
            write_text_atomic(path, text)
        return text

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Read a result.

        Raises
        ------
        InputError
            For the first broken rule, with file and key.
        """
        name = os.fspath(path)
        data: Any = parse_json(read_text(path), name)
        return validate_document(cls, data, lambda key: f"{name}: {format_key(key)}" if key else name)
