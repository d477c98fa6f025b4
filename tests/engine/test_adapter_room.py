"""Limit of the adapters that a server stores: others leave for new ones, or the new ones are refused."""

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from capplan import InputError
from capplan.engine.lora import IncomingAdapter
from capplan.server import PoolSettings
from tests.engine.adapter_fleet import NAMES, Fleet, answer, ask, set_shares, until
from tests.engine.live import Live
from tests.engine.test_faults import send, tokens_of

pytestmark = pytest.mark.long


def size_bytes(fleet: Fleet) -> int:
    return max(fleet.registry.get(name).size_bytes or 0 for name in NAMES)


def room_for(fleet: Fleet, adapters: float) -> dict[str, Any]:
    """Return settings of a server that can store a number of adapters."""
    return {"pool": {"max_stored_gib": adapters * size_bytes(fleet) / 2**30}}


def stored_bytes(fleet: Fleet, server: str) -> int:
    return sum(file.stat().st_size for file in fleet.root(server).glob("*/*"))


def metrics_of(server: Live) -> str:
    return send(server, "GET", "/metrics").body.decode()


def refused_message(server: Live, name: str) -> str:
    refused = ask(server, name)
    assert (refused.status, refused.error["code"]) == (503, "storage")
    return str(refused.error["message"])


def test_the_adapter_used_longest_ago_leaves_for_a_new_one(fleet: Fleet, right: dict[str, list[int]]) -> None:
    with fleet.server("s1") as s1, fleet.server("s0", **room_for(fleet, 2.5)) as s0:
        for name in NAMES:
            answer(s1, name)
            fleet.lose_source(name)
        for name in ("a", "b", "a", "c"):
            assert answer(s0, name) == right[name]
        assert [name for name in NAMES if "s0" in fleet.holders(name)] == ["a", "c"]
        fleet.check("s0", "s1")
        assert answer(s0, "b") == right["b"]
        assert [name for name in NAMES if "s0" in fleet.holders(name)] == ["b", "c"]
        metrics = metrics_of(s0).splitlines()
        values = dict(line.rsplit(" ", 1) for line in metrics if line.startswith("capplan:adapter"))
        assert float(values["capplan:adapters_stored_bytes"]) == stored_bytes(fleet, "s0")
        assert float(values["capplan:adapters_stored_bytes_limit"]) == int(2.5 * size_bytes(fleet))
        assert float(values["capplan:adapter_copies_removed_total"]) == 2


def test_an_adapter_with_a_share_stays(fleet: Fleet, right: dict[str, list[int]]) -> None:
    with fleet.server("s1") as s1, fleet.server("s0", **room_for(fleet, 2.5)) as s0:
        for name in NAMES:
            answer(s1, name)
        answer(s0, "a")
        answer(s0, "b")
        set_shares(s0, a=0.5, b=0.0)
        assert answer(s0, "c") == right["c"]
        assert [name for name in NAMES if "s0" in fleet.holders(name)] == ["a", "c"]
        set_shares(s0, c=0.5)
        assert "2 with a share here" in refused_message(s0, "b")
        fleet.check("s0", "s1")
        assert answer(s0, "a") == right["a"]


def test_a_last_copy_stays(fleet: Fleet, right: dict[str, list[int]]) -> None:
    with fleet.server("s1") as s1, fleet.server("s0", **room_for(fleet, 2.5)) as s0:
        answer(s0, "a")
        answer(s0, "b")
        set_shares(s0, a=0.0, b=0.0)
        assert "2 without a confirmed other copy" in refused_message(s0, "c")
        assert fleet.holders("a") == fleet.holders("b") == ("s0",)
        answer(s1, "b")
        assert answer(s0, "c") == right["c"]
        assert (fleet.holders("a"), fleet.holders("b")) == (("s0",), ("s1",))
        fleet.check("s0", "s1")


