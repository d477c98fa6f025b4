"""A copy counts only if its server has read it: an intact one stays, whatever the registry says of others."""

import contextlib
import json
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.moving_cluster import is_intact
from capplan import InputError
from capplan.engine.lora import AdapterStore
from capplan.registry import AdapterRegistry
from capplan.server._adapter_pool import PoolParams
from tests.engine.adapter_fleet import (
    NAMES,
    SERVERS,
    Fleet,
    answer,
    ask,
    refusal,
    servers_of_last_copies,
    set_shares,
    share,
    until,
)
from tests.engine.live import ADMIN_KEY, Live
from tests.engine.test_faults import send, tokens_of

pytestmark = pytest.mark.process

WEIGHTS = "adapter_model.safetensors"
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")
ADMIN: Any = {"Authorization": f"Bearer {ADMIN_KEY}"}


def flip_a_bit(copy: Path) -> None:
    data = bytearray((copy / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (copy / WEIGHTS).write_bytes(data)


def cut_off(copy: Path) -> None:
    (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:-1])


def link(copy: Path) -> None:
    (copy / WEIGHTS).rename(copy.parent / "elsewhere")
    (copy / WEIGHTS).symlink_to(copy.parent / "elsewhere")


def lose(copy: Path) -> None:
    for file in copy.iterdir():
        file.unlink()
    copy.rmdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "another bit": flip_a_bit,
    "cut off": cut_off,
    "no file": lambda copy: (copy / WEIGHTS).unlink(),
    "a link": link,
    "no folder": lose,
}


def intact_copies(fleet: Fleet, name: str) -> set[str]:
    """Return the servers whose files of an adapter have its digest."""
    adapter = fleet.registry.get(name)
    copies = fleet.top.glob(f"s?/{adapter.digest}")
    return {copy.parent.name for copy in copies if is_intact(copy)}


@contextlib.contextmanager
def two_holders(fleet: Fleet) -> Iterator[tuple[Live, Live]]:
    """Two servers have the only copies of adapter a."""
    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        answer(s0, "a")
        answer(s1, "a")
        fleet.lose_source("a")
        yield s0, s1


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_last_intact_copy_stays_and_a_broken_one_is_fetched_again(
    damage: str, fleet: Fleet, right: dict[str, list[int]]
) -> None:
    with two_holders(fleet) as (s0, s1):
        DAMAGES[damage](fleet.copy("s1", "a"))
        share(s0, a=0)
        assert "s0" in intact_copies(fleet, "a")
        until(lambda: fleet.holders("a") == ("s0", "s1") and intact_copies(fleet, "a") == {"s0", "s1"})
        share(s0, a=0)
        assert fleet.holders("a") == ("s1",)
        assert answer(s1, "a") == answer(s0, "a") == right["a"]
        metrics = send(s1, "GET", "/metrics").body.decode()
        assert 'capplan:adapter_copy_checks_total{outcome="broken"} 0.0' not in metrics
        until(lambda: intact_copies(fleet, "a") == {"s0", "s1"})


def test_a_broken_copy_without_a_share_is_removed(fleet: Fleet) -> None:
    with two_holders(fleet) as (s0, s1):
        set_shares(s1, a=0)
        flip_a_bit(fleet.copy("s1", "a"))
        s1.run(s1.service.adapters.withdraw("a"))
        share(s0, a=0)
        until(lambda: fleet.holders("a") == ("s0",) and not fleet.files("s1"))  # renamed, then removed
        fleet.check("s0", "s1")


def test_a_holder_that_does_not_run_is_no_copy(fleet: Fleet, right: dict[str, list[int]]) -> None:
    with two_holders(fleet) as (s0, s1):
        s1.close()
        share(s0, a=0)
        assert fleet.holders("a") == ("s0", "s1")
        assert intact_copies(fleet, "a") == {"s0", "s1"}
        with fleet.server("s1") as s1:
            share(s0, a=0)
            assert fleet.holders("a") == ("s1",)
            assert answer(s1, "a") == right["a"]


@pytest.mark.parametrize("other", ["s0", "s2"])
def test_another_server_at_the_address_of_a_holder_confirms_nothing(other: str, fleet: Fleet) -> None:
    with two_holders(fleet) as (s0, s1), fleet.server("s2") as s2:
        answer(s2, "a")
        fleet.registry.lose("a", "s2")
        s1.close()
        fleet.registry.announce("s1", {"s0": s0, "s2": s2}[other].url)
        share(s0, a=0)
        assert fleet.holders("a") == ("s0", "s1")
        assert "s0" in intact_copies(fleet, "a")


