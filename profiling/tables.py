"""Measurement folders: the tables that calibration reads, and their provenance."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from capplan.errors import InputError
from capplan.spec import read_text, write_bytes_atomic, write_text_atomic
from capplan.spec.files import error_reason

if TYPE_CHECKING:
    import pandas as pd

STEPS: Final = "steps.parquet"
RUNS: Final = "runs.csv"
MEMORY: Final = "memory.csv"
LOADING: Final = "loading.csv"
FIRST_TOKENS: Final = "first_tokens.csv"
PROVENANCE: Final = "provenance.json"
TABLES: Final = (STEPS, RUNS, MEMORY, LOADING)
"""Tables that calibration reads."""
_SETTING: Final = "setting"
MIN_LOAD_MS: Final = 1e-3
"""Lower bound of a load time; calibration requires positive times."""
OUTPUT_TOKENS: Final = 2
"""Output tokens of a request for its first token."""
_IDLE_RATE_RPS: Final = 0.01
_IDLE_RUN_S: Final = 20_000.0
BASE: Final = "base.json"
SERVED: Final = "served.parquet"
ITERATIONS: Final = "iterations.parquet"


class MeasurementFolder:
    """Folder of tables of one or several engine settings.

    The column ``setting`` identifies the engine start of each row. Measuring a setting again replaces its
    rows.

    Raises
    ------
    InputError
        If it cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot be made: {error_reason(error)}", location=str(path)) from None

    def table(self, name: str) -> pd.DataFrame | None:
        """Return a table; None if it does not exist."""
        import pandas as pd

        file = self.path / name
        if not file.exists():
            return None
        try:
            return pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read: {error_reason(error)}", location=str(file)) from None

    def has(self, name: str, setting: str) -> bool:
        """Return whether a table has rows of a setting."""
        return bool(self.measured(name, setting, _SETTING))

    def measured(self, name: str, setting: str, column: str) -> set[str]:
        """Return the values of a column for a setting."""
        table = self.table(name)
        if table is None or column not in table.columns or _SETTING not in table.columns:
            return set()
        return set(table.loc[table[_SETTING] == setting, column].astype(str))

    def add(
        self, name: str, setting: str, rows: Sequence[Mapping[str, Any]], *, replace: bool = True
    ) -> None:
        """Add rows of a setting to a table, replacing its rows unless `replace` is false."""
        import pandas as pd

        if not rows:
            return
        own = pd.DataFrame([{**row, _SETTING: setting} for row in rows])
        known = self.table(name)
        if known is not None and _SETTING in known.columns:
            kept = known[known[_SETTING] != setting] if replace else known
            own = pd.concat([kept, own], ignore_index=True) if len(kept) else own
        if name.endswith(".parquet"):
            buffer = BytesIO()
            own.to_parquet(buffer, compression="zstd")
            write_bytes_atomic(self.path / name, buffer.getvalue())
        else:
            write_text_atomic(self.path / name, own.to_csv(index=False))

    def notes(self) -> dict[str, Any]:
        """Return the provenance by setting."""
        file = self.path / PROVENANCE
        if not file.exists():
            return {}
        try:
            known = json.loads(read_text(file))
        except ValueError:
            raise InputError("must be JSON", location=str(file)) from None
        if not isinstance(known, dict) or not all(isinstance(each, dict) for each in known.values()):
            raise InputError("must be a record that this command wrote", location=str(file))
        return known

    def note(self, setting: str, facts: Mapping[str, Any]) -> None:
        """Write the provenance of a setting."""
        known = {**self.notes(), setting: dict(facts)}
        write_text_atomic(self.path / PROVENANCE, json.dumps(known, indent=1, sort_keys=True) + "\n")


def require_same(folder: MeasurementFolder, setting: str, facts: Mapping[str, Any]) -> None:
    """Refuse a folder with another base model, or with other adapters at the same setting.

    Raises
    ------
    InputError
        Naming what differs.
    """
    for name, known in folder.notes().items():
        for key in ("base_model", "ranks") if name == setting else ("base_model",):
            there, here = known.get(key), facts[key]
            if there is not None and here is not None and there != here:
                rule = f"must be {there} to go on with what is there; choose another folder"
                raise InputError(rule, here, f"{folder.path / PROVENANCE}: {name}: {key}")


def loading_row(rank: int, s_max: int, kind: str, times_ms: Sequence[float]) -> dict[str, float | str]:
    """Return a row of the loading table: quartiles of load times, bounded below for calibration."""
    low, median, high = np.percentile(times_ms, (25, 50, 75)).tolist()
    return {
        "rank": float(rank),
        "s_max": float(s_max),
        "kind": kind,
        "ms": max(MIN_LOAD_MS, median),
        "ms_p25": low,
        "ms_p75": high,
        "loads": float(len(times_ms)),
    }


def idle_run(prompt_tokens: float, ttft_ms: float) -> dict[str, Any]:
    """Return the columns of a run of minimal load, whose TTFT is that of an idle server."""
    return {
        "rates_rps": _IDLE_RATE_RPS,
        "prompt_mean": prompt_tokens,
        "prompt_std": 0,
        "output_mean": OUTPUT_TOKENS,
        "output_std": 0,
        "duration_s": _IDLE_RUN_S,
        "ttft_s_p50": ttft_ms / 1e3,
    }


@dataclass(frozen=True)
class FolderTables:
    """Paths of tables; None for missing ones."""

    base: str | None
    steps: str | None
    runs: str | None
    memory: str | None
    loading: str | None


def tables_of(folder: str | os.PathLike[str]) -> FolderTables:
    """Return the tables of a measurement folder.

    Steps of the engine behind its server take precedence over those of the bare engine.

    Raises
    ------
    InputError
        If there is none.
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
