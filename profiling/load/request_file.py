"""A Parquet file of requests that grows while the run goes on, and appears when it is whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.spec.files import error_reason

_MS_PER_S: Final = 1e3
_NO_ROWS: Final = MappingProxyType(
    {name: np.empty(0, object) for name in ("adapter", "kind")}
    | {name: np.empty(0, np.int32) for name in ("number", "prompt_tokens", "output_tokens")}
    | {name: np.empty(0) for name in ("arrival_s", "sent_s", "first_token_s", "last_token_s", "ended_s")}
)


class RequestFile:
    """One row per request, in the order in which they ended.

    Columns: number (place in the schedule), adapter (null: the base model), status, arrival_s (when it was
    due), sent_s, first_token_s, finish_s (its last token; null unless finished), prompt_tokens,
    output_tokens, lag_ms (sent - due), ttft_s and e2e_s (from when it was due), ttft_sent_s (from sending),
    tpot_ms, and event_ms: when each event with a token came, in milliseconds after sending.

    Parameters
    ----------
    path
        Where it appears in the end. It is written beside that place and renamed by `keep`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        self._beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._writer: Any = None
        # All that Arrow loads on first use is loaded now; later it would keep requests waiting.
        self.write(_NO_ROWS, np.empty(0), np.empty(0, np.int64))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
        with contextlib.suppress(OSError):
            self._beside.unlink()

    def write(
        self,
        rows: Mapping[str, NDArray[np.generic]],
        times_s: NDArray[np.float64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Append requests.

        Parameters
        ----------
        rows
            Columns from the recorder.
        times_s
            Times of all their events, one request after the other.
        lengths
            How many of them each request has.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table(_columns(rows, times_s, lengths))
        try:
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._beside, table.schema, compression="zstd")
            self._writer.write_table(table)
        except OSError as error:
            raise InputError(f"cannot be written: {error_reason(error)}", location=str(self.path)) from None

    def finished(self) -> Path:
        """Complete the file and return where it is until it is kept."""
        self._close()
        return self._beside

    def keep(self) -> None:
        """Put the file in its place."""
        try:
            self.finished().replace(self.path)
        except OSError as error:
            raise InputError(f"cannot be written: {error_reason(error)}", location=str(self.path)) from None

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _columns(
    rows: Mapping[str, NDArray[Any]], times_s: NDArray[np.float64], lengths: NDArray[np.int64]
) -> dict[str, Any]:
    import pyarrow as pa

    status = rows["kind"]
    finished = status == "finished"
    due, sent, first = rows["arrival_s"], rows["sent_s"], rows["first_token_s"]
    finish = np.where(finished, rows["last_token_s"], np.nan)
    more = rows["output_tokens"] - 1
    tpot_ms = _MS_PER_S * (finish - first) / np.where(more > 0, more, np.nan)
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    since_sent = (times_s - np.repeat(sent, lengths)) * _MS_PER_S
    floats = {
        "arrival_s": due,
        "sent_s": sent,
        "first_token_s": first,
        "finish_s": finish,
        "lag_ms": _MS_PER_S * (sent - due),
        "ttft_s": first - due,
        "ttft_sent_s": first - sent,
        "e2e_s": finish - due,
        "tpot_ms": tpot_ms,
    }
    return {
        "number": pa.array(rows["number"].astype(np.int32)),
        "adapter": pa.array([name or None for name in rows["adapter"]], pa.string()),
        "status": pa.array(status, pa.string()),
        "prompt_tokens": pa.array(rows["prompt_tokens"].astype(np.int32)),
        "output_tokens": pa.array(rows["output_tokens"].astype(np.int32)),
        **{name: pa.array(values, pa.float64(), from_pandas=True) for name, values in floats.items()},
        "event_ms": pa.ListArray.from_arrays(pa.array(ends), pa.array(since_sent.astype(np.float32))),
    }
