import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.step_tables import tabulated
from capplan import Plan, load_profile, load_workload, plan
from capplan.reports.tables import answer, binding, groups_table
from capplan.reports.tables import verdict as words_of
from capplan.spec import OUT_OF_TIME, Slo, Verification
from tests.cli.conftest import Process, Run, command, environment, error_line
from tests.cli.examples import MODEL, WORKLOAD, small_plan, verdict, write_inputs

LARGE = f"""\
base_model: {MODEL}
profile: ./profile.json
gpus: {{count: 64}}
requests: {{prompt_tokens: {{mean: 400, std: 300}}, output_tokens: {{mean: 200, std: 150}}}}
adapters:
  - {{name: "small-{{i}}", count: 600, rank: 8, rate_rps: 0.05}}
  - {{name: "large-{{i}}", count: 400, rank: 64, rate_rps: 0.08}}
"""


@pytest.mark.parametrize("tables", [False, True], ids=["additive", "tables"])
def test_the_file_is_the_plan_of_the_library(run: Run, workload_yaml: Path, tables: bool) -> None:
    out = workload_yaml.with_name("plan.json")
    if tables:
        file = workload_yaml.with_name("profile.json")
        file.write_text(tabulated(load_profile(file)).model_dump_json())
    result = run("plan", workload_yaml, "-o", out, "--seed", "5")
    assert result.exit_code == 0, result.output
    profile = load_profile(workload_yaml.with_name("profile.json"))
    wanted = plan(load_workload(workload_yaml), profile=profile, seed=5)
    told = Plan.from_json(out)
    recorded = {**wanted.provenance, "command": f"capplan plan {workload_yaml} --seed 5"}
    assert told == wanted.replace(provenance=recorded)


