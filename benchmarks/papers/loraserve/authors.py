"""The authors' measured rows: prefill time by tokens and rank, and the order of their servers.

The tables are those of github.com/shashwatj07/S-LoRA, typed over with their provenance; they are not part of
the repository. GPU and tensor parallelism of the runs are not in them. A prefill batch is the rows of one
server with the same prefill time; rows are a window in order of completion, so batches miss requests that
ended outside of it.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import markdown
from benchmarks.papers.loraserve.hardware import hardware

SWEEPS: Final = "rank_sweeps.csv"
RUNS: Final = {
    "uniform, Poisson, 32 req/s": "per_request_uniform_poisson_32.0_system__sample.csv",
    "production, 25 req/s": "per_request_prod_25.0_50adapters_system__sample.csv",
}
ROOFLINES: Final = ("a100-40g/llama-7b/tp8", "a100-40g/llama-30b/tp4", "a100-40g/llama-2-70b/tp8")
_LONG: Final = 2000
_LOW, _HIGH = 8, 128
_ROWS_OF_BATCH: Final = (1, 3)
Row = Mapping[str, str]


@dataclass(frozen=True)
class PrefillFit:
    """``base_s + s_per_ktoken * tokens / 1e3 + s_per_mrank * tokens * largest rank / 1e6``."""

    base_s: float
    s_per_ktoken: float
    s_per_mrank: float

    def seconds(self, tokens: NDArray[np.float64], rank: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the prefill times of batches."""
        slopes = self.s_per_ktoken * tokens / 1e3 + self.s_per_mrank * tokens * rank / 1e6
        return np.asarray(self.base_s + slopes)

    @property
    def ratio(self) -> float:
        """Prefill of 2,000 tokens at rank 128 over that at rank 8."""
        low, high = self.seconds(np.full(2, float(_LONG)), np.array([_LOW, _HIGH], float)).tolist()
        return float(high / low)


@dataclass(frozen=True)
class Prefills:
    """Measured prefills, one per batch."""

    tokens: NDArray[np.float64]
    rank: NDArray[np.float64]
    """Largest in the batch."""
    seconds: NDArray[np.float64]

    def part(self, of: NDArray[np.bool_]) -> Prefills:
        """Return some of the batches."""
        return Prefills(self.tokens[of], self.rank[of], self.seconds[of])

    def fitted(self) -> PrefillFit:
        """Return the least-squares fit."""
        columns = [np.ones_like(self.tokens), self.tokens / 1e3, self.tokens * self.rank / 1e6]
        found = np.linalg.lstsq(np.column_stack(columns), self.seconds)[0].tolist()
        return PrefillFit(*found)

    def error(self, predicted: NDArray[np.float64] | float) -> float:
        """Return ``mean(|p / a - 1|)``."""
        return float(np.mean(np.abs(predicted / self.seconds - 1.0)))


def held_out(prefills: Prefills, halves: NDArray[np.bool_]) -> tuple[list[float], list[float]]:
    """Return the error of the fit on the half it has not seen, for both halves, and that of the mean."""
    fits, means = [], []
    for half in (halves, ~halves):
        seen, rest = prefills.part(half), prefills.part(~half)
        fits.append(rest.error(seen.fitted().seconds(rest.tokens, rest.rank)))
        means.append(rest.error(float(seen.seconds.mean())))
    return fits, means


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def sweep(rows: Sequence[Row], model: str) -> Prefills:
    """Return the runs of one request at a time (rate 1), whose TTFT is the prefill of one prompt."""
    kept = [row for row in rows if row["model"] == model and row["req_rate"] == "1" and not row["note"]]
    tokens, rank, seconds = (
        np.array([float(row[name]) for row in kept]) for name in ("prompt_tokens", "rank", "ttft_mean_s")
    )
    return Prefills(tokens, rank, seconds)


