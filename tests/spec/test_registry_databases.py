"""Adapter registry on database servers: `CAPPLAN_DATABASE_URLS="URL URL" pytest -m databases`.

The URLs are of users who may create databases, and name a database that exists; it is not touched.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from benchmarks.scratch_database import disconnect_all, scratch_database
from capplan import InputError
from capplan.spec.registry import AdapterRegistry, RegisteredAdapter, RegistryUnavailableError
from capplan.spec.registry.database import Database
from tests.spec.test_registry import RegistryMachine, entry, line_of

ROOT = Path(__file__).resolve().parents[2]
URLS = os.environ.get("CAPPLAN_DATABASE_URLS", "").split()

pytestmark = [
    pytest.mark.databases,
    pytest.mark.skipif(not URLS, reason="no URLs of database servers in CAPPLAN_DATABASE_URLS"),
    pytest.mark.parametrize("server", URLS, ids=[sa.make_url(url).drivername for url in URLS]),
]


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
    """Collations differ by database: case, accents and spaces behind."""
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
    command = (sys.executable, "-m", "benchmarks.registry", *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 faults" in done.stdout


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


def test_an_unreachable_server_is_one_line_without_the_password(server: str) -> None:
    url = sa.make_url(server).set(port=1, password="secret")
    with pytest.raises(RegistryUnavailableError) as caught:
        AdapterRegistry(url.render_as_string(hide_password=False), timeout_s=1.0)
    assert "secret" not in line_of(caught.value)


def test_a_database_without_a_registry_is_refused(where: str) -> None:
    with pytest.raises(InputError, match="must be an adapter registry"):
        AdapterRegistry(where)