def test_the_command_of_a_plan_repeats_it(
    run: Run, workload_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = Path("profiles/my profile.json")
    profile.parent.mkdir()
    profile.write_text(Path("profile.json").read_text())
    (profile.parent / "w.yaml").write_text(workload_yaml.read_text())
    options = ("--profile", profile, "--seeds", "2", "--gpus-per-link", "2", "--scheduler", "{policy: sjf}")
    first = run("--max-adapters", "50", "plan", "profiles/w.yaml", *options, "--json")
    assert first.exit_code == 0, first.output
    program, *words = shlex.split(json.loads(first.stdout)["provenance"]["command"])
    assert program == "capplan"
    assert run(*words, "--json").stdout == first.stdout
    assert words[:2] == ["--max-adapters", "50"]


def test_the_table_names_every_group_and_the_summary_says_what_was_verified(
    run: Run, workload_yaml: Path
) -> None:
    out = workload_yaml.with_name("plan.json")
    text = run("plan", workload_yaml, "-o", out).stdout
    written = Plan.from_json(out)
    for group in written.groups:
        assert any(line.split()[:1] == [group.id] for line in text.splitlines())
    check = written.verification
    tried = f"in simulation, {len(check.seeds)} × {check.duration_s / 3600:g} h, profile roofline"
    assert f"(lower bound {written.totals.lower_bound_gpus}); verified {tried}" in text
    assert f"written to {out}" in " ".join(text.split())


def test_knobs_are_searched_unless_the_defaults_are_asked_for(run: Run, workload_yaml: Path) -> None:
    """Steps of 2048 tokens delay running requests beyond the bound, those of 256 do not."""
    text = workload_yaml.read_text().replace("max_num_seqs: 64, max_num_batched_tokens: 2048, ", "")
    text = text.replace("mean: 120, std: 60", "mean: 800, std: 400").replace("count: 2}", "count: 1}")
    text = text.replace("rate_rps: 0.05", "rate_rps: 1.0")
    workload_yaml.write_text(f"{text}slo: {{tpot_p99_ms: 16.5}}\n")
    out = workload_yaml.with_name("plan.json")
    searched = run("plan", workload_yaml, "-o", out, "--seeds", "1", "--quiet")
    assert searched.exit_code == 0, searched.output
    written = Plan.from_json(out)
    assert written.groups[0].engine_args.max_num_batched_tokens < 2048
    assert "knobs" not in written.provenance
    assert run("plan", workload_yaml, "--seeds", "1", "--quiet", "--knobs", "default").exit_code == 3


def test_unknown_knobs_are_refused_in_one_line(run: Run, workload_yaml: Path) -> None:
    line = error_line(run("plan", workload_yaml, "--knobs", "all"))
    assert "--knobs: must be one of default, fitted, any (got 'all')" in line


def test_json_is_the_only_thing_on_stdout_and_equals_the_file(run: Run, workload_yaml: Path) -> None:
    out = workload_yaml.with_name("plan.json")
    result = run("plan", workload_yaml, "-o", out, "--json")
    assert result.stdout == out.read_text()
    assert json.loads(result.stdout)["base_model"] == MODEL


def test_quiet_says_nothing(run: Run, workload_yaml: Path) -> None:
    out = workload_yaml.with_name("plan.json")
    result = run("plan", workload_yaml, "-o", out, "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    assert out.exists()


def test_without_an_output_nothing_is_written(run: Run, workload_yaml: Path) -> None:
    before = sorted(workload_yaml.parent.iterdir())
    assert "not written" in run("plan", workload_yaml).stdout
    assert sorted(workload_yaml.parent.iterdir()) == before


def test_flags_win_over_the_file(run: Run, workload_yaml: Path) -> None:
    workload_yaml.write_text(WORKLOAD.replace("gpus: {count: 2}\n", ""))
    other = workload_yaml.with_name("other.json")
    document = json.loads(workload_yaml.with_name("profile.json").read_text()) | {"name": "another"}
    other.write_text(json.dumps(document))
    result = run("plan", workload_yaml, "--gpus", "1", "--profile", other, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["totals"]["gpus"] == 1
    assert {group["profile"] for group in told["groups"]} == {"another"}


def test_an_unverified_plan_says_so(run: Run, workload_yaml: Path) -> None:
    result = run("plan", workload_yaml, "--no-verify")
    assert result.exit_code == 0, result.output
    assert "not verified" in " ".join(result.stdout.split())


def test_a_plan_the_twin_disagrees_with_exits_1_and_is_written_all_the_same(
    run: Run, workload_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Verification(
        ok=False, seeds=(1,), duration_s=60.0, min_served_fraction=0.5, groups=(verdict("g1", ok=False),)
    )
    failing = small_plan(verification=check)
    monkeypatch.setattr("capplan.planner.plan", lambda workload, **settings: failing)
    out = workload_yaml.with_name("plan.json")
    result = run("plan", workload_yaml, "-o", out)
    assert result.exit_code == 1
    assert "VERIFICATION DISAGREES" in result.stdout
    assert Plan.from_json(out).replace(provenance=failing.provenance) == failing


@pytest.mark.long
def test_an_infeasible_workload_exits_3_with_the_reason_and_leaves_nothing(
    run: Run, workload_yaml: Path
) -> None:
    one_gpu = WORKLOAD.replace("gpus: {count: 2}", "gpus: {count: 1}")
    workload_yaml.write_text(one_gpu.replace("rate_rps: 0.05", "rate_rps: 20"))
    before = sorted(workload_yaml.parent.iterdir())
    result = run("plan", workload_yaml, "-o", workload_yaml.with_name("plan.json"))
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert sorted(workload_yaml.parent.iterdir()) == before


def test_a_plan_can_be_explained_and_exported(run: Run, workload_yaml: Path) -> None:
    out, deploy = workload_yaml.with_name("plan.json"), workload_yaml.with_name("deploy")
    run("plan", workload_yaml, "-o", out, "--quiet")
    assert (
        "no plan can use fewer" in run("explain", out).stdout
        or "above the lower bound" in run("explain", out).stdout
    )
    assert run("export", out, "--target", "vllm", "-o", deploy).exit_code == 0
    routed = json.loads((deploy / "routing.json").read_text())["adapters"]
    assert set(routed) == {adapter.name for adapter in load_workload(workload_yaml).adapters}


def test_a_process_plans_and_shows_no_bar_where_there_is_no_terminal(
    process: Process, workload_yaml: Path
) -> None:
    done = process("plan", workload_yaml, "-o", workload_yaml.with_name("plan.json"))
    assert done.returncode == 0, done.stderr
    assert "written to" in done.stdout
    assert [line for line in done.stderr.splitlines() if not line.startswith("compiling")] == []


def test_an_interrupted_plan_leaves_the_old_file_and_no_part_of_a_new_one(tmp_path: Path) -> None:
    """The bar on the terminal tells when the search has begun; then comes Ctrl-C."""
    path, out = write_inputs(tmp_path, LARGE), tmp_path / "plan.json"
    out.write_text("the plan in force")
    before = sorted(tmp_path.iterdir())
    terminal, side = pty.openpty()
    arguments = command(["plan", path, "-o", out, "--seeds", "500"])
    process = subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=side)
    os.close(side)
    try:
        shown = _read_until(terminal, b"/", seconds=120)  # done/total
        process.send_signal(signal.SIGINT)
        shown += _read_until(terminal, b"interrupted", seconds=60)
        assert process.wait(timeout=60) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert b"Traceback" not in shown
    assert process.stdout is not None
    assert process.stdout.read() == b""
    process.stdout.close()
    assert out.read_text() == "the plan in force"
    assert sorted(tmp_path.iterdir()) == before


def _read_until(terminal: int, wanted: bytes, seconds: float) -> bytes:
    """Return what a terminal shows up to and with ``wanted``."""
    shown, deadline = b"", time.monotonic() + seconds
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 4096)
    return shown


def test_rows_show_the_bounded_statistics_and_the_gpus_of_several_instances() -> None:
    bounded = {"ttft_mean_s": 1.0, "e2e_p95_s": 20.0}
    plain = small_plan()
    predicted = plain.groups[0].predicted.replace(bounded={"ttft_mean_s": 0.25, "e2e_p95_s": 7.5})
    groups = tuple(group.replace(predicted=predicted) for group in plain.groups)
    table = groups_table(plain.replace(slo=Slo(**bounded), groups=groups))
    head = [" ".join(name.split()) for name in table.head]
    row = dict(zip(head, map(str, table.rows[0]), strict=True))
    assert (row["TTFT mean s"], row["TPOT p99 ms"], row["E2E p95 s"]) == ("0.25", "41.5", "7.50")
    assert "TTFT p99 s" not in row
    assert row["GPUs"] == str(plain.groups[0].replicas * plain.groups[0].tp)


@pytest.mark.long
def test_a_bottleneck_is_the_number_that_binds_at_the_load_where_it_breaks(
    run: Run, workload_yaml: Path
) -> None:
    busy = WORKLOAD.replace("rate_rps: 0.05", "rate_rps: 4.0")
    workload_yaml.write_text(busy + "slo: {ttft_p99_s: 2.0}\n")
    out = workload_yaml.with_name("plan.json")
    shown = " ".join(run("plan", workload_yaml, "-o", out).stdout.split())
    told = " ".join(run("explain", out).stdout.split())
    made = Plan.from_json(out)
    words = binding(made, made.groups[0])
    assert re.fullmatch(r"\d+ % of capacity; at \d+\.\d\dx .+ \(limit .+\)", words)
    assert words in shown
    assert words in told
    moving = made.replace(router="least-work-left")
    assert binding(moving, made.groups[0]) == words.replace("of capacity", "of capacity at its shares")


def test_a_verification_that_runs_out_of_time_is_undecided() -> None:
    made = small_plan()
    note = f"{OUT_OF_TIME} after 2 of 5 seeds"
    groups = tuple(check.replace(ok=False, note=note) for check in made.verification.groups)
    check = made.verification.replace(ok=False, verdict="undecided", reason=note, groups=groups)
    late = made.replace(verification=check)
    assert words_of(late).startswith(f"UNDECIDED: {note}")


def test_a_time_limit_without_a_placement_is_one_line(run: Run, workload_yaml: Path) -> None:
    result = run("plan", workload_yaml, "--time-limit", "1e-6")
    assert result.exit_code == 3
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: time: no placement found")
    assert "--time-limit" in line


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_answer_says_whether_the_search_was_cut(is_cut: bool) -> None:
    """The first line is all that many read."""
    said = answer(small_plan(provenance={"search": "time_limit" if is_cut else "complete"}))
    assert "within every bound; the lower bound is 2" in said
    assert ("the search ran out of time" in said) == is_cut


def test_fewer_moves_on_more_gpus_are_told_with_their_price(run: Run, tmp_path: Path) -> None:
    """The load falls to a quarter: fewer GPUs are needed if adapters move, and none moves if they stay."""
    file, old, new = (write_inputs(tmp_path).with_name(name) for name in ("w.yaml", "old.json", "new.json"))
    options = ("--seeds", "1", "--duration", "600")
    for rate_rps, more in ((4.0, ("-o", old)), (1.0, ("-o", new, "--previous", old))):
        adapters = f'  - {{name: "a-{{i}}", count: 20, rank: 8, rate_rps: {rate_rps}}}\n'
        file.write_text(LARGE.partition("adapters:\n")[0] + "adapters:\n" + adapters)
        result = run("plan", file, *options, *more)
        assert result.exit_code == 0, result.output
    choices = Plan.from_json(new).provenance["choices"]
    told = [line for line in result.stdout.splitlines() if line.startswith("or ")]
    assert told
    assert len(told) == len(choices)
    for line, choice in zip(told, choices, strict=True):
        assert line.startswith(f"or {choice['gpus']} GPU")
        assert f"--move-cost {choice['move_cost']:g}" in line
