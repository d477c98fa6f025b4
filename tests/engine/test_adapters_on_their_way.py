"""Requests that wait for an adapter's transfer: what the server logs of it."""

import logging
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="transfers need aiohttp (extra `engine`)")

from tests.engine.test_adapter_pool import FAULTS, PEER, Fleet, answer, peer, refusal


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
        assert len(other.requests) == 3, "each request tries the server again"
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
