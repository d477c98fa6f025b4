"""Hold everything equal that a change of structure must leave as it is: ``python -m tests.equal [PART ...]``.

Parts: plans, traces, golden, schemas, flags, statuses, figures. Everything goes through the command line, as
users see it. ``--record`` replaces the recordings of the parts. Exit status: 0 if all is equal, else 1.

A plan is equal byte for byte but for its author and command; a simulation in every digit of its result and of
every request; a schema but for titles, descriptions and names of definitions; flags but for those listed in
removed_flags.txt. Figures are the lines that a benchmark prints; they need the reference data, by default
``../shared/reference`` beside the checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import pandas as pd
import typer
from rich.progress import track

from capplan.cli.app import app
from tests.equal.commands import EXAMPLES, FIGURES, FILES, LLAMA, PLANNED_PRESETS, PLANS, STATUSES, TRACES

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent
RECORDED: Final = HERE / "recorded"
SMALL_PLAN: Final = "plan small.yaml -o small.plan.json"
"""Makes a plan that other command lines read."""
TIMES: Final = re.compile(r"\b\d[\d.,]* (m?s|min|h)\b|^.*(elapsed|wall).*$", re.MULTILINE)
Found = dict[str, Any]


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.equal", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="only these")
    parser.add_argument("--record", action="store_true", help="replace the recordings")
    parser.add_argument("--reference", type=Path, default=ROOT.parent / "shared" / "reference", metavar="DIR")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: is not a part; these are: {', '.join(PARTS)}")
    different = 0
    for name in given.parts or PARTS:
        file = RECORDED / f"{name}.json"
        if not (given.record or file.is_file()):
            sys.stdout.write(f"{name}: not recorded; --record does so\n")
            continue
        found = figures(given.reference) if name == "figures" else PARTS[name]()
        if given.record:
            RECORDED.mkdir(exist_ok=True)
            file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            continue
        differences = list(_differences(json.loads(file.read_text(encoding="utf-8")), found, ""))
        different += bool(differences)
        sys.stdout.write(f"{name}: {len(found)} recorded, {len(differences) or 'no'} differences\n")
        sys.stdout.writelines(f"  {each}\n" for each in differences[:20])
    return int(different > 0)


def plans() -> Found:
    """Return the plans of the examples, of presets, and of other solvers and features."""
    examples = {name: f"plan {ROOT / 'examples' / name / 'workload.yaml'}" for name in EXAMPLES}
    presets = {name: f"plan {name}.yaml" for name in PLANNED_PRESETS}
    with _folder(_small_plan()) as folder:
        for name in PLANNED_PRESETS:
            _capplan(folder, f"workload preset {name} --profile {LLAMA} -o {name}.yaml")

        def plan(item: tuple[str, str]) -> tuple[str, object]:
            name, words = item
            status, _ = _capplan(folder, f"{words} -o {name}.json")
            file = folder / f"{name}.json"
            return name, _masked(file.read_text(encoding="utf-8")) if file.exists() else status

        return dict(_in_parallel(plan, {**examples, **presets, **PLANS}.items(), "plans"))


def traces() -> Found:
    """Return the results of simulations, and a digest of their requests."""

    def simulate(item: tuple[str, str]) -> tuple[str, object]:
        name, words = item
        with _folder(small_plan) as folder:
            status, text = _capplan(folder, words)
            requests = folder / "requests.parquet"
            digest = _digest(pd.read_parquet(requests)) if requests.exists() else None
        result = re.sub(r'"(wall_s|requests_out|requests)": [^,\n]*', r'"\1": null', text)
        return name, {"status": status, "result": _sha256(result.encode()), "requests": digest}

    small_plan = _small_plan()
    return dict(_in_parallel(simulate, TRACES.items(), "traces"))


def golden() -> Found:
    """Return the agreement of the three forms of the rules with recorded decisions."""
    words = [sys.executable, "-m", "tests.golden", "--json", "tests/golden/recorded.json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    found: Found = json.loads(done.stdout)["files"]
    return found


def schemas() -> Found:
    """Return the JSON Schemas without titles, descriptions and names of definitions."""
    texts = {name: _capplan(ROOT, f"schema {name}")[1] for name in ("plan", "workload", "profile")}
    return {name: _bare(json.loads(text)) for name, text in texts.items()}


def flags() -> Found:
    """Return every flag and argument of every command, but those that were removed on purpose."""
    removed = set((HERE / "removed_flags.txt").read_text(encoding="utf-8").split("\n"))

    def walk(command: Any, path: str) -> Iterator[tuple[str, str]]:
        for each in command.params:
            for name in (*each.opts, *each.secondary_opts):
                if f"{path} {name}" not in removed:
                    kind = "required" if each.required else f"by default {each.default!r}"
                    yield f"{path} {name}", f"{each.metavar or each.name}, {kind}"
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, f"{path} {name}")

    return dict(walk(typer.main.get_command(app), "capplan"))


def statuses() -> Found:
    """Return the exit status of command lines, good and bad."""

    def status(words: str) -> tuple[str, object]:
        with _folder(small_plan) as folder:
            return words, _capplan(folder, words)[0]

    small_plan = _small_plan()
    return dict(_in_parallel(status, STATUSES, "statuses"))


def figures(reference: Path) -> Found:
    """Return the lines that benchmarks print, without times."""

    def printed(item: tuple[str, str]) -> tuple[str, object]:
        name, words = item
        command = [sys.executable, "-m", *f"benchmarks.{words}".format(reference=reference).split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return name, TIMES.sub("", done.stdout).splitlines()

    return dict(_in_parallel(printed, FIGURES.items(), "figures"))


PARTS: Final[Mapping[str, Callable[..., Found]]] = {
    "flags": flags,
    "schemas": schemas,
    "golden": golden,
    "statuses": statuses,
    "traces": traces,
    "plans": plans,
    "figures": figures,
}


@contextmanager
def _folder(small_plan: str = "") -> Iterator[Path]:
    """Yield a temporary folder with the files of the command lines, and the plan that some of them read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in {**FILES, "small.plan.json": small_plan}.items():
            (folder / file).write_text(text, encoding="utf-8")
        yield folder


