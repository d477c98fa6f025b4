"""One running server has a name in the registry, and a folder; it may restart, a second one is refused."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from capplan import InputError
from capplan.engine.lora import AdapterStore
from capplan.registry import AdapterRegistry, RegisteredServer
from capplan.server._adapter_pool import OwnedFolder, PoolParams, ServerClaim
from tests.cli.conftest import environment
from tests.engine.adapter_fleet import NAMES, Fleet, answer, refusal, share, until
from tests.engine.test_adapter_copies import checks, flip_a_bit

pytestmark = pytest.mark.process

URL = "http://127.0.0.1:8000"
RENEW_S = 0.1


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[AdapterRegistry]:
    with AdapterRegistry(tmp_path / "registry.db", create=True) as made:
        yield made


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "machine-1", tmp_path / "machine-2"]
    for folder in made:
        folder.mkdir()
    return made


def claim(registry: AdapterRegistry, folder: OwnedFolder) -> ServerClaim:
    return ServerClaim(registry, RegisteredServer(name="g0-1", url=URL), folder, RENEW_S)


def test_a_name_that_is_renewed_is_refused_to_another_server(
    registry: AdapterRegistry, folders: list[Path]
) -> None:
    first, second = (claim(registry, OwnedFolder(folder)) for folder in folders)
    first.take()
    with ThreadPoolExecutor(1) as threads:
        refused = threads.submit(second.take)
        while not refused.done():
            assert first.renew()
            time.sleep(RENEW_S)
    with pytest.raises(InputError) as caught:
        refused.result()
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("server_name: must be the name of one running server in ")
    assert "--server-name sets another one (got 'g0-1')" in line
    assert first.renew()


def test_a_server_that_is_gone_leaves_its_name(registry: AdapterRegistry, folders: list[Path]) -> None:
    first, second = (claim(registry, OwnedFolder(folder)) for folder in folders)
    first.take()
    second.take()
    assert second.renew()
    assert not first.renew(), "it was paused, and must notice"
    second.leave()
    begin_s = time.monotonic()
    claim(registry, OwnedFolder(folders[1])).take()
    assert time.monotonic() - begin_s < RENEW_S, "a name that was left is free"


def test_a_server_killed_comes_up_at_once_on_its_folder(
    registry: AdapterRegistry, folders: list[Path]
) -> None:
    folder = OwnedFolder(folders[0])
    claim(registry, folder).take()
    folder.close()  # as the kernel does
    again = OwnedFolder(folders[0])
    assert again.owner == folder.owner
    begin_s = time.monotonic()
    claim(registry, again).take()
    assert time.monotonic() - begin_s < RENEW_S


def test_of_two_servers_that_take_over_one_gets_the_name(
    registry: AdapterRegistry, folders: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "machine-3").mkdir()
    gone, *others = (claim(registry, OwnedFolder(each)) for each in (*folders, tmp_path / "machine-3"))
    gone.take()
    with ThreadPoolExecutor(2) as threads:
        taken = [threads.submit(each.take) for each in others]
        errors = [each.exception() for each in taken]
    assert sorted(type(each) for each in errors if each) == [InputError]
    assert [each.renew() for each in others] == [error is None for error in errors]


def test_a_folder_has_one_running_server(folders: list[Path]) -> None:
    folder = OwnedFolder(folders[0])
    with pytest.raises(InputError, match="lora_root: must be the folder of one running server"):
        OwnedFolder(folders[0])
    folder.close()
    OwnedFolder(folders[0]).close()


def test_a_folder_file_that_is_a_link_is_not_followed(folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    (folders[0] / ".capplan-server").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic"):
        OwnedFolder(folders[0])
    assert (tmp_path / "mine").read_text() == "x"


def takes_over(registry: AdapterRegistry, name: str, owner: str) -> bool:
    """Return whether an owner gets a name between two renewals."""
    other = registry.announce(name, URL, owner)
    return other is None or registry.announce(name, URL, owner, unrenewed=other) is None


def test_a_server_whose_name_was_taken_fetches_and_removes_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, params=PoolParams(3600.0, 0.0, renew_s=RENEW_S))
    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        before = answer(s0, "a")
        answer(s1, "a")
        until(lambda: takes_over(fleet.registry, "s0", "another machine"))
        until(lambda: refusal(s0, "unknown") == (503, "server_name_taken"))
        assert refusal(s0, "b") == (503, "server_name_taken")
        assert answer(s0, "a") == before
        share(s0, a=0)
        assert fleet.holders("a") == ("s0", "s1")
    fleet.registry.close()


def changes(fleet: Fleet) -> int:
    """Return the number of changes, each of which empties the look-up caches of all servers."""
    with contextlib.closing(sqlite3.connect(fleet.file)) as connection:
        return int(connection.execute("SELECT changes FROM capplan_registry").fetchone()[0])


def test_a_server_renews_its_name_while_it_looks_through_its_adapters(
    tmp_path: Path, right: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, size_bytes = (
        Fleet(tmp_path, params=PoolParams(3600.0, 0.0, renew_s=RENEW_S)),
        AdapterStore.size_bytes,
    )
    renewals: list[int] = []

    def slow(self: AdapterStore, digest: str) -> int:
        other = fleet.registry.announce("s0", URL, "another machine")
        assert other is not None
        renewals.append(other.renewals)
        time.sleep(1.5 * RENEW_S)
        return size_bytes(self, digest)

    with fleet.server("s0") as s0:
        before = {name: answer(s0, name) for name in NAMES}
    at_end = changes(fleet)
    monkeypatch.setattr(AdapterStore, "size_bytes", slow)
    with fleet.server("s0") as s0:
        monkeypatch.undo()
        assert len(set(renewals)) == len(NAMES), "another machine would have got the name"
        assert changes(fleet) - at_end == 1 + len(NAMES), "that of the start, and those of this test"
        assert {name: answer(s0, name) for name in NAMES} == before == right
    fleet.registry.close()


def test_a_server_whose_name_is_taken_while_it_starts_is_refused(
    registry: AdapterRegistry, folders: list[Path]
) -> None:
    starting = claim(registry, OwnedFolder(folders[0]))
    starting.take()
    starting.keep()
    time.sleep(RENEW_S)
    assert takes_over(registry, "g0-1", "another machine")
    with pytest.raises(
        InputError, match=r"server_name: must be the name of one running server.*has taken it"
    ):
        starting.keep()


def test_a_server_whose_name_was_taken_leaves_the_records_of_its_broken_copies(tmp_path: Path) -> None:
    """They are those of the server that has the name now."""
    fleet = Fleet(tmp_path, params=PoolParams(RENEW_S, 3600.0, renew_s=RENEW_S))
    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        answer(s0, "a")
        answer(s1, "a")
        until(lambda: takes_over(fleet.registry, "s0", "another machine"))
        until(lambda: refusal(s0, "unknown") == (503, "server_name_taken"))
        flip_a_bit(fleet.copy("s0", "a"))
        assert not checks(s0, fleet.registry.get("a").digest)
        time.sleep(5 * RENEW_S)
        assert fleet.holders("a") == ("s0", "s1")
        assert fleet.copy("s0", "a").exists()
    fleet.registry.close()


def test_a_running_server_that_was_removed_is_entered_again_with_its_copies(
    tmp_path: Path, right: dict[str, list[int]]
) -> None:
    fleet = Fleet(tmp_path, params=PoolParams(RENEW_S, 3600.0, renew_s=RENEW_S))
    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        assert answer(s0, "a") == right["a"]
        fleet.lose_source("a")
        fleet.registry.forget("s0")
        assert fleet.holders("a") == ()
        until(lambda: "s0" in fleet.registry.servers())
        assert fleet.registry.servers()["s0"] == s0.url
        assert answer(s0, "b") == right["b"]
        assert fleet.holders("b") == ("s0",)
        until(lambda: fleet.holders("a") == ("s0",))
        assert answer(s1, "a") == right["a"]
        fleet.check("s0", "s1")
    fleet.registry.close()


def test_a_server_that_was_removed_leaves_its_name_to_another_owner(
    registry: AdapterRegistry, folders: list[Path]
) -> None:
    first, second = (claim(registry, OwnedFolder(folder)) for folder in folders)
    first.take()
    registry.forget("g0-1")
    second.take()
    assert not first.renew()
    registry.forget("g0-1")
    assert first.renew()
    assert not second.renew()


class Server:
    """`capplan serve` with a registry, under its default name, as on a machine of its own."""

    def __init__(self, registry: Path, root: Path, *flags: str) -> None:
        root.mkdir(exist_ok=True)
        words = ["serve", "--model", "tiny-llama", "--port", "0", "--json", "--admin-api-key", "admin"]
        words += ["--registry", str(registry), "--lora-root", str(root), *flags]
        env = environment() | {"OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, "-m", "capplan", *words]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(arguments, env=env, stdout=pipe, stderr=pipe, text=True)

    def starts(self) -> bool:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return bool(line) and "url" in json.loads(line)

    def end(self, number: signal.Signals) -> tuple[int, str]:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out + err


def test_processes_of_one_name_are_refused_in_one_line_and_restart(registry: AdapterRegistry) -> None:
    file = Path(registry.location)
    servers: list[Server] = []
    try:
        servers.append(Server(file, file.parent / "1", "--server-name", "g0-1"))
        assert servers[0].starts()
        servers.append(Server(file, file.parent / "2", "--server-name", "g0-1"))
        assert not servers[1].starts()
        status, printed = servers[1].end(signal.SIGTERM)
        assert status == 2
        assert len(printed.strip().splitlines()) == 1
        assert "--server-name: must be the name of one running server" in printed
        servers[0].end(signal.SIGKILL)
        servers.append(Server(file, file.parent / "1", "--server-name", "g0-1"))
        assert servers[2].starts()
        assert servers[2].end(signal.SIGTERM)[0] == 0
    finally:
        for server in servers:
            server.process.kill()
            server.process.communicate()
