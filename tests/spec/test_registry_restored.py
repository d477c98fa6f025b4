"""SQLite file of an adapter registry that is replaced while processes have it open, as by a backup."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from capplan.registry import AdapterRegistry, RegistryUnavailableError
from tests.spec.test_registry import entry, line_of


def back_up(file: Path, to: Path) -> None:
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)


def put_in_place(new: Path, file: Path) -> None:
    """Replace the file of a registry that others have open."""
    with closing(sqlite3.connect(new)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for end in ("-wal", "-shm"):
        Path(f"{file}{end}").unlink(missing_ok=True)
    new.replace(file)


def test_a_registry_file_that_is_replaced_is_opened_again(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with AdapterRegistry(other, create=True) as registry:
        registry.add(entry("a", 1), entry("b"))
    with AdapterRegistry(file) as first, AdapterRegistry(file) as second, AdapterRegistry(file) as third:
        assert first.get("a").digest == f"{0:064x}"
        assert second.find("b") is None
        put_in_place(other, file)
        assert (first.get("a").digest, second.get("a").digest) == (f"{1:064x}",) * 2
        assert first.find("b") == second.find("b") == entry("b")
        third.announce("s0", "http://s0")
        third.hold("b", f"{0:064x}", "s0")
        first.remove("a")
        for registry in (first, second, third):
            assert [each.name for each in registry.adapters(server="s0")] == ["b"]
            assert registry.find("a") is None
    with AdapterRegistry(file) as registry:
        assert registry.get("b").holders == ("s0",), "what is written is in the file of the path"


def test_of_two_servers_on_a_restored_registry_one_keeps_its_copy(file: Path, tmp_path: Path) -> None:
    digest, backup = f"{0:064x}", tmp_path / "backup.db"
    with AdapterRegistry(file) as first:
        for server in ("s0", "s1"):
            first.announce(server, f"http://{server}")
            first.hold("a", digest, server)
        back_up(file, backup)
        put_in_place(backup, file)
        with AdapterRegistry(file) as second:
            released = first.release("a", "s0", "s1"), second.release("a", "s1", "s0")
            assert released == (True, False)
            assert first.get("a").holders == second.get("a").holders == ("s1",)


def test_a_file_put_in_place_of_a_registry_is_checked(file: Path, tmp_path: Path) -> None:
    others = {
        "text": tmp_path / "text",
        "other version": tmp_path / "version.db",
        "right": tmp_path / "right.db",
    }
    others["text"].write_text("no database\n" * 200)
    for path in list(others.values())[1:]:
        AdapterRegistry(path, create=True).close()
    with closing(sqlite3.connect(others["other version"])) as connection, connection:
        connection.execute("UPDATE capplan_registry SET schema_version = 9")
    with AdapterRegistry(file) as registry:
        assert registry.get("a")
        for kind, message in (("text", "cannot be used"), ("other version", "must have version 2")):
            for end in ("-wal", "-shm"):
                Path(f"{file}{end}").unlink(missing_ok=True)
            others[kind].replace(file)
            for use in (lambda: registry.find("a"), lambda: registry.remove("a"), registry.adapters):
                with pytest.raises(RegistryUnavailableError, match=message) as caught:
                    use()
                line_of(caught.value)
        put_in_place(others["right"], file)
        assert registry.find("a") is None


def test_threads_that_use_a_registry_while_it_is_replaced_see_the_new_one(file: Path, tmp_path: Path) -> None:
    with AdapterRegistry(file) as registry, ThreadPoolExecutor(8) as threads:
        for version in range(1, 6):
            other = tmp_path / f"{version}.db"
            with AdapterRegistry(other, create=True) as made:
                made.add(entry("a", version))
            uses = [
                threads.submit(use)
                for _ in range(50)
                for use in (lambda: registry.find("a"), registry.adapters)
            ]
            put_in_place(other, file)
            for use in uses:
                with suppress(
                    RegistryUnavailableError
                ):  # between the removal of the former files and the new one
                    assert use.result()
            found = [threads.submit(registry.get, "a").result().digest for _ in range(8)]
            assert found == [f"{version:064x}"] * 8
