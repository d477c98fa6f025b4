"""Adapter registry: one truth for all processes, also after kills, and its faults in one line."""

import hashlib
import json
import sqlite3
import struct
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from capplan import InputError, load_workload
from capplan.registry import AdapterRegistry, RegisteredAdapter, RegistryUnavailableError, read_adapter
from capplan.registry._database import Database
from tests.conftest import output_of_python
from tests.spec.conftest import entry

NAMES = ("a", "b", "c")
SERVERS = ("s0", "s1", "s2")
OWNERS = ("host-1/a", "host-2/a")


class RegistryMachine(RuleBasedStateMachine):
    """Two connections, as of two processes, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.databases = ExitStack()
        where = self.new_database()
        self.registries = [AdapterRegistry(where, create=True), AdapterRegistry(where)]
        self.adapters: dict[str, RegisteredAdapter] = {}
        self.holders: dict[str, set[str]] = {}
        self.servers: set[str] = set()
        self.owners: dict[str, str] = {}

    def new_database(self) -> str:
        """Return where to make the registry."""
        return f"{self.databases.enter_context(TemporaryDirectory())}/adapters.db"

    @rule(side=st.booleans(), names=st.sets(st.sampled_from(NAMES)), version=st.integers(0, 1))
    def add(self, side: bool, names: set[str], version: int) -> None:
        new = {name: entry(name, version) for name in names}
        clash = [name for name in names if name in self.adapters and self.adapters[name] != new[name]]
        if clash:
            with pytest.raises(InputError, match="is taken by another adapter"):
                self.registries[side].add(*new.values())
        else:
            self.registries[side].add(*new.values())
            self.adapters |= new
            for name in names:
                self.holders.setdefault(name, set())

    @rule(side=st.booleans(), name=st.sampled_from(NAMES), version=st.integers(0, 1), rank=st.integers(8, 9))
    def replace(self, side: bool, name: str, version: int, rank: int) -> None:
        new = entry(name, version, rank=rank)
        self.registries[side].add(new, replace=True)
        if name not in self.adapters or self.adapters[name].digest != new.digest:
            self.holders[name] = set()
        self.adapters[name] = new

    @rule(side=st.booleans(), names=st.lists(st.sampled_from(NAMES), unique=True))
    def remove(self, side: bool, names: list[str]) -> None:
        if set(names) - self.adapters.keys():
            with pytest.raises(InputError, match="must be the name of an adapter"):
                self.registries[side].remove(*names)
            return
        self.registries[side].remove(*names)
        for name in names:
            del self.adapters[name], self.holders[name]

    @rule(side=st.booleans(), server=st.sampled_from(SERVERS))
    def announce(self, side: bool, server: str) -> None:
        self.registries[side].announce(server, f"http://{server}")
        self.servers.add(server)

    @rule(side=st.booleans(), server=st.sampled_from(SERVERS))
    def forget(self, side: bool, server: str) -> None:
        if server not in self.servers:
            with pytest.raises(InputError, match="name of a server"):
                self.registries[side].forget(server)
            return
        self.registries[side].forget(server)
        self.servers.remove(server)
        self.owners.pop(server, None)
        for holders in self.holders.values():
            holders.discard(server)

    @rule(side=st.booleans(), server=st.sampled_from(SERVERS), owner=st.sampled_from(OWNERS))
    def claim(self, side: bool, server: str, owner: str) -> None:
        """Only the owner, or anybody if there is none, gets a name."""
        other = self.registries[side].announce(server, f"http://{server}", owner)
        self.servers.add(server)
        assert (other and other.owner) == (self.owners.get(server) if other else None)
        assert (other is None) == (self.owners.setdefault(server, owner) == owner)

    @rule(
        sides=st.tuples(st.booleans(), st.booleans()),
        server=st.sampled_from(SERVERS),
        owner=st.sampled_from(OWNERS),
        renews=st.booleans(),
    )
    def claim_after_a_while(self, sides: tuple[bool, bool], server: str, owner: str, renews: bool) -> None:
        """A name is taken over unless its owner has renewed it."""
        other = self.registries[sides[0]].announce(server, f"http://{server}", owner)
        self.servers.add(server)
        if other is None:
            self.owners[server] = owner
            return
        if renews:
            assert self.registries[sides[1]].renew(server, other.url, other.owner)
        taken = self.registries[sides[0]].announce(server, "http://new", owner, unrenewed=other)
        assert (taken is None) == (not renews)
        if not renews:
            self.owners[server] = owner

    @rule(side=st.booleans(), server=st.sampled_from(SERVERS), owner=st.sampled_from(OWNERS))
    def renew(self, side: bool, server: str, owner: str) -> None:
        """A server that was removed while it runs is entered again."""
        keeps = self.owners.get(server, owner) == owner
        assert self.registries[side].renew(server, f"http://{server}", owner) == keeps
        if keeps:
            self.servers.add(server)
            self.owners[server] = owner

    @rule(side=st.booleans(), server=st.sampled_from(SERVERS), owner=st.sampled_from(OWNERS))
    def leave(self, side: bool, server: str, owner: str) -> None:
        self.registries[side].leave(server, owner)
        if self.owners.get(server) == owner:
            del self.owners[server]

    @rule(
        side=st.booleans(),
        name=st.sampled_from(NAMES),
        server=st.sampled_from(SERVERS),
        version=st.integers(0, 1),
    )
    def hold(self, side: bool, name: str, server: str, version: int) -> None:
        adapter = self.adapters.get(name)
        digest = entry(name, version).digest or ""
        if adapter is None or adapter.digest != digest or server not in self.servers:
            with pytest.raises(InputError):
                self.registries[side].hold(name, digest, server)
        else:
            self.registries[side].hold(name, digest, server)
            self.holders[name].add(server)

    @rule(
        side=st.booleans(),
        name=st.sampled_from(NAMES),
        server=st.sampled_from(SERVERS),
        keeper=st.sampled_from(SERVERS),
    )
    def release(self, side: bool, name: str, server: str, keeper: str) -> None:
        holders = self.holders.get(name, set())
        may_leave = keeper != server and keeper in holders
        assert self.registries[side].release(name, server, keeper) == may_leave
        if may_leave:
            holders.discard(server)

    @rule(side=st.booleans(), name=st.sampled_from(NAMES), server=st.sampled_from(SERVERS))
    def lose(self, side: bool, name: str, server: str) -> None:
        self.registries[side].lose(name, server)
        self.holders.get(name, set()).discard(server)

    @invariant()
    def both_see_the_last_change(self) -> None:
        expected = {
            name: adapter.replace(holders=sorted(self.holders[name]))
            for name, adapter in self.adapters.items()
        }
        for registry in self.registries:
            assert {name: registry.find(name) for name in NAMES} == {n: expected.get(n) for n in NAMES}
        assert {adapter.name: adapter for adapter in registry.adapters()} == expected
        on_s0 = {name for name, adapter in expected.items() if "s0" in adapter.holders}
        assert {adapter.name for adapter in registry.adapters(server="s0")} == on_s0
        assert set(registry.servers()) == self.servers

    def teardown(self) -> None:
        for registry in self.registries:
            registry.close()
        self.databases.close()


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(
    max_examples=10, stateful_step_count=25, deadline=None, derandomize=True
)


def test_writers_killed_at_random_moments_leave_a_consistent_registry() -> None:
    """Eight processes; SIGKILL between and within their transactions."""
    assert " 0 faults" in output_of_python("-m", "benchmarks.registry", "--only-writers", "--seconds", "1")


def line_of(error: BaseException) -> str:
    line = str(error)
    assert "\n" not in line
    return line


def test_a_locked_registry_can_be_read_and_is_one_line_to_writers(file: Path) -> None:
    with AdapterRegistry(file, timeout_s=0.1) as registry, closing(sqlite3.connect(file)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert registry.get("a").rank == 8
        with pytest.raises(RegistryUnavailableError) as caught:
            registry.announce("s0", "http://s0")
        assert line_of(caught.value) == (
            f"{file}: cannot be used: another process has locked it for over 0.1 s"
        )
        other.rollback()
        registry.announce("s0", "http://s0")


def test_a_missing_registry_is_one_line_and_stays_missing(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with pytest.raises(RegistryUnavailableError, match="is missing"):
        AdapterRegistry(path)
    assert not path.exists()


def test_a_registry_that_is_deleted_is_missing_for_those_who_have_it_open(file: Path) -> None:
    with AdapterRegistry(file) as registry:
        assert registry.get("a")
        file.unlink()
        for use in (lambda: registry.find("a"), lambda: registry.remove("a"), registry.adapters):
            with pytest.raises(RegistryUnavailableError, match="is missing"):
                use()


@pytest.mark.parametrize("kind", ["text", "empty", "another database", "folder"])
def test_another_file_is_no_registry(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    if kind == "folder":
        path.mkdir()
    elif kind == "another database":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE x (y)")
    else:
        path.write_text("no database\n" * 200 if kind == "text" else "")
    with pytest.raises(RegistryUnavailableError) as caught:
        AdapterRegistry(path)
    line_of(caught.value)


@pytest.mark.parametrize(
    ("version", "step"),
    [
        (1, "; remove it and add its adapters again (got 1)"),
        (3, "; upgrade capplan to open it (got 3)"),
    ],
)
def test_a_registry_of_another_version_is_refused_with_what_to_do(
    version: int, step: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.db"
    AdapterRegistry(path, create=True).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE capplan_registry SET schema_version = {version}")
        if version == 1:  # without the owners of names
            connection.execute("ALTER TABLE capplan_servers DROP COLUMN owner")
            connection.execute("ALTER TABLE capplan_servers DROP COLUMN renewals")
    for create in (False, True):
        with pytest.raises(RegistryUnavailableError) as caught:
            AdapterRegistry(path, create=create)
        assert line_of(caught.value) == f"{path}: must have version 2 of its tables{step}"


@pytest.mark.parametrize(
    "where", ["nodatabase://x", "sqlite://", "sqlite:///:memory:", "postgresql+none://u:secret@h/d", "://"]
)
def test_an_address_that_is_none_is_refused_without_its_password(where: str) -> None:
    with pytest.raises(InputError) as caught:
        AdapterRegistry(where, create=True)
    assert "secret" not in line_of(caught.value)


def test_a_url_names_the_same_registry_as_its_file(file: Path) -> None:
    with AdapterRegistry(f"sqlite:///{file}") as registry:
        assert registry.get("a") == entry("a")


def test_a_row_that_breaks_a_rule_is_refused_by_name_and_key(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE capplan_adapters SET rank = 9999")
    with AdapterRegistry(file) as registry, pytest.raises(InputError, match="adapter a: rank: must be"):
        registry.get("a")


def test_reading_connections_do_not_wait_for_a_writer(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database = Database(str(file), create=False, timeout_s=0.1)
    with database.writing(), AdapterRegistry(file, timeout_s=0.1) as reader:
        assert reader.adapters() == [entry("a")]
    database.close()


def peft_folder(folder: Path, rank: int = 4, **config: Any) -> Path:
    """Write an adapter of one module, without torch."""
    folder.mkdir(parents=True)
    name, count = "base_model.model.model.layers.0.self_attn.v_proj", rank * 6
    header = {
        f"{name}.lora_A.weight": {"dtype": "F32", "shape": [rank, 6], "data_offsets": [0, 4 * count]},
        f"{name}.lora_B.weight": {
            "dtype": "F32",
            "shape": [6, rank],
            "data_offsets": [4 * count, 8 * count],
        },
    }
    text = json.dumps(header).encode()
    weights = struct.pack("<Q", len(text)) + text + struct.pack(f"<{2 * count}f", *range(2 * count))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    fields = {"peft_type": "LORA", "r": rank, "base_model_name_or_path": "org/model"} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def test_a_folder_is_described_by_its_files(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "legal")
    adapter = read_adapter("legal", folder)
    files = [folder / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    assert adapter == RegisteredAdapter(
        name="legal",
        base_model="org/model",
        rank=4,
        target_modules=("v_proj",),
        size_bytes=sum(file.stat().st_size for file in files),
        digest=hashlib.sha256("".join(lines).encode()).hexdigest(),
        location=str(folder),
    )
    assert read_adapter("legal", folder, "other/model").base_model == "other/model"


def test_a_folder_that_names_no_base_model_needs_one(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "bad", base_model_name_or_path=None)
    with pytest.raises(InputError, match="is required, or --base-model"):
        read_adapter("bad", folder)


WORKLOAD = """
base_model: org/model
profile: p
requests: {prompt_tokens: {mean: 10}, output_tokens: {mean: 5}}
adapters: {registry: adapters.db, %s}
"""


def workload(folder: Path, keys: str, head: str = WORKLOAD) -> Path:
    with AdapterRegistry(folder / "adapters.db", create=True) as registry:
        other = entry("other", base_model="org/other")
        registry.add(entry("b", rank=16, target_modules=("q_proj",)), entry("a"), other)
    path = folder / "w.yaml"
    path.write_text(head % keys)
    return path


@pytest.mark.parametrize(
    ("keys", "rates_rps"),
    [
        ("rate_rps: 0.5", [0.5, 0.5]),
        ("total_rate_rps: 3", [1.5, 1.5]),
        ("total_rate_rps: 3, popularity: {zipf: 1}", [2.0, 1.0]),
        ("rates_rps: {b: 2}", [0.0, 2.0]),
        ("rates_rps: {b: 2}, rate_rps: 1", [1.0, 2.0]),
    ],
)
def test_a_workload_takes_the_adapters_of_its_base_model(
    keys: str, rates_rps: list[float], tmp_path: Path
) -> None:
    found = load_workload(workload(tmp_path, keys)).adapters
    assert [adapter.name for adapter in found] == ["a", "b"]
    assert [adapter.rate_rps for adapter in found] == pytest.approx(rates_rps)
    assert [(adapter.rank, adapter.path) for adapter in found] == [(8, "s3://a"), (16, "s3://b")]
    assert [adapter.target_modules for adapter in found] == [None, ("q_proj",)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("", "rate_rps: is required, or total_rate_rps or rates_rps"),
        ("rates_rps: {x: 1}", "must be the name of an adapter of base_model in the registry"),
        ("popularity: {zipf: 1}", "total_rate_rps: is required beside popularity"),
        ("rate_rps: 1, total_rate_rps: 1", "rate_rps: does not go with total_rate_rps"),
        ("rate: 1", "rate: unknown key; did you mean 'rate_rps'"),
        ("rate_rps: -1", "must be a finite number >= 0"),
    ],
)
def test_a_workload_names_the_key_of_its_fault(keys: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"w\.yaml:5: adapters") as caught:
        load_workload(workload(tmp_path, keys))
    assert message in str(caught.value)


def test_a_workload_of_another_base_model_finds_no_adapter(tmp_path: Path) -> None:
    path = workload(tmp_path, "rate_rps: 1", WORKLOAD.replace("org/model", "org/none"))
    with pytest.raises(InputError, match="must hold adapters of base_model org/none"):
        load_workload(path)


def test_a_trace_without_names_is_assigned_to_registered_adapters_equally(tmp_path: Path) -> None:
    rows = "".join(f"{i},10,5\n" for i in range(200))
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    head = "base_model: org/model\nprofile: p\ntrace: {file: t.csv}\nadapters: {registry: adapters.db%s}\n"
    a, b = load_workload(workload(tmp_path, "", head)).adapters
    assert a.rate_rps + b.rate_rps == pytest.approx(200 / 199)
    assert 0.35 < a.rate_rps < 0.65
