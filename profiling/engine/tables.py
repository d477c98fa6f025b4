"""Which tables a folder of measurements has for calibration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from capplan.errors import InputError

BASE: Final = "base.json"
STEPS: Final = "steps.parquet"
SERVED: Final = "served.parquet"
ITERATIONS: Final = "iterations.parquet"


@dataclass(frozen=True)
class FolderTables:
    """Paths of tables; None for those that the folder lacks."""

    base: str | None
    steps: str | None
    runs: str | None
    memory: str | None
    loading: str | None


def tables_of(folder: str | os.PathLike[str]) -> FolderTables:
    """Return the tables of a folder that an engine or a server was measured into.

    Steps of the engine behind its server stand before its own: they are what clients meet.

    Raises
    ------
    InputError
        When there is none.
    """
    path = Path(folder)

    def there(*names: str) -> str | None:
        return next((str(path / name) for name in names if (path / name).is_file()), None)

    found = FolderTables(
        base=there(BASE),
        steps=there(SERVED, STEPS),
        runs=there("runs.csv"),
        memory=there("memory.csv"),
        loading=there("loading.csv"),
    )
    if not any((found.steps, found.runs, found.memory, found.loading)):
        raise InputError("must hold tables of `capplan profile engine` or `server`", location=str(path))
    return found