def test_of_two_servers_that_have_confirmed_each_other_one_keeps_its_copy(
    fleet: Fleet, right: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, release = threading.Barrier(2), AdapterRegistry.release

    def at_the_same_time(self: AdapterRegistry, *pair: str) -> bool:
        both.wait(10)
        return release(self, *pair)

    with two_holders(fleet) as (s0, s1):
        monkeypatch.setattr(AdapterRegistry, "release", at_the_same_time)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda server: share(server, a=0), (s0, s1)))
        monkeypatch.undo()
        assert not both.broken
        assert len(fleet.holders("a")) == 1
        assert set(fleet.holders("a")) == intact_copies(fleet, "a")
        fleet.check("s0", "s1")
        assert answer(s0, "a") == answer(s1, "a") == right["a"]


def test_a_server_does_not_leave_to_a_keeper_that_has_left(fleet: Fleet) -> None:
    """Of three holders, the first is confirmed by the second, which leaves first."""
    with two_holders(fleet), fleet.server("s2") as s2:
        answer(s2, "a")
        assert fleet.registry.release("a", "s1", keeper="s0")
        assert not fleet.registry.release("a", "s0", keeper="s1")
        assert fleet.holders("a") == ("s0", "s2")


@pytest.mark.parametrize("moment", ["before the files are deleted", "before the registry is told"])
def test_a_removal_cut_off_leaves_an_intact_copy_that_is_registered(
    moment: str, fleet: Fleet, right: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise OSError(5, "killed here")

    target = (AdapterStore, "delete") if "files" in moment else (AdapterRegistry, "release")
    with two_holders(fleet) as (s0, s1):
        monkeypatch.setattr(*target, killed)
        with pytest.raises(OSError, match="killed here"):
            share(s0, a=0)
        s0.close()
        monkeypatch.undo()
        assert "s1" in fleet.holders("a")
        with fleet.server("s0") as s0:
            assert fleet.holders("a") == ("s0", "s1")
            assert intact_copies(fleet, "a") == {"s0", "s1"}
            share(s0, a=0)
            share(s1, a=0)
            assert set(fleet.holders("a")) == intact_copies(fleet, "a") == {"s1"}
            assert answer(s0, "a") == right["a"]


def test_a_broken_copy_registered_again_after_a_kill_is_no_copy(
    fleet: Fleet,
) -> None:
    """The server was killed after it had left the holders, before the files were deleted."""
    with two_holders(fleet) as (s0, s1):
        s1.close()
        flip_a_bit(fleet.copy("s1", "a"))
        fleet.registry.lose("a", "s1")
        with fleet.server("s1"):
            assert fleet.holders("a") == ("s0", "s1")
            share(s0, a=0)
            assert "s0" in intact_copies(fleet, "a")
            until(lambda: intact_copies(fleet, "a") == {"s0", "s1"})


def test_a_copy_that_broke_while_its_server_was_down_is_not_served(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        answer(s0, "a")
        answer(s1, "a")
        answer(s1, "b")
        s1.close()
        for name in ("a", "b"):
            fleet.lose_source(name)
            flip_a_bit(fleet.copy("s1", name))
        with fleet.server("s1") as s1:
            assert answer(s1, "a") == right["a"]
            assert refusal(s1, "b") == (503, "adapter_unavailable")
            assert fleet.holders("b") == ()
            fleet.check("s0", "s1")


def test_a_server_that_sends_wrong_bytes_checks_its_copy(fleet: Fleet, right: dict[str, list[int]]) -> None:
    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        answer(s1, "a")
        flip_a_bit(fleet.copy("s1", "a"))
        assert answer(s0, "a") == right["a"]
        until(lambda: intact_copies(fleet, "a") == {"s0", "s1"} and fleet.holders("a") == ("s0", "s1"))
        assert answer(s1, "a") == right["a"]


def checks(server: Live, digest: str | None) -> bool:
    """Return whether a server finds its copy intact."""
    found = send(server, "POST", f"/v1/adapter_files/{digest}", **ADMIN)
    return bool(json.loads(found.body)["intact"])


def test_a_copy_that_cannot_be_fetched_again_is_fetched_by_a_later_round(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, params=PoolParams(0.1, 3600.0))
    failed = 'capplan:adapter_transfers_total{outcome="failed",source="location"}'
    with two_holders(fleet) as (s0, s1):
        flip_a_bit(fleet.copy("s1", "a"))
        s0.close()
        assert not checks(s1, fleet.registry.get("a").digest)
        until(lambda: failed in send(s1, "GET", "/metrics").body.decode())
        assert fleet.holders("a") == ("s0",)
        with fleet.server("s0"):
            until(lambda: fleet.holders("a") == ("s0", "s1"))
            assert intact_copies(fleet, "a") == {"s0", "s1"}
    fleet.registry.close()


def test_a_copy_that_does_not_fit_any_more_is_not_fetched_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, params=PoolParams(0.1, 3600.0))
    with two_holders(fleet) as (_, s1):
        pool = s1.service.pool
        assert pool is not None
        flip_a_bit(fleet.copy("s1", "a"))
        fleet.registry.add(fleet.registry.get("a").replace(base_model="org/other"), replace=True)
        assert not checks(s1, fleet.registry.get("a").digest)
        until(lambda: fleet.holders("a") == ("s0",))
        until(lambda: not s1.on_loop(lambda: pool._copies.missing | pool._loads.keys()))
    fleet.registry.close()


def test_a_broken_copy_that_cannot_be_removed_is_removed_by_a_later_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(tmp_path, params=PoolParams(0.1, 3600.0, 0.2))
    with two_holders(fleet) as (_, s1):
        flip_a_bit(fleet.copy("s1", "a"))
        with contextlib.closing(sqlite3.connect(fleet.file)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert not checks(s1, fleet.registry.get("a").digest)
            until(lambda: "a broken copy is not removed" in caplog.text)
        until(lambda: intact_copies(fleet, "a") == {"s0", "s1"} and fleet.holders("a") == ("s0", "s1"))
    fleet.registry.close()


@contextlib.contextmanager
def file_accesses(server: Live, top: Path) -> Iterator[list[str]]:
    """Yield the accesses to files below a folder that the event loop of a server makes itself."""
    found: list[str] = []
    loop, ended = server.on_loop(threading.get_ident), threading.Event()

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        is_own = event in FILE_EVENTS and threading.get_ident() == loop and not ended.is_set()
        if is_own and str(arguments[0]).startswith(str(top)):
            found.append(f"{event} {arguments[0]}")

    sys.addaudithook(on_event)  # there is no way to remove one
    yield found
    ended.set()


def test_files_of_adapters_are_used_outside_of_the_event_loop(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    """From a location, from a server, from one that sends wrong bytes, and when a copy is removed."""
    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        answer(s1, "b")
        answer(s1, "c")
        flip_a_bit(fleet.copy("s1", "c"))
        with file_accesses(s0, fleet.top) as found:
            for name in NAMES:
                assert answer(s0, name) == right[name]
            answer(s1, "a")
            share(s0, a=0)
            assert fleet.holders("a") == ("s1",)
            assert found == []
            s0.on_loop(lambda: fleet.file.open("rb").close())
            assert found == [f"open {fleet.file}"], "the events are seen"


def test_a_copy_that_cannot_be_read_at_the_moment_neither_counts_nor_is_removed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many_open_files(*_: Any) -> None:
        raise InputError("cannot be read: Too many open files", location=WEIGHTS)

    with two_holders(fleet) as (s0, _):
        monkeypatch.setattr(AdapterStore, "open", too_many_open_files)
        share(s0, a=0)
        monkeypatch.undo()
        assert fleet.holders("a") == ("s0", "s1")
        assert intact_copies(fleet, "a") == {"s0", "s1"}


def test_only_holders_of_the_admin_key_let_copies_be_checked(fleet: Fleet) -> None:
    with fleet.server("s0") as s0:
        answer(s0, "a")
        digest = fleet.registry.get("a").digest
        assert send(s0, "POST", f"/v1/adapter_files/{digest}").status == 401
        for there, is_intact in ((str(digest), True), ("0" * 64, False), ("x", False), ("%2e%2e", False)):
            found = send(s0, "POST", f"/v1/adapter_files/{there}", **ADMIN)
            assert found.status == 200
            assert json.loads(found.body) == {"server": "s0", "intact": is_intact}
        time.sleep(0.1)
        fleet.check("s0")
        assert fleet.file.is_file()


def answered(server: Live, name: str) -> list[int]:
    """Return the first answer; until copies have been fetched again there may be refusals."""
    end_s = time.monotonic() + 10
    while (asked := ask(server, name)).status == 503 and time.monotonic() < end_s:
        assert asked.error["code"] == "adapter_unavailable"
        time.sleep(0.01)
    return tokens_of(asked)


@pytest.mark.parametrize("seed", range(3))
def test_random_damages_and_removals_lose_no_adapter(
    seed: int, fleet: Fleet, right: dict[str, list[int]]
) -> None:
    """Copies break, shares change at several servers at once, servers restart: an intact copy stays."""
    rng = random.Random(seed)
    with servers_of_last_copies(fleet, right, rng) as (running, stack), ThreadPoolExecutor(3) as threads:
        for _ in range(20):
            server, adapter = rng.choice(SERVERS), rng.choice(NAMES)
            match rng.choice(("ask", "ask", "zero", "zero", "damage", "restart")):
                case "ask":
                    assert answered(running[server], adapter) == right[adapter]
                case "damage":
                    there = intact_copies(fleet, adapter) & set(fleet.holders(adapter))
                    if len(there) > 1:
                        flip_a_bit(fleet.copy(rng.choice(sorted(there)), adapter))
                case "restart":
                    running[server].close()
                    running[server] = stack.enter_context(fleet.server(server))
                case _:
                    removing = partial(share, **{adapter: 0.0})
                    list(threads.map(removing, [running[each] for each in rng.sample(SERVERS, 2)]))
            assert all(intact_copies(fleet, each) & set(fleet.holders(each)) for each in NAMES)
        for server in SERVERS:
            for name in NAMES:
                assert answered(running[server], name) == right[name]
