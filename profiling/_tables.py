"""Measurement folders: the tables that calibration reads, and their provenance."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from capplan.errors import InputError
from capplan.spec import error_reason, open_stream, read_text, write_bytes_atomic, write_text_atomic

if TYPE_CHECKING:
    import pandas as pd

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage, the number of its parts that are done, and their total."""
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
            with open_stream(file) as opened:
                return pd.read_parquet(opened) if file.suffix == ".parquet" else pd.read_csv(opened)
        except InputError:
            raise
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read: {error_reason(error)}", location=str(file)) from None

    def rows(self, name: str, setting: str) -> list[dict[str, Any]]:
        """Return the rows of a setting in a table."""
        table = self.table(name)
        if table is None or _SETTING not in table.columns:
            return []
        rows: list[Any] = table[table[_SETTING] == setting].to_dict("records")
        return rows

    def has(self, name: str, setting: str) -> bool:
        """Return whether a table has rows of a setting."""
        return bool(self.rows(name, setting))

    def measured(self, name: str, setting: str, column: str) -> set[str]:
        """Return the values of a column for a setting."""
        return {str(row[column]) for row in self.rows(name, setting) if column in row}

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
            write_bytes_atomic(self.path / name, own.to_parquet(compression="zstd"))
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


def require_same(
    known: Mapping[str, Any], facts: Mapping[str, Any], keys: Iterable[str], location: str
) -> None:
    """Refuse to resume a measurement with other facts; what is missing on either side is not compared."""
    for key in keys:
        there, here = known.get(key), facts[key]
        here = list(here) if isinstance(here, tuple) else here
        if there is not None and here is not None and there != here:
            rule = f"must be {there} to resume the measurement in this folder; choose another folder"
            raise InputError(rule, here, f"{location}: {key}")


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


def idle_run(name: str, settings: Mapping[str, Any], first_tokens: Mapping[str, float]) -> dict[str, Any]:
    """Return a row of first tokens as a run of minimal load, whose TTFT is that of an idle server."""
    return {
        "run": f"{name}-idle-p{first_tokens['prompt_tokens']:g}",
        **settings,
        "rates_rps": _IDLE_RATE_RPS,
        "prompt_mean": first_tokens["prompt_tokens"],
        "prompt_std": 0,
        "output_mean": OUTPUT_TOKENS,
        "output_std": 0,
        "duration_s": _IDLE_RUN_S,
        "ttft_s_p50": first_tokens["ttft_ms_p50"] / 1e3,
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
    found = FolderTables(
        *(
            next((str(path / name) for name in names if (path / name).is_file()), None)
            for names in ((BASE,), (SERVED, STEPS), (RUNS,), (MEMORY,), (LOADING,))
        )
    )
    if not any((found.steps, found.runs, found.memory, found.loading)):
        raise InputError("must hold tables of `capplan profile engine` or `server`", location=str(path))
    return found
