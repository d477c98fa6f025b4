"""A part of the hostile HTTP interactions of `tests.fuzz`; its command sends all of them."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from capplan.server import ServerLimits
from tests.engine.live import Live, live
from tests.engine.test_faults import complete, send
from tests.fuzz.interactions import CLOSED, Interaction, interactions

pytestmark = pytest.mark.process

LIMITS = ServerLimits(header_timeout_s=1.0, body_timeout_s=2.0, send_timeout_s=1.0)
REFUSALS = {400, 401, 403, 404, 405, 408, 413, 429, 431, 503}
FEW = 150  # connections


def some() -> list[Interaction]:
    """Return a third of the interactions that take few connections and little time."""
    few = [each for each in interactions() if each.connections <= FEW and each.hold_s <= 1.0]
    return [each for each in few if "104857600" not in each.name and "trickled" not in each.name][::3]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live({"a": 8}, limits=LIMITS) as running:
        yield running


def test_hostile_interactions_are_refused_and_leave_nothing(server: Live) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    chosen = some()
    assert len(chosen) > 60

    async def attack() -> Counter[int]:
        statuses: Counter[int] = Counter()
        for each in chosen:
            statuses.update(await each.run(host, int(port), 20.0))
        return statuses

    statuses = asyncio.run(attack())
    assert set(statuses) <= REFUSALS | {CLOSED, 200}
    assert sum(statuses[status] for status in REFUSALS) > 20
    begin_s = time.monotonic()
    assert send(server, "GET", "/health").status == 200
    assert complete(server).status == 200
    assert time.monotonic() - begin_s < 5
    server.check_idle()
    assert server.service.budget.used_bytes == 0


def test_the_schema_describes_the_bodies(server: Live) -> None:
    paths = json.loads(send(server, "GET", "/openapi.json").body)["paths"]
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "prompt", "max_tokens"} <= set(body["properties"])
