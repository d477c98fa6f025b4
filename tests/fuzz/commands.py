"""Hostile inputs of commands, each in a process of its own: ``python -m tests.fuzz.commands``.

The processes are forks of one that has imported capplan and loaded its compiled code; each runs the
function `main` of the command line in a folder of its own. Reported are tracebacks, ends by a signal,
refusals that are not one line, inputs that take over 10 s of processor time or 1 GiB, processes that outlive
their command, and files that it leaves behind.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

from benchmarks.common import command_line, markdown
from tests.fuzz import document_inputs, file_inputs, flag_inputs, table_inputs
from tests.fuzz.case import PLAN, Case, write_base
from tests.fuzz.isolation import Limits, Outcome, isolated

MOST_S: Final = 10.0  # of processor time: other work on the machine does not count
MOST_BYTES: Final = 2**30
_STATUSES: Final = (0, 1, 2, 3)
_USAGE: Final = "Usage: "
_MOST_CHARACTERS: Final = 4000
"""Of a refusal; the usage of a command has several lines."""


def cases() -> Iterator[Case]:
    """Yield all cases; their names are unique."""
    kinds = (flag_inputs, document_inputs, table_inputs, file_inputs)
    return chain.from_iterable(kind.cases() for kind in kinds)


def run_words(words: Sequence[str]) -> int:
    """Run a command line as `capplan` does and return its exit status."""
    from capplan.cli import main as capplan

    sys.argv = ["capplan", *words]
    try:
        capplan()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def preload() -> None:
    """Import and load what commands use, once for all cases."""
    import capplan.reports.pages._page  # noqa: F401
    from capplan.cli.app import _COMMANDS, _load
    from tests.compile import compile_slots

    for path in _COMMANDS:
        _load(path)
    compile_slots()


def run_case(case: Case, base: Path, root: Path) -> tuple[Outcome, list[str]]:
    """Run a case in a fresh copy of the base folder; return its end and its faults."""
    folder = root / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    for name, content in case.files.items():
        if callable(content):
            content(folder / name)
        elif isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            (folder / name).write_text(content, encoding="utf-8", errors="surrogatepass")
    outcome = isolated(partial(run_words, case.words), folder, Limits())
    return outcome, list(_faults(outcome, folder))


def _faults(outcome: Outcome, folder: Path) -> Iterator[str]:
    stderr = outcome.stderr
    if "Traceback (most recent call last)" in stderr:
        yield f"traceback: {stderr.strip().splitlines()[-1][:150]}"
    elif outcome.status not in _STATUSES:
        yield f"exit status {outcome.status}"
    elif outcome.status == 2 and not _is_refusal(stderr):
        yield f"refusal of {len(stderr.splitlines())} lines, {len(stderr)} characters"
    if any(ord(letter) < ord(" ") and letter not in "\n\t" for letter in stderr + outcome.stdout):
        yield "control characters"
    if outcome.cpu_s > MOST_S:
        yield f"{outcome.cpu_s:.0f} s"
    if outcome.peak_bytes > MOST_BYTES:
        yield f"{outcome.peak_bytes / 2**30:.1f} GiB"
    if outcome.left:
        yield f"{outcome.left} processes left"
    for path in folder.rglob(".*"):
        yield f"left behind: {path.name}"


def _is_refusal(stderr: str) -> bool:
    lines = stderr.strip().splitlines()
    is_line = len(lines) == 1 and lines[0].startswith("error: ")
    return len(stderr) < _MOST_CHARACTERS and (is_line or (lines[:1] != [] and lines[0].startswith(_USAGE)))


def _line(case: Case, outcome: Outcome, found: Sequence[str]) -> str:
    """Return what became of a case in one line."""
    last = (outcome.stderr.strip() or outcome.stdout.strip()).splitlines()[-1:]
    use = f"{outcome.cpu_s:.1f} s, {outcome.peak_bytes >> 20} MiB"
    return f"{case.name}: {outcome.status}, {use}: {'; '.join(found)} | {''.join(last)[:200]}"


def prepare(base: Path) -> None:
    """Write the files that cases change, a plan among them."""
    base.mkdir()
    write_base(base)
    planned = isolated(partial(run_words, (*PLAN[:3], "plan.json", *PLAN[4:])), base, Limits(120.0))
    if planned.status != 0:
        raise RuntimeError(planned.stderr)


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases and print what became of them."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="Cases whose names contain this.")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="Each N-th case only.")
    parser.add_argument("--verbose", action="store_true", help="Print every case.")
    args = parser.parse_args(words)
    preload()
    outcomes: list[Outcome] = []
    faulty = 0
    statuses: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        prepare(base)
        for case in [case for case in cases() if args.only in case.name][:: args.every]:
            outcome, found = run_case(case, base, Path(name))
            outcomes.append(outcome)
            statuses[outcome.status] += 1
            faulty += bool(found)
            if args.verbose or found:
                print(_line(case, outcome, found), flush=True)
    facts = {
        "inputs": len(outcomes),
        "faulty": faulty,
        "slowest, CPU s": f"{max(each.cpu_s for each in outcomes):.1f}",
        "largest, MiB": max(each.peak_bytes for each in outcomes) >> 20,
        "by exit status": ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items())),
    }
    print(markdown(list(facts), [[str(fact) for fact in facts.values()]]))
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