def test_an_adapter_in_use_stays(fleet: Fleet, right: dict[str, list[int]]) -> None:
    with fleet.server("s1") as s1, fleet.server("s0", **room_for(fleet, 1.5)) as s0:
        for name in NAMES:
            answer(s1, name)
        answer(s0, "a")
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(ask, s0, "a", max_tokens=400, ignore_eos=True)
            until(lambda: s0.service.engine.in_flight > 0)
            assert "1 in use" in refused_message(s0, "b")
            assert len(tokens_of(running.result())) == 400
        assert answer(s0, "b") == right["b"]
        fleet.check("s0", "s1")


@pytest.mark.parametrize("size", ["known", "unknown"])
def test_an_adapter_beyond_the_limit_is_refused_and_leaves_nothing(size: str, fleet: Fleet) -> None:
    if size == "unknown":
        fleet.registry.add(fleet.registry.get("b").replace(size_bytes=None), replace=True)
    with fleet.server("s0", **room_for(fleet, 0.5)) as s0:
        assert "adapters that stay: none" in refused_message(s0, "b")
        fleet.check("s0")
        s0.check_idle()


def test_copies_of_before_a_restart_count(fleet: Fleet, right: dict[str, list[int]]) -> None:
    with fleet.server("s1") as s1:
        with fleet.server("s0") as s0:
            for name in NAMES:
                answer(s0, name)
                answer(s1, name)
        with fleet.server("s0", **room_for(fleet, 2.5)) as s0:
            fleet.lose_source("b")
            (fleet.copy("s0", "b") / "adapter_config.json").write_text("{}")
            assert answer(s0, "b") == right["b"]
            assert stored_bytes(fleet, "s0") <= 2.5 * size_bytes(fleet)
            fleet.check("s0", "s1")


@pytest.mark.parametrize("seed", range(2))
def test_requests_of_more_adapters_than_there_is_room_for_keep_the_limit(
    seed: int, fleet: Fleet, right: dict[str, list[int]]
) -> None:
    """Two servers with room for two adapters each, a third one with all."""
    rng = random.Random(seed)
    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        s2 = stack.enter_context(fleet.server("s2"))
        small = [stack.enter_context(fleet.server(name, **room_for(fleet, 2.2))) for name in ("s0", "s1")]
        for name in NAMES:
            answer(s2, name)
            fleet.lose_source(name)
        for _ in range(6):
            asked = [(rng.choice(small), rng.choice(NAMES)) for _ in range(8)]
            for (_, name), found in zip(asked, threads.map(lambda pair: ask(*pair), asked), strict=True):
                if found.status == 503:
                    assert found.error["code"] == "storage"
                else:
                    assert tokens_of(found) == right[name]
            for server in ("s0", "s1"):
                assert stored_bytes(fleet, server) <= 2.2 * size_bytes(fleet)
            assert all(fleet.holders(name) for name in NAMES)
        fleet.check("s0", "s1", "s2")


@pytest.mark.parametrize("source", ["server", "location"])
def test_a_disk_that_is_full_during_a_transfer_is_no_fault_of_the_source(
    source: str, fleet: Fleet, right: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        if source == "server":
            answer(s0, "a")
        monkeypatch.setattr(IncomingAdapter, "write", full)
        assert "The adapter cannot be stored: No space left on device" in refused_message(s1, "a")
        monkeypatch.undo()
        assert 'capplan:adapter_transfers_total{outcome="failed"' not in metrics_of(s1)
        assert 'capplan:adapter_copy_checks_total{outcome="intact"} 0.0' in metrics_of(s0), "it is not blamed"
        fleet.check("s1")
        assert answer(s1, "a") == right["a"]


@pytest.mark.parametrize("limit_gib", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(limit_gib: float) -> None:
    with pytest.raises(InputError, match="max_stored_gib: must be a finite number > 0"):
        PoolSettings("fleet.db", max_stored_gib=limit_gib)
