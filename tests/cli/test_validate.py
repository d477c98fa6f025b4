"""`capplan validate`: a plan for a tiny engine, on a server of its own and on one that runs already."""

import json
from pathlib import Path
from typing import Any

import pytest

from capplan import Adapter, Lengths, Workload, plan, simulate
from tests.cli.conftest import Run, error_line, interrupted
from tests.cli.test_report import parsed
from tests.profiling.load.servers import toy_server

pytestmark = pytest.mark.process

pytest.importorskip("torch", reason="the engine needs torch (extra `engine`)")

LENGTHS = {"prompt_tokens": {"mean": 12, "std": 4}, "output_tokens": {"mean": 6, "std": 2}}
LOOSE = ("--throughput-tolerance", "100", "--itl-tolerance", "100")


def workload_document(names: list[str], base_model: str, rate_rps: float = 2.0) -> dict[str, Any]:
    return {
        "version": 1,
        "base_model": base_model,
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128},
        "requests": LENGTHS,
        "adapters": [{"name": name, "rank": 8, "rate_rps": rate_rps} for name in names],
    }


def written(folder: Path, document: dict[str, Any]) -> tuple[Path, Path, Path]:
    """Write a workload, the profile of a tiny engine and a plan, and return their files."""
    from capplan import load_workload
    from capplan.profiling.engine import EngineProfilingOptions
    from capplan.profiling.engine._memory import base_profile
    from capplan.spec import EngineConfig

    workload, profile, chosen = (folder / name for name in ("workload.yaml", "profile.json", "plan.json"))
    base = base_profile(EngineProfilingOptions("tiny-llama", engine=EngineConfig(max_model_len=128)))
    memory = base.memory.coefficients | {"reserved_bytes": base.memory.coefficients["bytes_per_seq"]}
    arch = base.model.replace(hf_ids=(document["base_model"],))
    known = base.replace(memory=base.memory.replace(coefficients=memory), model=arch)
    profile.write_text(json.dumps(known.model_dump(mode="json")))
    workload.write_text(json.dumps({**document, "profile": str(profile)}))
    plan(load_workload(workload), gpus=1, seeds=1).to_json(chosen)
    return chosen, workload, profile


def test_a_server_is_started_and_gets_the_requests_that_the_twin_gets(run: Run, tmp_path: Path) -> None:
    chosen, workload, profile = written(tmp_path, workload_document(["a0", "a1", "a2"], "tiny-llama"))
    files = ("-o", tmp_path / "found.json", "--html", tmp_path / "found.html")
    settings = ("--duration", "4", "--seed", "3", "--rate-scale", "2", "--max-loras", "2")
    done = run("validate", chosen, "--workload", workload, *settings, *files, *LOOSE)
    found = json.loads((tmp_path / "found.json").read_text())
    (group,), measured = found["groups"], next(iter(found["measured"].values()))
    told = {each["name"]: each for each in group["comparisons"]}
    assert measured["overall"]["failed"] == 0
    assert measured["overall"]["submitted"] == group["requests"]
    assert measured["overall"]["completed"] > 0
    assert measured["overall"]["offered_tok_s"] == pytest.approx(told["throughput_tok_s"]["offered_load"])
    assert told["throughput_tok_s"]["measured"] == measured["overall"]["throughput_tok_s"]
    assert told["itl_ms_mean"]["measured"] > 0
    assert done.exit_code == (0 if found["agrees"] else 1)
    assert "constant step" in done.stdout
    assert group["mismatches"] == []
    page = (tmp_path / "found.html").read_text()
    assert "throughput_tok_s" in page
    parsed(page)
    again = Workload(
        base_model="tiny-llama",
        adapters=[Adapter(name=f"a{at}", rank=8, rate_rps=4.0) for at in range(3)],
        prompt_tokens=Lengths(**LENGTHS["prompt_tokens"]),
        output_tokens=Lengths(**LENGTHS["output_tokens"]),
    )
    from capplan import load_profile

    engine = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
    expected = simulate(again, load_profile(str(profile)), a_max=2, s_max=8, duration_s=4.0, seed=3, **engine)
    assert told["throughput_tok_s"]["predicted"] == pytest.approx(expected.throughput_tok_s)