def batches(rows: Sequence[Row], fewest_rows: int) -> Prefills:
    """Return the prefill batches of a run in order of completion, without those of fewer rows."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["server"], row["server_prefill_exec_s"]].append(row)
    kept = [each for each in found.values() if len(each) >= fewest_rows]
    return Prefills(
        np.array([sum(float(row["prompt_len"]) for row in each) for each in kept]),
        np.array([max(float(row["rank"]) for row in each) for each in kept]),
        np.array([float(each[0]["server_prefill_exec_s"]) for each in kept]),
    )


def report(folder: Path) -> str:
    """Return all tables.

    Raises
    ------
    OSError
        If a table is missing.
    """
    runs = {name: rows_of(folder / file) for name, file in RUNS.items()}
    return "\n\n".join(
        [
            _sweep_table(rows_of(folder / SWEEPS)),
            _batch_table(runs),
            *(f"{name}:\n\n{_server_table(rows)}" for name, rows in runs.items()),
        ]
    )


def _sweep_table(rows: Sequence[Row]) -> str:
    """Return the fits to the sweeps, on every second prompt length, with the roofline's terms beside."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        prefills = sweep(rows, model)
        halves = prefills.tokens % 200 == 0
        fit, (error, other) = prefills.part(halves).fitted(), held_out(prefills, halves)[0]
        cells = [f"{fit.base_s:.3f}", f"{1e3 * fit.s_per_ktoken:.1f}", f"{fit.s_per_mrank:.2f}"]
        lines.append(
            [model, str(prefills.seconds.size), *cells, f"{fit.ratio:.2f}", f"{error:.1%}, {other:.1%}"]
        )
    for name in ROOFLINES:
        step = hardware(name).step_latency
        slope = step.value("ms_per_ktoken") + step.value("ms_per_ktoken_beyond_graphs")
        terms = PrefillFit(step.value("base_ms") / 1e3, slope / 1e3, step.value("ms_per_prefill_krank"))
        cells = [f"{terms.base_s:.3f}", f"{slope:.1f}", f"{terms.s_per_mrank:.2f}", f"{terms.ratio:.2f}"]
        lines.append([f"roofline {name}", "", *cells, ""])
    header = ["model", "rows", "s", "ms per 1000 tokens", "ms per 1000 token-ranks", "rank 128 / 8 at 2,000"]
    return markdown([*header, "error on the other half"], lines)


def _batch_table(runs: Mapping[str, Sequence[Row]]) -> str:
    lines = []
    for name, rows in runs.items():
        for fewest in _ROWS_OF_BATCH:
            prefills = batches(rows, fewest)
            halves = np.arange(prefills.seconds.size) % 2 == 0
            fits, means = held_out(prefills, halves)
            fit = prefills.fitted()
            cells = [f"{fit.base_s:.3f}", f"{1e3 * fit.s_per_ktoken:.1f}", f"{fit.s_per_mrank:.2f}"]
            errors = [", ".join(f"{error:.0%}" for error in both) for both in (fits, means)]
            lines.append([name, str(fewest), str(prefills.seconds.size), *cells, *errors])
    header = ["run", "rows in a batch, at least", "batches", "s", "ms per 1000 tokens"]
    header += ["ms per 1000 token-ranks", "error on the other half", "error of the mean"]
    return markdown(header, lines)


def _server_table(rows: Sequence[Row]) -> str:
    """Return mean times by server, the fastest prefill first."""
    of: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of[row["server"]].append(row)
    lines = []
    for server, own in of.items():
        ranks = sorted({int(row["rank"]) for row in own})
        names = ("server_prefill_queue_s", "server_prefill_exec_s", "ttft_s", "tbt_s")
        means = [fmean(float(row[name]) for row in own) for name in names]
        cells = [", ".join(map(str, ranks)), str(len(own)), *(f"{mean:.3f}" for mean in means)]
        lines.append((means[1], [server.rsplit(".", 1)[1], *cells]))
    header = ["server", "ranks", "rows", "queue s", "prefill s", "TTFT s", "time between tokens s"]
    return markdown(header, [cells for _, cells in sorted(lines)])
