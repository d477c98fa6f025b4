"""Exports of hostile plans: ``python -m tests.fuzz.exports``.

Text of every kind is put into every field of a plan that reaches a script. A plan is refused, or its
scripts start a program named vllm with the model, the flags and the adapters of the plan and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.common import command_line, markdown
from capplan import Plan
from capplan.deploy import export
from capplan.errors import InputError
from capplan.spec import write_folder_atomic

TEXTS: Final = (
    *("--api-key", "--trust-remote-code", "-h", "--", "-", "--port=1", "--api-key=x"),
    *(
        "$(touch pwned)",
        "`touch pwned`",
        "a;touch pwned",
        "a|touch pwned",
        "a&&touch pwned",
        "a\ntouch pwned",
    ),
    *("a'b", 'a"b', "a\\b", "a'\"'\"';touch pwned;'", "a$HOME", "a${IFS}b", "~root", "a*", "[a]", "a{b,c}"),
    *("{", '{"name": "x", "path": "y"}', "a=b", "a,b", "a b", "a\tb", "#a", "a#b", "!a", "a!b"),
    *(
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        ".",
        "a/../../b",
        "a/",
        "x" * 256,
        "x" * 5000,
        "é漢",
        "\u202ea",
    ),
    *("\x1b[31m", "a\x00b", "a\x7fb", "a\x9bb", "a\rb", "", " ", "CON", "a%sb", "-rf", "@file", "a\u2028b"),
)
"""Flags, shell syntax, quotes, patterns, paths, lengths, control characters."""

FIELDS: Final = (
    *("groups.0.adapters.0.name", "groups.0.adapters.0.path", "groups.0.id", "base_model"),
    *("groups.0.profile", "groups.0.gpu", "created_by", "engine.version"),
)
"""Fields of a plan whose text reaches scripts or the routing table."""

_FLAGS: Final = frozenset(
    f"--{name}"
    for name in (
        *("port", "tensor-parallel-size", "enable-lora", "max-loras", "max-lora-rank", "max-cpu-loras"),
        *(
            "max-num-seqs",
            "max-num-batched-tokens",
            "gpu-memory-utilization",
            "max-model-len",
            "lora-modules",
        ),
    )
)
_ROOT: Final = "/adapter's root $(touch pwned)"
_FAKE: Final = '#!/bin/sh\nprintf "%s\\0" "$@" > "$RECORD"\n'
_LONGEST_NAME: Final = 255


@dataclass(frozen=True)
class Result:
    """End of one export."""

    refused: bool
    faults: tuple[str, ...]


def documents(base: Mapping[str, Any], texts: Sequence[str] = TEXTS) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the document of every hostile plan."""
    for field in FIELDS:
        for text in texts:
            document = json.loads(json.dumps(base))
            *parents, last = (int(part) if part.isdigit() else part for part in field.split("."))
            part = document
            for each in parents:
                part = part[each]
            part[last] = text
            yield f"{field} {text[:40]!r}", document


def checked_export(document: Mapping[str, Any], folder: Path) -> Result:
    """Export a plan into a folder, start its scripts, and compare what they start with the plan."""
    file = folder / "plan.json"
    file.write_text(json.dumps(document))
    try:
        plan = Plan.from_json(file)
        files = export(plan, runtime_updates=True)
    except InputError as error:
        return Result(refused=True, faults=() if str(error).isprintable() else ("an unprintable refusal",))
    target = folder / "out"
    write_folder_atomic(target, files, frozenset(name for name in files if name.endswith(".sh")))
    outside = [name for name in files if not (target / name).resolve().is_relative_to(target)]
    long = [name for name in files if len(Path(name).name.encode()) > _LONGEST_NAME]
    faults = [f"a file outside: {name}" for name in outside] + [f"a long name: {name}" for name in long]
    scripts = sorted((target / "launch").iterdir())
    instances = [group for group in plan.groups for _ in range(group.replicas)]
    by_script = {
        each["script"]: plan.groups[[g.id for g in plan.groups].index(name)]
        for name, part in json.loads((target / "routing.json").read_text())["groups"].items()
        for each in part["instances"]
    }
    if len(scripts) != len(instances):
        faults.append(f"{len(scripts)} scripts for {len(instances)} instances")
    for script in scripts:
        group = by_script[f"launch/{script.name}"]
        expected = {a.name: a.path or f"{_ROOT}/{a.name}" for a in group.adapters}
        faults += _started(script, folder, plan.base_model, expected)
    return Result(refused=False, faults=tuple(faults))


def _started(script: Path, folder: Path, model: str, adapters: Mapping[str, str]) -> Iterator[str]:
    """Yield the differences between a plan and what a script starts."""
    record = folder / "record"
    record.unlink(missing_ok=True)
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "RECORD": str(record),
        "ADAPTER_ROOT": _ROOT,
    }
    done = subprocess.run(["sh", str(script)], env=environment, cwd=folder, capture_output=True, check=False)
    if (folder / "pwned").exists():
        (folder / "pwned").unlink()
        yield "a command of the plan's text ran"
    if done.returncode or done.stderr or not record.exists():
        yield f"exit status {done.returncode}: {done.stderr.decode(errors='replace')[:200]}"
        return
    words = record.read_bytes().decode().split("\0")[:-1]
    if words[:2] != ["serve", model] or model.startswith("-"):
        yield f"starts with {words[:2]}"
    at = words.index("--lora-modules")
    unknown = [word for word in words[2 : at + 1] if word.partition("=")[0] not in _FLAGS]
    if unknown:
        yield f"unknown words: {unknown}"
    modules = words[at + 1 :]
    if any(word.startswith("-") for word in modules):
        yield f"an adapter that is a flag: {modules}"
        return
    try:
        parsed = dict(map(_module, modules))
    except (ValueError, KeyError):
        yield f"adapters that cannot be parsed: {modules}"
        return
    if parsed != adapters:
        yield f"other adapters: {modules}"


def _module(word: str) -> tuple[str, str]:
    """Return name and path of an adapter as vLLM parses the word."""
    if word.startswith("{"):
        fields = json.loads(word)
        return fields["name"], fields["path"]
    name, path = word.split("=")
    return name, path


def prepare(folder: Path) -> None:
    """Put a program named vllm, which records its arguments, into the folder."""
    fake = folder / "bin" / "vllm"
    fake.parent.mkdir()
    fake.write_text(_FAKE)
    fake.chmod(0o755)


def main(words: Sequence[str] | None = None) -> int:
    """Run all exports and print the counts."""
    command_line(__doc__).parse_args(words)
    from tests.cli.examples import small_plan

    base = small_plan().model_dump(mode="json")
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for case, document in documents(base):
            result = checked_export(document, folder)
            ends["faulty" if result.faults else "refused" if result.refused else "exported"] += 1
            for fault in result.faults:
                print(f"{case}: {fault}")
    counts = [str(ends.total()), *(str(ends[end]) for end in ("exported", "refused", "faulty"))]
    print(markdown(["exports", "as planned", "refused", "faulty"], [counts]))
    return 1 if ends["faulty"] else 0


if __name__ == "__main__":
    sys.exit(main())
