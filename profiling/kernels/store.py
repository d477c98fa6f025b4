"""A folder of kernel timings: a table that grows with every stretch of measuring, and where it is from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from capplan.errors import InputError
from capplan.models.kernel_fits import COLUMNS, read_kernel_table
from capplan.profiling.kernels.calls import HALVES
from capplan.profiling.kernels.sampling import Spot, relative_error
from capplan.spec import read_text, write_text_atomic
from capplan.spec.files import write_bytes_atomic

TABLE: Final = "kernels.parquet"
PROVENANCE: Final = "provenance.json"
_FIXED: Final = ("device_name", "dtype", "threads", "seed")
"""What must not change when a measurement goes on."""


class Store:
    """The folder.

    Parameters
    ----------
    folder
        Made if it is not there.
    settings
        What was asked for and on what; a folder with another device, dtype, seed or number of threads is
        refused.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self._folder = Path(folder)
        self._settings = dict(settings)
        self._sessions: list[dict[str, Any]] = []
        known = self._folder / PROVENANCE
        if known.exists():
            self._sessions = _sessions(known, self._settings)

    @property
    def table(self) -> Path:
        """Where the table stands."""
        return self._folder / TABLE

    def restore(self, spots: Iterable[Spot]) -> int:
        """Give spots the visits that an earlier stretch made, and return how many had any."""
        if not self.table.exists():
            return 0
        frame = read_kernel_table(self.table)
        known = {
            key: rows.set_index("half")
            for key, rows in frame.groupby(["kernel", "width", "case"], sort=False)
        }
        found = 0
        for spot in spots:
            rows = known.get(spot.key)
            if rows is None:
                continue
            spot.shrink_us, spot.expand_us = (list(rows["visits_us"][half]) for half in HALVES)
            spot.disturbed = int(rows["disturbed"]["shrink"])
            found += 1
        return found

    def write(self, spots: Iterable[Spot], session: Mapping[str, Any]) -> None:
        """Write the visits of all spots; rows of spots that are not among them stay as they are."""
        self._folder.mkdir(parents=True, exist_ok=True)
        spots = [spot for spot in spots if spot.visits]
        frame = pd.DataFrame([_row(spot, half) for spot in spots for half in HALVES], columns=COLUMNS)
        if self.table.exists():
            before = read_kernel_table(self.table)
            ours = {spot.key for spot in spots}
            keys = zip(before["kernel"], before["width"], before["case"], strict=True)
            others = before[[key not in ours for key in keys]]
            frame = pd.concat([others, frame], ignore_index=True) if len(others) else frame
        write_bytes_atomic(self.table, frame.to_parquet(index=False))
        record = {"settings": self._settings, "sessions": [*self._sessions, dict(session)]}
        write_text_atomic(self._folder / PROVENANCE, json.dumps(record, indent=2) + "\n")


def _sessions(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        record = json.loads(read_text(path))
        known, sessions = record["settings"], record["sessions"]
    except (ValueError, KeyError, TypeError):
        raise InputError("must be a record that this command wrote", location=str(path)) from None
    for name in _FIXED:
        if known.get(name) != settings[name]:
            rule = f"must be {known.get(name)!r} to go on with what is there; choose another folder"
            raise InputError(rule, settings[name], f"{path}: {name}")
    return list(sessions)


def _row(spot: Spot, half: str) -> dict[str, Any]:
    case, times = spot.case, spot.shrink_us if half == "shrink" else spot.expand_us
    ranks = np.array(case.ranks)
    return {
        "kernel": spot.kernel,
        "half": half,
        "width": spot.width,
        "case": case.name,
        "configuration": case.configuration,
        "grid": case.grid,
        "phase": case.phase,
        "requests": case.requests,
        "tokens": case.tokens,
        "adapters": ranks.size,
        "max_rank": int(ranks.max()),
        "rank_sum": int(ranks.sum()) * case.requests_each,
        "adapter_rank_sum": int(ranks.sum()),
        "rank_tokens": int(ranks.sum()) * case.requests_each * case.tokens_each,
        "median_us": float(np.median(times)),
        "relative_error": relative_error(times) if len(times) > 1 else None,
        "visits": len(times),
        "disturbed": spot.disturbed,
        "visits_us": [float(each) for each in times],
    }
