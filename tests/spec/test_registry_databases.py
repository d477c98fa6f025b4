"""Adapter registry on a PostgreSQL server, which the tests start: Debian's package `postgresql`."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from benchmarks.scratch_database import (
    disconnect_all,
    postgresql_programs,
    postgresql_server,
    run_command,
    scratch_database,
)
from capplan import InputError, load_workload
from capplan.registry import AdapterRegistry, RegisteredAdapter, RegistryUnavailableError
from capplan.registry._database import Database
from capplan.spec import InputLimits, limited
from tests.conftest import output_of_python
from tests.spec.test_registry import RegistryMachine, entry, line_of

WORKLOAD = """
base_model: org/model
profile: p
requests: {prompt_tokens: {mean: 10}, output_tokens: {mean: 5}}
adapters: {registry: "%%s", %s}
"""

pytest.importorskip("psycopg", reason="PostgreSQL needs a driver (extra `databases`)")
pytestmark = [
    pytest.mark.databases,
    pytest.mark.skipif(
        postgresql_programs() is None, reason="needs a PostgreSQL server: apt-get install postgresql"
    ),
    pytest.mark.process,
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgresql_server() as url:
        yield url


@pytest.fixture
def where(server: str) -> Iterator[str]:
    with scratch_database(server) as url:
        yield url


@pytest.fixture
def registry(where: str) -> Iterator[AdapterRegistry]:
    with AdapterRegistry(where, create=True, timeout_s=1.0) as made:
        yield made


def test_two_connections_agree_with_a_dictionary(server: str) -> None:
    """The state machine of the SQLite file."""

    class Machine(RegistryMachine):
        def new_database(self) -> str:
            return self.databases.enter_context(scratch_database(server))

    few = settings(max_examples=4, stateful_step_count=25, deadline=None, derandomize=True)
    run_state_machine_as_test(Machine, settings=few)


def test_names_are_equal_if_all_their_characters_are(registry: AdapterRegistry) -> None:
    """Case, accents, and spaces behind."""
    names = (
        "a",
        "A",
        "\u00e4",
        "a\u0308",
        "\u00df",
        "ss",
        "a\U0001f600",
        "n" * 256,
        "N" * 256,
        "\u4e2d" * 256,
    )
    registry.add(*(entry(name, version) for version, name in enumerate(names)))
    for version, name in enumerate(names):
        assert registry.get(name) == entry(name, version)
    assert [each.name for each in registry.adapters()] == sorted(names)
    for other in ("a ", "B", "n" * 255, "a\U0001f601"):
        assert registry.find(other) is None
    registry.remove("A")
    assert registry.find("a") == entry("a", 0)
    assert registry.find("A") is None


def test_long_values_return_as_they_were(registry: AdapterRegistry) -> None:
    adapter = RegisteredAdapter(
        name="long",
        base_model="org/model",
        rank=512,
        size_bytes=2**40,
        digest="f" * 64,
        location="https://host/\U0001f600/" + "x" * 4000,
        target_modules=("q_proj", "down_proj"),
    )
    registry.add(adapter)
    registry.announce("s0", "http://h\u00f6st/" + "y" * 4000)
    registry.hold("long", "f" * 64, "s0")
    assert registry.get("long") == adapter.replace(holders=("s0",))
    assert registry.servers() == {"s0": "http://h\u00f6st/" + "y" * 4000}


def test_writers_killed_at_random_moments_leave_a_consistent_registry(server: str) -> None:
    arguments = ("--only-writers", "--seconds", "3", "--url", server)
    assert " 0 faults" in output_of_python("-m", "benchmarks.registry", *arguments)


def test_a_registry_made_by_many_at_once_is_one(where: str) -> None:
    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(lambda _: AdapterRegistry(where, create=True), range(6)))
    made[0].add(entry("a"))
    for registry in made:
        assert registry.get("a") == entry("a")
        registry.close()


def test_a_locked_registry_can_be_read_and_is_one_line_to_writers(
    where: str, registry: AdapterRegistry
) -> None:
    registry.add(entry("a"))
    database = Database(where, create=False, timeout_s=1.0)
    with database.writing():
        assert registry.get("a") == entry("a")
        assert registry.adapters() == [entry("a")]
        with pytest.raises(RegistryUnavailableError) as caught:
            registry.announce("s0", "http://s0")
        assert line_of(caught.value).endswith("another process has locked it for over 1 s")
    registry.announce("s0", "http://s0")
    database.close()


def test_connections_that_the_server_has_ended_are_made_again(
    server: str, where: str, registry: AdapterRegistry
) -> None:
    registry.add(entry("a"))
    for _ in range(2):
        assert registry.get("a").rank == 8
        assert disconnect_all(server, sa.make_url(where).database or "") > 0
        assert registry.find("a") == entry("a")
        assert registry.find("b") is None
        registry.announce("s0", "http://s0")


def test_a_reader_sees_one_state(where: str, registry: AdapterRegistry) -> None:
    """A copy of a former version is never among the holders of the next one."""
    stop, torn, reads = threading.Event(), [], 0

    def write() -> None:
        with AdapterRegistry(where) as writer:
            for version in range(60):
                writer.announce(f"s{version}", "http://s")
                writer.add(entry("a", version), replace=True)
                writer.hold("a", entry("a", version).digest or "", f"s{version}")
        stop.set()

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        while not stop.is_set() and not writing.done():
            for adapter in registry.adapters():
                reads += 1
                version = int(adapter.digest or "", 16)
                if adapter.holders not in ((), (f"s{version}",)):
                    torn.append(adapter)
        writing.result()
    assert reads > 10
    assert torn == []


@pytest.mark.parametrize("password", ["secret", "se@cr/et?", "50%", "a b"])
@pytest.mark.parametrize("port", [1, None], ids=["unreachable", "refused"])
def test_a_server_that_cannot_be_used_is_one_line_without_the_password(
    server: str, port: int | None, password: str
) -> None:
    url = sa.make_url(server).set(password=password)
    text = url.set(port=port or url.port).render_as_string(hide_password=False)
    with pytest.raises(RegistryUnavailableError) as caught:
        AdapterRegistry(text, timeout_s=1.0)
    line = line_of(caught.value)
    assert password not in line
    assert quote(password, safe="") not in line
    assert ":***@127.0.0.1" in line


NO_TABLES = {
    "view": (
        "CREATE VIEW capplan_adapters AS SELECT 'a' AS name, 'org/model' AS base_model, 8 AS rank, "
        "NULL AS target_modules, NULL AS size_bytes, NULL AS digest, 'x' AS location "
        "FROM generate_series(1, 1e12)",
    ),
    "materialized view": ("CREATE MATERIALIZED VIEW capplan_adapters AS SELECT * FROM former",),
    "partitioned table": ("CREATE TABLE capplan_adapters (LIKE former) PARTITION BY LIST (name)",),
    "parent": (
        "ALTER TABLE former RENAME TO capplan_adapters",
        "CREATE TABLE x () INHERITS (capplan_adapters)",
    ),
    "policy": (
        "ALTER TABLE former RENAME TO capplan_adapters",
        "ALTER TABLE capplan_adapters ENABLE ROW LEVEL SECURITY",
    ),
    "generated column": (
        "ALTER TABLE former RENAME TO capplan_adapters",
        "ALTER TABLE capplan_adapters DROP COLUMN location",
        "ALTER TABLE capplan_adapters ADD COLUMN location text GENERATED ALWAYS AS (name || name) STORED",
    ),
}


@pytest.mark.parametrize("kind", NO_TABLES)
def test_what_is_no_table_is_refused_before_it_is_read(kind: str, where: str) -> None:
    AdapterRegistry(where, create=True).close()
    run_command(where, "ALTER TABLE capplan_adapters RENAME TO former")
    for command in NO_TABLES[kind]:
        run_command(where, command)
    for options in ({}, {"read_only": True}, {"create": True}):
        with pytest.raises(RegistryUnavailableError, match=": capplan_adapters: must be a plain table"):
            AdapterRegistry(where, **options)


def test_a_registry_that_is_only_read_cannot_be_written(where: str, registry: AdapterRegistry) -> None:
    registry.add(entry("a"))
    with AdapterRegistry(where, read_only=True) as reader:
        assert reader.adapters() == [reader.get("a")] == [entry("a")]
        with pytest.raises(RegistryUnavailableError, match="read-only"):
            reader.remove("a")
    assert registry.get("a") == entry("a")


def test_rows_are_counted_and_checked(where: str, registry: AdapterRegistry, tmp_path: Path) -> None:
    run_command(
        where,
        "INSERT INTO capplan_adapters (name, base_model, rank, location) "
        "SELECT 'a' || n, 'org/model', 8, 'x' FROM generate_series(1, 300000) AS n",
    )
    path = tmp_path / "w.yaml"
    path.write_text(WORKLOAD % "rate_rps: 1" % where)
    with limited(InputLimits(max_adapters=1000)), pytest.raises(InputError) as caught:
        load_workload(path)
    assert "must be at most 1,000 adapters; capplan --max-adapters" in line_of(caught.value)
    run_command(where, "DELETE FROM capplan_adapters WHERE name <> 'a7'")
    assert [each.name for each in load_workload(path).adapters] == ["a7"]
    for column, value in (
        ("rank", "0"),
        ("location", "E'\\x1b[31m'"),
        ("size_bytes", "-1"),
        ("base_model", "'-x'"),
    ):
        run_command(where, f"UPDATE capplan_adapters SET {column} = {value}")
        with pytest.raises(InputError, match=f"adapter a7: {column}: must"):
            registry.adapters()
        run_command(where, "UPDATE capplan_adapters SET rank = 8, location = 'x', size_bytes = 1")


def test_a_statement_that_takes_too_long_ends(where: str, registry: AdapterRegistry) -> None:
    """A lock of the table alone, which is no reason to wait for it."""
    blocker = sa.create_engine(where)
    with blocker.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE capplan_adapters")
        with AdapterRegistry(where, timeout_s=60.0, read_only=True) as reader:
            begin_s = time.monotonic()
            with pytest.raises(RegistryUnavailableError, match="not read within 4 s"):
                reader.adapters()
            assert time.monotonic() - begin_s < 9
    blocker.dispose()


def test_a_database_without_a_registry_is_refused(where: str) -> None:
    with pytest.raises(InputError, match="must be an adapter registry"):
        AdapterRegistry(where)
