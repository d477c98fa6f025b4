"""Configuration of instances and router from a plan, and its errors."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import capplan.fleet
from capplan import InputError
from capplan.cli.serve import PlanProfiles
from capplan.datasets import _profile_files as profile_files
from capplan.datasets import load_profile
from capplan.engine import EngineOptions
from capplan.fleet import RouterConfig, ServingOptions, instances_of, spread_over_gpus
from capplan.fleet._app import merged
from capplan.fleet._launcher import gpus_of
from capplan.fleet._routing import InstanceRouter
from capplan.models import gpu_load_ms
from capplan.spec import Cache, PlanBase, Profile, QueueClass, Queues, Wrs
from tests.cli.conftest import Run, error_line, run
from tests.cli.examples import small_plan
from tests.engine.fake_instances import tiny_plan
from tests.spec.test_registry import peft_folder

__all__ = ["run"]

weights = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@given(weights, st.integers(1, 300), st.data())
def test_every_holder_is_within_one_request_of_its_share(
    parts: list[int], requests: int, data: st.DataObject
) -> None:
    shares = InstanceRouter([{"x": float(part)} for part in parts])
    there = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    for i, is_there in enumerate(there):
        shares.set_available(i, is_there)
    if not any(there):
        assert shares.choose("x") is None
        return
    got = np.zeros(len(parts))
    for _ in range(requests):
        chosen = shares.choose("x")
        assert chosen is not None
        got[chosen] += 1
    kept = np.array(parts, float) * there
    wanted = kept / kept.sum() if kept.sum() else np.array(there) / sum(there)
    assert np.all(got[~np.array(there)] == 0)
    assert np.max(np.abs(got - requests * wanted)) <= len(parts)


def test_base_requests_follow_their_shares_to_any_instance_that_is_up() -> None:
    shares = InstanceRouter([{"x": 1.0}, {}, {}], [0.25, 0.75, 0.0])
    assert Counter(shares.choose(None) for _ in range(40)) == {0: 10, 1: 30}
    assert shares.choose(None, excluded=[0, 1]) == 2
    equal = InstanceRouter([{"x": 1.0}, {}], [0.0, 0.0])
    assert Counter(equal.choose(None) for _ in range(40)) == {0: 20, 1: 20}


def test_an_unavailable_holder_accumulates_no_credit() -> None:
    shares = InstanceRouter([{"x": 0.5}, {"x": 0.5}])
    shares.set_available(1, False)
    assert [shares.choose("x") for _ in range(50)] == [0] * 50
    shares.set_available(1, True)
    back = [shares.choose("x") for _ in range(10)]
    assert back.count(0) == 5


def test_instances_are_configured_by_the_plan(tmp_path: Path) -> None:
    plan = small_plan()
    g0, g1 = plan.groups
    folder = peft_folder(tmp_path / "b", rank=next(a.rank for a in g1.adapters if a.name == "b"))
    own = tuple(a.replace(path=str(folder)) if a.name == "b" else a for a in g1.adapters)
    plan = plan.replace(groups=(g0, g1.replace(adapters=own)))
    specs = instances_of(plan, ServingOptions("tiny-llama", "base", {"max_model_len": 512}, max_queue=8))
    assert [spec.name for spec in specs] == ["g0-1", "g0-2", "g1-1"]
    assert specs[0].shares == {"a": 0.5, "shared": 0.125}
    assert specs[2].adapters == {"b": str(folder), "shared": 16}
    assert all("tensor_parallel_size" not in spec.engine for spec in specs)

    message = json.loads(specs[2].message("127.0.0.1", "key"))
    assert message["engine"] == {
        "rules": "vllm-0.8",
        "max_loras": 2,
        "max_lora_rank": 32,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_model_len": 512,
        "gpu_memory_utilization": 0.9,
    }
    assert message["server"]["api_key"] == "key"
    assert message["server"]["max_requests"] == 264


def test_instances_get_the_gpus_of_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    plan = small_plan()
    g0, g1 = plan.groups
    random = tuple(adapter.replace(path=None) for adapter in g1.adapters)
    groups = (g0.replace(tp=2, replicas=1), g1.replace(adapters=random))
    plan = plan.replace(groups=groups, totals=plan.totals.replace(gpus=3))
    serving = ServingOptions("tiny-llama", "base", {"device": "cuda"})
    first, second = spread_over_gpus(instances_of(plan, serving))
    assert (first.engine["tensor_parallel_size"], first.engine["device"]) == (2, "cuda:0")
    assert ("tensor_parallel_size" in second.engine, second.engine["device"]) == (False, "cuda:2")
    assert [gpus_of(first), gpus_of(second)] == [2, 1]
    assert gpus_of(replace(first, engine={**first.engine, "device": "cpu"})) == 0
    own = ServingOptions("tiny-llama", "base", {"device": "cuda", "tensor_parallel_size": 4})
    with pytest.raises(InputError, match="needs 8 GPUs for 2 instances"):
        spread_over_gpus(instances_of(plan, own))


@pytest.mark.parametrize("key", ["quantization", "kv_cache_dtype"])
def test_a_plan_on_8_bits_is_not_served_with_16(key: str) -> None:
    plan = tiny_plan()
    quantized = plan.replace(engine=plan.engine.replace(**{key: "fp8"}))
    with pytest.raises(InputError, match=f"engine {key}: must be absent"):
        instances_of(quantized, ServingOptions("tiny-llama", "base"))


def test_instances_use_what_the_profile_of_their_group_has_measured(tmp_path: Path) -> None:
    plan = small_plan()
    shipped = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
    file = tmp_path / "profile.json"
    measured = shipped.replace(engine=shipped.engine.replace(sgmv_from_tokens=4))
    file.write_text(measured.model_dump_json(), encoding="utf-8")
    first, second = plan.groups
    random = tuple(adapter.replace(path=None) for adapter in second.adapters)
    plan = plan.replace(groups=(first.replace(profile=str(file)), second.replace(adapters=random)))

    def thresholds(**engine: int) -> dict[str, int | None]:
        serving = ServingOptions("tiny-llama", "base", engine, profiles=PlanProfiles.of(plan).known)
        specs = instances_of(plan, serving)
        return {spec.name: spec.engine.get("sgmv_from_tokens") for spec in specs}

    assert thresholds() == {"g0-1": 4, "g0-2": 4, "g1-1": None}
    assert set(thresholds(sgmv_from_tokens=2).values()) == {2}
    file.unlink()
    assert set(thresholds().values()) == {None}


def test_a_served_plan_reads_each_of_its_profiles_once(
    run: Run, started: list[RouterConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, read = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5"), []
    whole = profile_files._read

    def counting(path: Path) -> Profile:
        read.append(path.name)
        return whole(path)

    monkeypatch.setattr(profile_files, "_read", counting)
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    plan = tiny_plan()
    for file in files:
        file.write_text(profile.model_dump_json(), encoding="utf-8")
    groups = zip(plan.groups, files, strict=True)
    plan.replace(
        groups=tuple(each.replace(profile=str(file), cache=Cache(policy="lru")) for each, file in groups)
    ).to_json(tmp_path / "p.json")
    command = ("serve", "--unverified", "--model", "tiny-llama", "--router", "toppings", tmp_path / "p.json")
    run(*command)
    assert [spec.engine["load_times"]["base_ms"] > 0 for spec in started[0].specs] == [True, True]
    assert sorted(read) == ["first.json", "second.json"]
    files[1].unlink()
    assert "router toppings" in error_line(run(*command))


@pytest.mark.parametrize(
    ("waiting_max", "max_queue", "queue"), [(None, None, 512), (800, None, 1600), (800, 8, 8)]
)
def test_an_instance_queues_what_its_verification_queued(
    waiting_max: int | None, max_queue: int | None, queue: int
) -> None:
    """The twin refuses no request, so a served plan must not refuse one that the twin let wait."""
    plan = small_plan()
    groups = tuple(g.replace(predicted=g.predicted.replace(waiting_max=waiting_max)) for g in plan.groups)
    serving = ServingOptions("tiny-llama", "base", {}, max_queue)
    specs = instances_of(plan.replace(groups=groups), serving, ["g0"])
    assert {spec.server.max_requests for spec in specs} == {256 + queue}


def test_a_group_of_the_base_model_is_an_instance_without_adapters() -> None:
    plan = small_plan()
    g0, g1 = plan.groups
    alone = g0.replace(
        id="base",
        adapters=(),
        base=PlanBase(rate_rps=4.0, share=1.0),
        engine_args=g0.engine_args.replace(max_loras=0, max_lora_rank=0),
    )
    totals = plan.totals.replace(gpus=5)
    serving = ServingOptions("tiny-llama", "base", {}, 8)
    specs = instances_of(plan.replace(groups=(g0, g1, alone), totals=totals), serving, ("g0", "base"))
    assert [spec.base_share for spec in specs] == [0.0, 0.0, 0.5, 0.5]
    assert (specs[-1].adapters, specs[-1].engine["max_loras"]) == ({}, 0)


def test_merged_metrics_keep_families_together() -> None:
    page = '# HELP m_total A\n# TYPE m_total counter\nm_total{k="{"} 1.0\n# HELP n B\n# TYPE n gauge\nn 2.0\n'
    counter, gauge = merged({"i": page, 'j"': page, "k": ""})
    assert (counter.name, counter.documentation, counter.type) == ("m", "A", "counter")
    assert [(each.name, each.labels, each.value) for each in counter.samples] == [
        ("m_total", {"instance": "i", "k": "{"}, 1.0),
        ("m_total", {"instance": 'j"', "k": "{"}, 1.0),
    ]
    assert [(each.labels, each.value) for each in gauge.samples] == [
        ({"instance": "i"}, 2.0),
        ({"instance": 'j"'}, 2.0),
    ]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RouterConfig]:
    """Configurations of routers that would have been started."""
    clusters: list[RouterConfig] = []

    def start(cluster: RouterConfig, ready: Callable[[str], None]) -> int:
        clusters.append(cluster)
        ready("http://127.0.0.1:1")
        return 0

    monkeypatch.setattr(capplan.fleet, "run_router", start)
    return clusters


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    tiny_plan().to_json(path)
    return path


def test_flags_take_precedence_over_the_plan(run: Run, started: list[RouterConfig], plan_file: Path) -> None:
    flags = "--model tiny-llama --group g1 --rules capplan --max-model-len 256 --max-queue 8 --port 0 --json"
    result = run("serve", plan_file, *flags.split())
    assert result.exit_code == 0, result.output
    [cluster] = started
    [spec] = cluster.specs
    assert spec.name == "g1-1"
    assert spec.engine["rules"] == "capplan"
    assert spec.engine["max_model_len"] == 256
    assert spec.engine["max_num_seqs"] == 32
    assert "seed" not in spec.engine
    assert cluster.server.max_requests == 40
    facts = json.loads(result.stdout)
    assert facts["instances"] == ["g1-1"]
    assert facts["adapters"] == 2
    assert facts["model"] == tiny_plan().base_model


@pytest.mark.parametrize(
    ("flags", "scheduler", "cache"),
    [
        ((), "chameleon", "lru"),
        (("--cache", '{"policy": "gdsf", "prefetch": "none"}'), "chameleon", "gdsf"),
        (("--scheduler", "fifo"), "fifo", "lru"),
        (("--rules", "vllm-0.8"), None, None),
    ],
)
def test_the_scheduler_of_a_plan_reaches_its_instances_unless_flags_override_it(
    run: Run,
    started: list[RouterConfig],
    tmp_path: Path,
    flags: tuple[str, ...],
    scheduler: str | None,
    cache: str | None,
) -> None:
    plan = tiny_plan()
    wrs = Wrs(a=0.4, b=0.6, max_prompt_tokens=9, max_output_tokens=9, max_adapter_bytes=9)
    queues = Queues(wrs=wrs, classes=(QueueClass(upper_wrs=None, quota_tokens=9),))
    profile = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
    changes = {"cache": Cache(policy="lru"), "queues": queues, "profile": profile.name}
    groups = tuple(each.replace(**changes) for each in plan.groups)
    plan.replace(groups=groups).to_json(tmp_path / "p.json")
    run("serve", "--unverified", "--model", "tiny-llama", *flags, tmp_path / "p.json")
    [cluster] = started
    for spec in cluster.specs:
        options = EngineOptions.parse(json.loads(spec.message("127.0.0.1", "key"))["engine"])
        asked = options.scheduling
        assert (asked and asked[0].policy, asked and asked[1].policy) == (scheduler, cache)
        assert options.queues == (queues if scheduler == "chameleon" else None)
        assert options.load_times is not None
        for rank in (8, 64):
            load_ms = options.load_times.load_ms(rank, rank < 64, 1.0, 1.0)
            assert load_ms == pytest.approx(gpu_load_ms(profile.loading, rank, 64))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--model tiny-llama --registry r.db --lora-root none --admin-api-key k",
            "--lora-root: must be a folder",
        ),
        ("--model tiny-llama --registry r.db --lora-root .", "--lora-root: requires --admin-api-key"),
        ("--model tiny-llama --server-name x", "--server-name: goes with --registry"),
        ("--model tiny-llama --max-stored-gib 8", "--max-stored-gib: goes with --registry and --lora-root"),
        (
            "--model tiny-llama --registry r.db --lora-root . --admin-api-key k --max-stored-gib 0",
            "--max-stored-gib: must be a finite number > 0",
        ),
        ("--model tiny-llama --server-url http://x --registry r.db", "--server-url: does not go with a plan"),
        ("--model tiny-llama --announce-host h", "--announce-host: goes with --registry and --lora-root"),
        ("--model tiny-llama --registry none.db", "none.db: is missing"),
        ("--model no-such-model", "model: must be a folder"),
        ("", "--model: is required"),
        ("--model tiny-llama --group g7", "--group: must be one of g0, g1"),
        ("--model tiny-llama --lora-modules a=8", "--lora-modules: does not go with a plan"),
        ("--model tiny-llama --lora-root .", "--lora-root: does not go with a plan"),
        ("--model tiny-llama --steps-out x.parquet", "--steps-out: does not go with a plan"),
        ("--model tiny-llama --max-queue -1", "--max-queue: must be >= 0"),
        ("--model tiny-llama --served-model-name shared", "must be another name than the base model's"),
        ("--model tiny-llama --device cuda", "--device: needs 2 GPUs"),
        ("--model tiny-llama --rebalance 300", "--rebalance: requires --registry: instances share adapters"),
        ("--model tiny-llama --rebalance 300 --registry r.db", "--rebalance: requires --lora-root"),
        ("--model tiny-llama --forecast last", "--forecast: goes with --rebalance"),
        ("--model tiny-llama --rebalance-solver capplan", "--rebalance-solver: goes with --rebalance"),
        ("--model tiny-llama --workload w.yaml", "w.yaml: "),
        ("--model tiny-llama --port 70000", "port: must be a port"),
        ("b=8 --model tiny-llama", "must be one plan"),
    ],
)
def test_invalid_flags_are_one_line_errors(run: Run, plan_file: Path, flags: str, message: str) -> None:
    result = run("serve", plan_file, "--port", 0, *flags.split())
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (result.exit_code, result.stdout, len(lines)) == (2, "", 1), result.output
    assert message in lines[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan["groups"][0].update(replicas=0), "groups[0].replicas: must be"),
        (lambda plan: plan["groups"][0]["adapters"][1].update(share=0.9), "must sum to 1"),
        (
            lambda plan: plan["groups"][1].update(tp=3) or plan["totals"].update(gpus=4),
            "group g1: tp: must divide the 4 heads of tiny-llama",
        ),
        (lambda plan: plan["groups"][1]["adapters"][0].update(path="s3://x"), "b: path: must be a folder"),
        (lambda plan: plan.clear(), "is required"),
    ],
)
def test_an_invalid_plan_is_a_one_line_error(
    run: Run, plan_file: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    document = json.loads(plan_file.read_text())
    change(document)
    plan_file.write_text(json.dumps(document))
    assert message in error_line(
        run("serve", "--unverified", plan_file, "--model", "tiny-llama", "--port", 0)
    )


def test_a_missing_plan_is_a_one_line_error(run: Run, tmp_path: Path) -> None:
    assert "no-such.json" in error_line(run("serve", tmp_path / "no-such.json", "--model", "tiny-llama"))
    assert "--group" in error_line(run("serve", "--group", "g0", "--model", "tiny-llama"))
