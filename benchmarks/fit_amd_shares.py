"""Fit the shares of bandwidth and arithmetic that AMD GPUs reach under load, and predict systems left out.

    python -m benchmarks.fit_amd_shares [--data DIR]

Rows are those of `benchmarks.measured.mlperf`. One share of the bandwidth holds for all of these GPUs, and
one share of the arithmetic for each: they have the same peak, and other limits of power. Each row is
predicted by a fit without any row of its system: mean TPOT at the scheduled rate, and the highest rate within
the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from scipy.optimize import brentq, minimize

from benchmarks.common import command_line, emit, records_table, user_errors
from benchmarks.measured import mlperf
from benchmarks.measured.case import data_folder, roofline_for
from benchmarks.measured.mlperf import ServerRun
from capplan import Profile
from capplan.models import Efficiencies

_START: Final = 0.7
_RATES: Final = (0.3, 3.0)
"""Ends of the search for the highest rate, as multiples of the submitted one."""

Shares = Mapping[str, Efficiencies]
"""By GPU."""


def profile_of(run: ServerRun, shares: Shares) -> Profile:
    """Return the roofline of a run's replica."""
    return roofline_for(run.deployment, physics=shares[run.deployment.gpu])


def fit(runs: Sequence[ServerRun]) -> dict[str, Efficiencies]:
    """Return the shares that make the mean distance of the logs of mean TPOT least, rounded to 1 %."""
    gpus = list(dict.fromkeys(run.deployment.gpu for run in runs))

    def shares(values: Sequence[float]) -> dict[str, Efficiencies]:
        bandwidth, *compute = np.clip(values, 0.05, 1.0)
        return {gpu: Efficiencies(bandwidth, each) for gpu, each in zip(gpus, compute, strict=True)}

    def distance(values: Sequence[float]) -> float:
        at = shares(values)
        ratios = [run.predict(profile_of(run, at))["tpot_ms"] / run.measured["tpot_ms"] for run in runs]
        return float(np.mean(np.abs(np.log(ratios))))

    found = minimize(distance, [_START] * (1 + len(gpus)), method="Nelder-Mead", options={"xatol": 1e-3})
    return shares(np.round(found.x, 2))


def highest_rate_rps(run: ServerRun, profile: Profile) -> float:
    """Return the highest rate of a replica within the bounds of the benchmark, to 1 %."""

    def sign(multiple: float) -> float:
        return 1.0 if run.is_within_bounds(profile, multiple * run.rate_rps) else -1.0

    if sign(_RATES[0]) < 0 or sign(_RATES[1]) > 0:
        return float("nan")
    return run.rate_rps * float(brentq(sign, *_RATES, xtol=0.01))


def left_out(runs: Sequence[ServerRun]) -> Iterator[dict[str, object]]:
    """Yield every row with its predictions by the other systems."""
    for system in dict.fromkeys(run.system for run in runs):
        shares = fit([run for run in runs if run.system != system])
        for run in runs:
            if run.system == system:
                profile = profile_of(run, shares)
                found = run.predict(profile)
                rate_rps = highest_rate_rps(run, profile)
                yield {
                    "run": run.name,
                    "req/s per GPU": f"{run.rate_rps:.2f}",
                    "mean TPOT, ms": f"{run.measured['tpot_ms']:.1f}",
                    "predicted": f"{found['tpot_ms']:.1f}",
                    "error": 100.0 * (found["tpot_ms"] / run.measured["tpot_ms"] - 1.0),
                    "mean TTFT, ms": f"{run.measured['ttft_ms']:.0f}",
                    "predicted TTFT, ms": f"{found['ttft_ms']:.0f}",
                    "highest rate / submitted": rate_rps / run.rate_rps,
                }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="folder of measured data")
    parser.add_argument("--out", type=Path, help="file for the report")
    args = parser.parse_args()
    with user_errors():
        runs = [run for run in mlperf.read(data_folder(args.data)) if isinstance(run, ServerRun)]
        shares = fit(runs)
        rows = list(left_out(runs))
        errors = np.abs([float(str(row["error"])) for row in rows])
        rates = np.abs(np.array([float(str(row["highest rate / submitted"])) for row in rows]) - 1.0)
        shown = [
            row
            | {
                "error": f"{row['error']:+.1f} %",
                "highest rate / submitted": f"{row['highest rate / submitted']:.2f}",
            }
            for row in rows
        ]
        text = "\n".join(
            [
                *(
                    f"{gpu}: bandwidth {at.bandwidth:.2f}, compute {at.compute:.2f}"
                    for gpu, at in shares.items()
                ),
                f"Systems left out: mean TPOT {errors.mean():.1f} % off (median {np.median(errors):.1f} %); "
                f"highest rate {100 * rates.mean():.1f} % off (median {100 * np.median(rates):.1f} %)",
                "",
                records_table(shown),
            ]
        )
        emit(text + "\n", args.out)


if __name__ == "__main__":
    main()