def test_a_running_server_is_asked_where_one_is_named(run: Run, tmp_path: Path) -> None:
    chosen, workload, profile = written(tmp_path, workload_document(["a0", "a1"], "base"))
    with toy_server(load_ms=0.0, base_ms=4.0, ms_per_token=0.0) as (url, server):
        flags = ("--workload", workload, "--profile", profile, "--duration", "3", "--url", url)
        done = run("validate", chosen, *flags, "--json", "--itl-tolerance", "0")
    found = json.loads(done.stdout)
    assert done.exit_code == 1  # an ITL that is met to the last digit would be a wonder
    assert not found["agrees"]
    assert {each["model"] for each in server.asked} >= {"a0", "a1"}
    told = {each["name"]: each for each in found["groups"][0]["comparisons"]}
    assert "over the tolerance of 0 %" in found["groups"][0]["verdict"]
    assert told["kv_tokens"]["measured"] == 64_000
    assert 4.0 < told["itl_ms_mean"]["measured"] < 50.0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: the server ")]
    assert warnings == [f"warning: {each}" for each in found["groups"][0]["mismatches"]]
    for part in (
        "has the engine vllm, the profile is of capplan",
        "has --max-model-len 512, the prediction assumes 128",
        "has 64,000 KV tokens, the prediction assumes",
        "does not report, so these are not compared: its GPU",
    ):
        assert any(part in line for line in warnings), warnings


def test_engine_flags_are_those_of_the_prediction(run: Run, tmp_path: Path) -> None:
    from capplan import load_profile, load_workload

    chosen, workload, profile = written(tmp_path, workload_document(["a0", "a1"], "base", rate_rps=20.0))
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    flags += ["--max-loras", 1, "--max-lora-rank", 16, "--gpu-memory-utilization", 0.95, "--prefix-caching"]
    with toy_server() as (url, _):
        known = ("--workload", workload, "--url", url, "--duration", "2")
        done = run("validate", chosen, *known, *flags, "--rules", "vllm-0.8", "--json")
    (group,) = json.loads(done.stdout)["groups"]
    told = {each["name"]: each["predicted"] for each in group["comparisons"]}
    engine = {"a_max": 1, "s_max": 16, "gpu_memory_utilization": 0.95, "prefix_caching": True, **settings}
    expected = simulate(
        load_workload(workload), load_profile(str(profile)), duration_s=2.0, rules="vllm-0.8", **engine
    )
    assert told["throughput_tok_s"] == pytest.approx(expected.throughput_tok_s)
    assert told["kv_tokens"] == expected.kv_tokens
    assert "--max-loras 2, the prediction assumes 1" in done.stderr


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (("--group", "g9"), "must be a group of the plan"),
        (("--url", "nowhere"), "must be the http"),
        (("--url", "g0=http://localhost:80x0"), "must be the http"),
        (("--url", "g0=http://me:hush@localhost"), "must hold no user and no password"),
        (("--duration", "0"), "above 0"),
        (("--throughput-tolerance", "-1"), ">= 0"),
    ],
)
def test_what_is_wrong_is_one_line(run: Run, tmp_path: Path, flags: tuple[str, ...], rule: str) -> None:
    chosen, workload, profile = written(tmp_path, workload_document(["a0"], "tiny-llama"))
    result = run("validate", chosen, "--workload", workload, "--profile", profile, *flags)
    assert rule in error_line(result)


def test_another_workload_than_the_planned_one_is_refused(run: Run, tmp_path: Path) -> None:
    chosen, workload, profile = written(tmp_path, workload_document(["a0"], "tiny-llama"))
    other = {**workload_document(["a0"], "tiny-llama", rate_rps=9.0), "profile": str(profile)}
    workload.write_text(json.dumps(other))
    refused = error_line(run("validate", chosen, "--workload", workload, "--url", "http://127.0.0.1:9"))
    assert "must be the workload that the plan was made for" in refused


def test_a_plan_beyond_the_positions_of_the_model_is_refused(run: Run, tmp_path: Path) -> None:
    chosen, workload, profile = written(tmp_path, workload_document(["a0"], "tiny-llama"))
    document = json.loads(profile.read_text())
    document["model"]["max_positions"] = 64
    profile.write_text(json.dumps(document))
    refused = error_line(run("validate", chosen, "--workload", workload))
    assert "max_model_len: must be at most 64, the positions of tiny-llama (got 128)" in refused


def test_ctrl_c_leaves_what_was_found_and_exits_130(tmp_path: Path) -> None:
    chosen, workload, profile = written(tmp_path, workload_document(["a0", "a1"], "base"))
    with toy_server(load_ms=0.0, base_ms=4.0) as (url, server):
        flags = ("--workload", workload, "--profile", profile, "--duration", "600", "--url", url)
        words = ("validate", chosen, *flags, "-o", tmp_path / "found.json")
        interrupted(words, lambda: len(server.asked) >= 5)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["partial"]
    faults = found["groups"][0]["faults"]
    assert faults[0] == "stopped before its time"
    assert all(each.startswith("the client could not keep up") for each in faults[1:])  # on a busy machine
