"""LoRAServe's evaluation, simulated: ``python -m benchmarks.papers.loraserve --traces DIR --out DIR``.

Prints a table per part. Rates are the highest with a P95 TTFT within 10 s, bracketed and bisected to 1 %
(``--precision``), per seed with common random numbers; mean and range over seeds, and 20 placements of S-LoRA
Random. DIR of ``--out`` has a JSON file per cell, and an interrupted run goes on. The part ``authors``
compares with the authors' measured rows and needs ``--measured``, the folder of their tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.common import command_line, user_errors
from benchmarks.papers.loraserve.authors import report
from benchmarks.papers.loraserve.hardware import SETTING
from benchmarks.papers.loraserve.lab import Lab
from benchmarks.papers.loraserve.load import LENGTHS
from benchmarks.papers.loraserve.parts import CLUSTERS, PARTS
from benchmarks.papers.loraserve.systems import SEARCH_S

AUTHORS: Final = "authors"


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.prog = "python -m benchmarks.papers.loraserve"
    parser.add_argument("--traces", type=Path, required=True, help=f"folder that holds {LENGTHS}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--part", nargs="+", choices=(*PARTS, AUTHORS), default=list(PARTS))
    parser.add_argument("--hardware", default=SETTING, help="h100-stand-in, or GPU/MODEL/tpN")
    parser.add_argument("--seeds", type=int, default=Lab.seeds)
    parser.add_argument("--first-seed", type=int, default=Lab.first_seed)
    parser.add_argument("--duration", dest="duration_s", type=float, default=Lab.duration_s)
    parser.add_argument("--precision", type=float, default=Lab.precision, help="of the highest rates")
    parser.add_argument("--step-s", type=float, default=Lab.step_s, help="time step of re-balancing")
    parser.add_argument("--search-s", type=float, default=SEARCH_S, help="time of a placement by capplan")
    parser.add_argument(
        "--servers", type=int, choices=CLUSTERS, default=Lab.servers, help="of the part equal-load"
    )
    parser.add_argument("--measured", type=Path, help="folder of the authors' measured tables")
    given = parser.parse_args(arguments)
    if not (given.traces / LENGTHS).is_file():
        print(f"skipped: {given.traces} does not hold {LENGTHS}")
        return 0
    if AUTHORS in given.part and given.measured is None:
        parser.error("part authors needs --measured")
    times = {"duration_s": given.duration_s, "step_s": given.step_s, "search_s": given.search_s}
    numbers = {"seeds": given.seeds, "first_seed": given.first_seed, "servers": given.servers}
    lab = Lab(given.traces, given.out, given.hardware, precision=given.precision, **numbers, **times)
    with user_errors():
        for part in given.part:
            table = report(given.measured) if part == AUTHORS else PARTS[part](lab)
            print(f"\n### {part}\n\n{table}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
