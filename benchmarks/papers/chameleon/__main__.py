"""Chameleon's figures, simulated: ``python -m benchmarks.papers.chameleon --trace FILE --out DIR``.

Prints a table with a row per figure: the paper's value, ours as mean and range over seeds, the band, and
whether our mean is inside. ``--part`` names parts of the table; ``--part settle`` shows what the setting was
solved for. DIR has a JSON file per simulated case, and an interrupted run goes on.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import command_line, markdown, user_errors
from benchmarks.papers.chameleon.lab import opened
from benchmarks.papers.chameleon.rows import PARTS
from benchmarks.papers.chameleon.setting import TRACE
from benchmarks.papers.chameleon.settle import report

_HEADER = ("figure", "paper", "ours (range over seeds)", "band", "inside")


def main() -> int:
    parser = command_line(__doc__)
    parser.prog = "python -m benchmarks.papers.chameleon"
    parser.add_argument("--trace", type=Path, required=True, help=f"{TRACE}, or the folder that holds it")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--part", nargs="+", choices=("settle", *PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    folder = given.trace if given.trace.is_dir() else given.trace.parent
    if not (folder / TRACE).is_file():
        print(f"skipped: {given.trace} is not {TRACE} and does not hold it")
        return 0
    with user_errors(), opened(str(folder), given.out, given.seeds, given.workers) as lab:
        for part in given.part:
            if part == "settle":
                print(*report(str(folder), given.seeds), sep="\n", flush=True)
                continue
            rows = [row.cells() for row in PARTS[part](lab)]
            print(f"\n### {part}\n\n{markdown(_HEADER, rows)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
