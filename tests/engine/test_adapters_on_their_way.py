"""Requests that wait for an adapter's transfer: what the server logs of it, and reports to routers."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from capplan.engine.lora import AdapterStore
from capplan.server._adapter_pool import PoolParams
from capplan.server._transfer import TransferParams
from capplan.spec import BYTES_PER_TOKEN
from tests.engine.adapter_fleet import PATIENT
from tests.engine.test_adapter_pool import FAULTS, PEER, Fleet, answer, ask, peer, refusal, reply
from tests.engine.test_faults import send
from tests.test_processes import until


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.registry.close()


def test_why_an_adapter_is_not_delivered_is_logged_once_until_it_changes(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str]:
        lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        caplog.clear()
        return [line for line in lines if line.startswith("adapter a ")]

    fault, elsewhere = "no file", fleet.top / "elsewhere"

    def fail(handler: BaseHTTPRequestHandler, data: bytes) -> None:
        FAULTS[fault](handler, data)

    with peer(fleet, fail) as other, fleet.server("s0") as s0:
        (fleet.top / "source" / "a").rename(elsewhere)
        for _ in range(3):
            assert refusal(s0, "a") == (503, "adapter_unavailable")
        assert len(other) == 3, "each request tries the server again"
        [line] = logged()
        assert all(part in line for part in (f"server {PEER}: status 404", "its location: "))

        fault = "too few bytes"
        for _ in range(2):
            refusal(s0, "a")
        [line] = logged()
        assert "status 404" not in line

        elsewhere.rename(fleet.top / "source" / "a")
        answer(s0, "a")
        [line] = logged()
        assert PEER in line
        assert "location" not in line, "the location has delivered it"
        answer(s0, "a")
        assert logged() == []


def test_a_delivery_after_a_failed_one_is_not_logged(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = fleet.top / "elsewhere"
    with fleet.server("s0") as s0:
        (fleet.top / "source" / "a").rename(elsewhere)
        assert refusal(s0, "a") == (503, "adapter_unavailable")
        elsewhere.rename(fleet.top / "source" / "a")
        caplog.clear()
        answer(s0, "a")
        assert [each for each in caplog.messages if "not delivered" in each] == []


def test_a_request_that_waits_for_its_adapter_is_in_the_state_of_the_server(fleet: Fleet) -> None:
    may_send = threading.Event()

    def hold(handler: BaseHTTPRequestHandler, data: bytes) -> None:
        may_send.wait(10.0)
        reply(handler, data)

    def awaiting() -> dict[str, list[int]]:
        return dict(json.loads(send(s0, "GET", "/state").body)["awaiting"])

    patient = PoolParams(3600.0, 0.0, 0.2, TransferParams(5.0, 5.0, 4))
    prompt = "x" * 100
    with (
        peer(fleet, hold) as other,
        fleet.server("s0", pool_params=patient) as s0,
        ThreadPoolExecutor(3) as threads,
    ):
        fleet.lose_source("a")
        assert awaiting() == {}
        answers = [threads.submit(ask, s0, "a", prompt=prompt) for _ in range(3)]
        assert until(lambda: other and awaiting().get("a", [0])[0] == 3)
        [(name, (requests, tokens))] = awaiting().items()
        assert (name, requests) == ("a", 3)
        assert len(prompt) // BYTES_PER_TOKEN <= tokens / 3 <= 2 * len(prompt)
        may_send.set()
        assert [each.result().status for each in answers] == [200] * 3
        assert awaiting() == {}


def test_a_restarted_server_loads_many_stored_adapters_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files are compared with the digests first; what exceeds the threads for it waits."""
    names, is_intact = tuple(f"n{number}" for number in range(14)), AdapterStore.is_intact
    fleet = Fleet(tmp_path, names, PATIENT)

    def slow(self: AdapterStore, digest: str) -> bool:
        time.sleep(0.2)
        return is_intact(self, digest)

    with fleet.server("s0", max_adapters=16) as s0:
        before = [answer(s0, name) for name in names]
    monkeypatch.setattr(AdapterStore, "is_intact", slow)
    with fleet.server("s0", max_adapters=16) as s0, ThreadPoolExecutor(len(names)) as threads:
        assert list(threads.map(lambda name: answer(s0, name), names)) == before
    fleet.registry.close()
