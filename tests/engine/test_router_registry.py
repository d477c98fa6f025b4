"""Configuration of a router from a plan and an adapter registry: pool, re-balancing, and their errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from capplan.datasets import load_profile
from capplan.fleet import RegistrySettings, RouterConfig
from capplan.fleet import _launcher as launcher
from capplan.registry import AdapterRegistry, RegisteredAdapter
from capplan.server import PoolSettings
from tests.cases.test_adapters import adapter_folder
from tests.cli.conftest import Run, error_line, run
from tests.cli.examples import MODEL
from tests.engine.fake_instances import tiny_plan
from tests.engine.test_router_config import plan_file, started

__all__ = ["plan_file", "run", "started"]  # fixtures


@pytest.mark.parametrize(("rank", "message"), [(8, None), (4, "rank: must be that of the plan, 8")])
def test_a_registry_locates_the_adapters_of_a_plan(
    run: Run, started: list[RouterConfig], plan_file: Path, tmp_path: Path, rank: int, message: str | None
) -> None:
    adapter_folder(tmp_path / "a", rank=8, width=64, base_model_name_or_path=tiny_plan().base_model)
    with AdapterRegistry(tmp_path / "r.db", create=True) as registry:
        model = tiny_plan().base_model
        known = RegisteredAdapter(name="a", base_model=model, rank=rank, location=str(tmp_path / "a"))
        registry.add(known)
    result = run("serve", plan_file, "--model", "tiny-llama", "--registry", tmp_path / "r.db")
    if message is not None:
        assert message in error_line(result)
        return
    assert result.exit_code == 0, result.output
    [cluster] = started
    assert [dict(spec.adapters) for spec in cluster.specs] == [
        {"a": str(tmp_path / "a"), "shared": 16},
        {"b": 4, "shared": 16},
    ]


@pytest.mark.parametrize("prefix", [None, "east"])
def test_the_instances_of_a_plan_share_adapters_below_one_folder(
    run: Run, started: list[RouterConfig], plan_file: Path, tmp_path: Path, prefix: str | None
) -> None:
    root, registry = tmp_path / "pool", tmp_path / "r.db"
    root.mkdir()
    AdapterRegistry(registry, create=True).close()
    flags = ["--lora-root", root, "--registry", registry, "--admin-api-key", "admin"]
    flags += ["--max-stored-gib", "0.5"]
    flags += [] if prefix is None else ["--server-name", prefix]
    result = run("serve", plan_file, "--model", "tiny-llama", *flags)
    assert result.exit_code == 0, result.output
    [cluster] = started
    for spec in cluster.specs:
        fields = json.loads(spec.message("127.0.0.1", "key"))
        assert fields["adapters"] == {}
        assert fields["engine"]["max_adapters"] == 1000
        server = launcher.server_settings(fields["server"])
        assert (server.lora_root, server.admin_api_key) == (root / spec.name, "admin")
        name = spec.name if prefix is None else f"east-{spec.name}"
        assert server.pool == PoolSettings(
            str(registry), name, base_model=tiny_plan().base_model, max_stored_gib=0.5
        )
    assert cluster.server.lora_root is cluster.server.pool is None
    assert cluster.rebalancing is None
    assert cluster.registry == RegistrySettings(str(registry), MODEL, frozenset({MODEL}))


@pytest.mark.parametrize(
    ("host", "name"), [("10.0.0.3", "10.0.0.3"), ("0.0.0.0", "node3"), ("::", "fd00::3")]
)
def test_instances_that_announce_a_host_listen_where_the_router_does(
    run: Run, started: list[RouterConfig], plan_file: Path, tmp_path: Path, host: str, name: str
) -> None:
    AdapterRegistry(tmp_path / "r.db", create=True).close()
    (tmp_path / "pool").mkdir()
    flags = ["--host", host, "--api-key", "k", "--announce-host", name, *moving_flags(tmp_path)]
    result = run("serve", plan_file, "--model", "tiny-llama", *flags)
    assert result.exit_code == 0, result.output
    [cluster] = started
    assert isinstance(cluster.launcher, launcher.LocalLauncher)
    assert cluster.launcher.host == host
    shown = f"[{name}]" if ":" in name else name
    for spec in cluster.specs:
        pool = launcher.server_settings(json.loads(spec.message(host, "key"))["server"]).pool
        assert pool is not None
        assert pool.url_of("http://127.0.0.1:4711") == f"http://{shown}:4711"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--announce-host 10.0.0.3",
            "requires a --host that other machines reach: instances would listen at 127",
        ),
        ("--host localhost --announce-host node3", "requires a --host that other machines reach"),
        ("--host 10.0.0.3 --api-key k --announce-host h:8000", "must be a host at which other servers reach"),
        (
            "--host 10.0.0.3 --api-key k --announce-host 0.0.0.0",
            "must be a host at which other servers reach",
        ),
        (
            "--host 10.0.0.3 --api-key k --ray-address auto --announce-host h",
            "does not go with --ray-address",
        ),
    ],
)
def test_a_host_at_which_no_machine_reaches_the_instances_is_refused(
    run: Run, started: list[RouterConfig], plan_file: Path, tmp_path: Path, flags: str, message: str
) -> None:
    AdapterRegistry(tmp_path / "r.db", create=True).close()
    (tmp_path / "pool").mkdir()
    words = [*flags.split(), *moving_flags(tmp_path)]
    line = error_line(run("serve", plan_file, "--model", "tiny-llama", *words))
    assert line.startswith("error: --announce-host: ")
    assert message in line
    assert started == []


def test_the_router_of_some_groups_leaves_the_adapters_of_the_others_alone(
    run: Run, started: list[RouterConfig], plan_file: Path, tmp_path: Path
) -> None:
    AdapterRegistry(tmp_path / "r.db", create=True).close()
    (tmp_path / "pool").mkdir()
    flags = ["--group", "g1", "--served-model-name", "llama", *moving_flags(tmp_path)]
    result = run("serve", plan_file, "--model", "tiny-llama", *flags)
    assert result.exit_code == 0, result.output
    [cluster] = started
    assert cluster.registry is not None
    assert cluster.registry.excluded == {"a", MODEL, "llama"}


def test_without_a_pool_the_router_reads_no_registry(
    run: Run, started: list[RouterConfig], plan_file: Path, tmp_path: Path
) -> None:
    """Instances have the adapters of their start then."""
    AdapterRegistry(tmp_path / "r.db", create=True).close()
    result = run("serve", plan_file, "--model", "tiny-llama", "--registry", tmp_path / "r.db")
    assert result.exit_code == 0, result.output
    assert started[0].registry is None


@pytest.fixture
def moving_plan(tmp_path: Path) -> Path:
    """Return a plan whose profile is on this machine, beside a folder and a registry of its adapters."""
    plan, profile = tiny_plan(), load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
    groups = tuple(each.replace(profile=profile.name) for each in plan.groups)
    plan.replace(groups=groups).to_json(tmp_path / "moving.json")
    (tmp_path / "pool").mkdir()
    with AdapterRegistry(tmp_path / "r.db", create=True) as registry:
        for number, (name, rank) in enumerate((("a", 8), ("b", 4), ("shared", 16))):
            facts = {"base_model": plan.base_model, "digest": str(number) * 64, "size_bytes": 1000 * rank}
            registry.add(RegisteredAdapter(name=name, rank=rank, location="s3://x", **facts))
    return tmp_path / "moving.json"


def moving_flags(folder: Path) -> list[Any]:
    return ["--registry", folder / "r.db", "--lora-root", folder / "pool", "--admin-api-key", "admin"]


def test_a_plan_to_rebalance_has_equal_instances_and_operating_points_of_its_profile(
    run: Run, started: list[RouterConfig], moving_plan: Path
) -> None:
    flags = ["--rebalance", 60, "--forecast", "last", *moving_flags(moving_plan.parent)]
    result = run("serve", "--unverified", "--model", "tiny-llama", *flags, moving_plan)
    assert result.exit_code == 0, result.output
    [cluster] = started
    assert {spec.engine["max_lora_rank"] for spec in cluster.specs} == {16}
    moving = cluster.rebalancing
    assert moving is not None
    assert (moving.rebalancer.settings.every_s, moving.rebalancer.settings.forecast) == (60.0, "last")
    held = [{"a": 1.0, "shared": 0.25}, {"b": 1.0, "shared": 0.75}]
    stored = [{"b"}, {"a", "shared"}]
    made = moving.rebalancer.step(None, stored, held)
    assert made.target > 0.0
    assert made.moved_bytes <= made.unpermuted_bytes
    assert (moving.admin_key, moving.balances_base) == ("admin", False)
    assert cluster.registry is not None
    assert (cluster.registry.base_model, cluster.registry.excluded) == (MODEL, {MODEL})


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ("none", ["--rebalance", 0], "--rebalance: must be a finite number > 0"),
        ("none", ["--rebalance", 60, "--forecast", "tarot"], "--forecast: must be 'holt', 'last'"),
        ("none", ["--rebalance", 60, "--rebalance-solver", "x"], "--rebalance-solver: must be 'loraserve'"),
        ("rank", ["--rebalance", 60], "adapter b: rank: must be at most max_lora_rank, 16"),
        ("digest", ["--rebalance", 60], "adapter b: digest: is required"),
        ("missing", ["--rebalance", 60], "must have an adapter of the plan"),
        ("profile", ["--rebalance", 60], "must be of one profile and tp to be re-balanced"),
    ],
)
def test_what_cannot_be_rebalanced_is_a_one_line_error(
    run: Run, moving_plan: Path, change: str, flags: list[Any], message: str
) -> None:
    with AdapterRegistry(moving_plan.parent / "r.db") as registry:
        known = registry.get("b")
        if change == "missing":
            registry.remove("a", "b", "shared")
        elif change in ("rank", "digest"):
            other: dict[str, Any] = {"rank": 64} if change == "rank" else {"digest": None}
            registry.add(known.replace(**other), replace=True)
    if change == "profile":
        document = json.loads(moving_plan.read_text())
        document["groups"][0]["profile"] = "other"
        moving_plan.write_text(json.dumps(document))
    words = ["--unverified", "--model", "tiny-llama", *flags, *moving_flags(moving_plan.parent)]
    assert message in error_line(run("serve", *words, moving_plan))
