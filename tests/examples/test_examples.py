"""Examples print what is recorded beside them.

Text must match, numbers within 1 %: compiled code may round differently on another processor, and a request
more or less shifts a percentile. Columns follow the widths of numbers, so runs of spaces count as one.
"""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from capplan import load_profile, load_workload, plan, simulate

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
WORKLOADS = sorted(path.parent for path in EXAMPLES.glob("*/workload.yaml"))
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
OTHER_SEEDS = (11, 12, 13, 14, 15)  # neither searched with nor verified with


def printed(*arguments: str) -> str:
    """Return what a program prints in a terminal of 150 columns."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "150"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_as_recorded(record: Path, output: str) -> None:
    recorded = record.read_text(encoding="utf-8")
    diff = "\n".join(difflib.unified_diff(recorded.splitlines(), output.splitlines(), record.name, "now"))
    assert words(output) == words(recorded), diff
    assert numbers(output) == pytest.approx(numbers(recorded), rel=0.01, abs=0.011), diff


def words(text: str) -> list[str]:
    return re.sub(r"[─━]+", "─", NUMBER.sub("#", text)).split()


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("folder", WORKLOADS, ids=lambda folder: folder.name)
def test_planning_prints_the_recorded_plan(folder: Path) -> None:
    workload = str(folder.relative_to(ROOT) / "workload.yaml")
    assert_as_recorded(folder / "plan.out", printed("-m", "capplan", "plan", workload))


def test_the_library_prints_the_recorded_output() -> None:
    assert_as_recorded(EXAMPLES / "library.out", printed("examples/library.py"))


def test_a_record_that_differs_is_noticed() -> None:
    record = EXAMPLES / "library.out"
    text = record.read_text(encoding="utf-8")
    first = NUMBER.search(text)
    assert first is not None
    for other in (text.replace("verified", "refuted"), text[: first.start()] + "77" + text[first.end() :]):
        with pytest.raises(AssertionError):
            assert_as_recorded(record, other)


@pytest.mark.parametrize("folder", WORKLOADS, ids=lambda folder: folder.name)
def test_every_gpu_of_the_plan_holds_on_seeds_that_the_planner_never_saw(folder: Path) -> None:
    workload = load_workload(folder / "workload.yaml")
    made = plan(workload)
    assert set(made.verification.seeds).isdisjoint(OTHER_SEEDS)
    assert made.totals.gpus <= made.totals.lower_bound_gpus + 1
    for group in made.groups:
        assert group.binds is not None
        shares = {adapter.name: adapter.share for adapter in group.adapters}
        args = group.engine_args
        for seed in OTHER_SEEDS:
            result = simulate(
                workload.subset(shares, shares),
                load_profile(group.profile),
                a_max=args.max_loras,
                s_max=args.max_lora_rank,
                seed=seed,
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=args.max_num_batched_tokens,
                max_model_len=args.max_model_len,
                gpu_memory_utilization=args.gpu_memory_utilization,
            )
            assert result.served_fraction >= workload.slo.served_fraction
            assert not result.starved


def test_the_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/workload.yaml")):
        assert f"`{path.relative_to(EXAMPLES)}`" in text


def test_the_readme_shows_the_recorded_plan_and_workload() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    recorded = (EXAMPLES / "chat-96" / "plan.out").read_text(encoding="utf-8")
    for line in recorded.replace("not written (-o FILE writes it)", "written to plan.json").splitlines():
        assert line.rstrip() in readme
    workload = (EXAMPLES / "chat-96" / "workload.yaml").read_text(encoding="utf-8")
    adapters = [line.strip() for line in workload.splitlines() if line.strip().startswith("- {name")]
    assert adapters
    assert all(line in readme for line in adapters)