@cache
def _small_plan() -> str:
    with _folder() as folder:
        _capplan(folder, SMALL_PLAN)
        return (folder / "small.plan.json").read_text(encoding="utf-8")


def _capplan(folder: Path, words: str) -> tuple[int, str]:
    """Return exit status and output of a command line."""
    command = [sys.executable, "-m", "capplan", *words.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def _in_parallel(
    function: Callable[[Any], tuple[str, object]], items: Any, name: str
) -> Iterator[tuple[str, object]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from track(pool.map(function, items), name, total=len(items))


def _masked(text: str) -> list[str]:
    """Return the lines of a plan without its author and its command."""
    return [line for line in text.split("\n") if not re.match(r' *"(created_by|command)":', line)]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(requests: pd.DataFrame) -> str:
    """Return the digest of all values, those of text columns by their text."""
    ordered = requests[sorted(requests)]
    return _sha256(pd.util.hash_pandas_object(ordered, index=False).to_numpy().tobytes())


def _bare(schema: Any) -> Any:
    """Return a schema with its definitions put where they are used; recursive ones by number of use."""
    definitions, open_names = schema.get("$defs", {}), []

    def strip(node: Any) -> Any:
        if isinstance(node, list):
            return [strip(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            name = node["$ref"].rsplit("/", 1)[-1]
            if name in open_names:
                return {"recursive": len(open_names) - open_names.index(name)}
            open_names.append(name)
            bare = strip(definitions[name] | {key: value for key, value in node.items() if key != "$ref"})
            open_names.pop()
            return bare
        dropped = ("title", "description", "$defs")
        # a property may be called title or description; its schema is a mapping then
        return {
            key: strip(value)
            for key, value in node.items()
            if key not in dropped or (isinstance(value, dict) and key != "$defs")
        }

    return strip(schema)


def _differences(recorded: Any, found: Any, path: str) -> Iterator[str]:
    """Yield where two recordings differ."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted(recorded.keys() | found.keys()):
            if key not in found or key not in recorded:
                yield f"{path}/{key}: {'is gone' if key not in found else 'is new'}"
            else:
                yield from _differences(recorded[key], found[key], f"{path}/{key}")
    elif isinstance(recorded, list) and isinstance(found, list):
        if len(recorded) != len(found):
            yield f"{path}: {len(recorded)} lines recorded, {len(found)} found"
        for number, (a, b) in enumerate(zip(recorded, found, strict=False)):
            yield from _differences(a, b, f"{path}/{number}")
    elif recorded != found:
        yield f"{path}: recorded {recorded!r}, found {found!r}"


if __name__ == "__main__":
    raise SystemExit(main())
