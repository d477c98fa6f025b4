"""``python -m tests.golden FILE...``: replay recorded decisions of vLLM's scheduler and report differences.

Three forms of the rules take every case: the functions of `capplan.serving` compiled, the same functions
uncompiled (in a child process, with NUMBA_DISABLE_JIT=1), and the reference scheduler of `capplan.twin`.
Exit status: 0 when every step agrees, 1 when one differs, 2 when a file is not a recording.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba

from capplan import InputError
from tests.golden.cases import Case, read_cases, unknown_keys
from tests.golden.replay import FlatForm, Form, ReferenceForm, first_difference

FORMS = ("compiled", "uncompiled", "reference")
ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a recording (JSON)")
    parser.add_argument("--form", action="append", choices=FORMS, help="only this form; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    forms = tuple(form for form in FORMS if form in (options.form or FORMS))
    try:
        cases = {file: read_cases(file) for file in options.files}
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    for file, read in cases.items():
        for key in unknown_keys(read):
            sys.stderr.write(f"{file}: config.{key} means nothing here and is passed over\n")
    found: dict[str, dict[str, Any]] = {str(file): {} for file in cases}
    for form in forms:
        reports = _in_this_process(cases, form) if _runs_here(form) else _in_a_child(cases, form)
        for file, report in reports.items():
            found[file][form] = report
    _write(cases, found, options.json)
    return int(any(report["mismatches"] for reports in found.values() for report in reports.values()))


def _runs_here(form: str) -> bool:
    disabled = bool(numba.config.DISABLE_JIT)  # type: ignore[attr-defined]
    return form == "reference" or (form == "uncompiled") == disabled


def _in_this_process(cases: dict[Path, list[Case]], form: str) -> dict[str, Any]:
    reports = {}
    for file, recorded in cases.items():
        report: dict[str, Any] = {"steps": 0, "mismatches": 0, "first": []}
        for case in recorded:
            rules: Form = ReferenceForm(case) if form == "reference" else FlatForm(case)
            steps, difference = first_difference(case, rules)
            report["steps"] += steps
            if difference:
                report["mismatches"] += 1
                report["first"].append(difference._asdict())
        reports[str(file)] = report
    return reports


def _in_a_child(cases: dict[Path, list[Case]], form: str) -> dict[str, Any]:
    """Have a form replayed where numba is set for it."""
    files = [str(file.resolve()) for file in cases]
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden", "--json", "--form", form, *files],
        cwd=ROOT,
        env=os.environ | {"NUMBA_DISABLE_JIT": str(int(form == "uncompiled"))},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"the {form} replay failed with exit status {done.returncode}")
    reports = json.loads(done.stdout)["files"]
    return {str(file): reports[name]["forms"][form] for file, name in zip(cases, files, strict=True)}


def _write(cases: dict[Path, list[Case]], found: dict[str, dict[str, Any]], as_json: bool) -> None:
    if as_json:
        files = {
            str(file): {
                "cases": len(recorded),
                "steps": sum(len(case.steps) for case in recorded),
                "forms": found[str(file)],
            }
            for file, recorded in cases.items()
        }
        sys.stdout.write(json.dumps({"files": files}, indent=1) + "\n")
        return
    for file, recorded in cases.items():
        steps = sum(len(case.steps) for case in recorded)
        mismatches = sum(report["mismatches"] for report in found[str(file)].values())
        sys.stdout.write(f"{file}: {len(recorded)} cases, {steps} steps, {mismatches} mismatches\n")
        for form, report in found[str(file)].items():
            sys.stdout.write(
                f"  {form}: {report['steps']} steps replayed, {report['mismatches']} mismatches\n"
            )
            for first in report["first"]:
                sys.stdout.write(_told(first))


def _told(difference: dict[str, Any]) -> str:
    lines = [f"    {difference['case']}: step {difference['step']} is the first that differs\n"]
    for side in ("expected", "found"):
        tokens, preempted, free_blocks = difference[side]
        shown = ", ".join(f"{request}: {count}" for request, count in tokens)
        lines.append(f"      {side:9} tokens {{{shown}}} preempted {preempted} free blocks {free_blocks}\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
