"""Step records written as they come: a server that runs for weeks must not keep them."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from capplan.engine.loop import Step
from capplan.engine.records import StepRecord
from capplan.engine.request import Request

_ROWS = 10_000


class RecordFile:
    """A Parquet file with a row per step, in its place once it is closed; see `Watcher`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = path.with_name(f"{path.name}.part{os.getpid()}")
        self._rows: list[StepRecord] = []
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stepped(self, step: Step) -> None:
        """See `Watcher`."""
        if step.record is not None:
            self._rows.append(step.record)
            if len(self._rows) >= _ROWS:
                self._flush()

    def ended(self, request: Request) -> None:
        """See `Watcher`; what a request was is in its steps."""

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._writer.close()
        self._beside.replace(self._path)

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {name: [getattr(row, name) for row in self._rows] for name in StepRecord._fields}
        kinds = [(name, pa.float64() if name.endswith("_ms") else pa.int64()) for name in StepRecord._fields]
        table = pa.table(columns, schema=pa.schema(kinds))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._beside, table.schema)
        self._writer.write_table(table)
        self._rows.clear()
