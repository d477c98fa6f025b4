"""Distributed adapter pool on real servers: adapters stay stored, requests are answered or refused."""

import contextlib
import json
import random
import re
import shutil
import socket
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from capplan.errors import InputError
from capplan.registry import RegisteredAdapter, read_adapter
from capplan.server import PoolSettings, ServerLimits
from capplan.server._adapter_pool import PoolParams
from capplan.server._state import transfer_key
from capplan.server._transfer import TransferParams
from tests.conftest import http_server, reply
from tests.engine.adapter_fleet import (
    NAMES,
    QUICK,
    SERVERS,
    Fleet,
    answer,
    ask,
    refusal,
    servers_of_last_copies,
    share,
)
from tests.engine.live import ADMIN_KEY, live
from tests.engine.test_faults import post, send, tokens_of
from tests.engine.test_generate import spoil_number

pytestmark = pytest.mark.process

PEER = "peer"


POOL_PARAMS = QUICK


def test_an_adapter_is_fetched_from_its_location_and_then_from_a_server(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    with fleet.server("s0") as s0, fleet.server("s1") as s1, fleet.server("s2") as s2:
        assert answer(s0, "a") == right["a"]
        assert fleet.holders("a") == ("s0",)
        fleet.lose_source("a")
        assert answer(s1, "a") == right["a"]
        assert fleet.holders("a") == ("s0", "s1")
        assert answer(s2, "b") == right["b"]
        fleet.check("s0", "s1", "s2")
        metrics = send(s1, "GET", "/metrics").body.decode()
        assert 'capplan:adapter_transfers_total{outcome="done",source="server"} 1.0' in metrics
        assert "capplan:adapters_stored 1.0" in metrics
        for server in (s0, s1, s2):
            server.check_idle()


def test_the_last_copy_stays(fleet: Fleet, right: dict[str, list[int]]) -> None:
    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        answer(s0, "a")
        fleet.lose_source("a")
        share(s0, a=0)
        assert fleet.holders("a") == ("s0",)
        answer(s1, "a")
        share(s0, a=0)
        share(s1, a=0)
        assert fleet.holders("a") == ("s1",)
        fleet.check("s0", "s1")
        assert answer(s0, "a") == answer(s1, "a") == right["a"]


def test_a_copy_is_removed_when_its_requests_have_ended(fleet: Fleet) -> None:
    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        answer(s0, "a")
        answer(s1, "a")
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(ask, s0, "a", max_tokens=400, ignore_eos=True)
            while not s0.service.engine.in_flight:
                time.sleep(0.001)
            share(s0, a=0)
            assert fleet.holders("a") == ("s0", "s1")
            assert len(tokens_of(running.result())) == 400
        share(s0, a=0)
        assert fleet.holders("a") == ("s1",)
        fleet.check("s0", "s1")


def test_an_adapter_in_recent_use_is_kept(fleet: Fleet) -> None:
    with fleet.server("s0", pool_params=PoolParams(round_s=3600.0)) as s0, fleet.server("s1") as s1:
        answer(s0, "a")
        answer(s1, "a")
        share(s0, a=0)
        assert fleet.holders("a") == ("s0", "s1")


@contextlib.contextmanager
def peer(fleet: Fleet, send_file: Callable[[BaseHTTPRequestHandler, bytes], None]) -> Iterator[list[str]]:
    """Let a server of a test be the holder of adapter a; yield the paths of its requests."""
    source = fleet.top / "peer-files"
    shutil.copytree(fleet.top / "source" / "a", source)
    paths: list[str] = []

    def respond(handler: BaseHTTPRequestHandler) -> None:
        paths.append(handler.path)
        key = transfer_key(ADMIN_KEY, handler.path.split("/")[3])
        assert handler.headers["Authorization"] == f"Bearer {key}"
        with contextlib.suppress(OSError):
            send_file(handler, (source / handler.path.rpartition("/")[2]).read_bytes())

    with http_server(respond) as url:
        fleet.registry.announce(PEER, url)
        fleet.registry.hold("a", fleet.registry.get("a").digest or "", PEER)
        yield paths


def stall(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    reply(handler, data[:100], len(data))
    time.sleep(2)


def trickle(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    reply(handler, b"", len(data))
    for byte in data[:100]:
        handler.wfile.write(bytes([byte]))
        time.sleep(0.05)


def redirect(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.send_response(302)
    handler.send_header("Location", f"http://127.0.0.1:{handler.server.server_port}/other")  # type: ignore[attr-defined]
    handler.end_headers()


FAULTS: dict[str, Callable[[BaseHTTPRequestHandler, bytes], None]] = {
    "wrong bytes": lambda handler, data: reply(handler, data[:-1] + bytes([data[-1] ^ 1])),
    "too many bytes": lambda handler, data: reply(handler, data * 1000),
    "too few bytes": lambda handler, data: reply(handler, data[:-1]),
    "cut off": lambda handler, data: reply(handler, data[:-1], len(data)),
    "no file": lambda handler, data: reply(handler, b"{}", status=404),
    "no HTTP": lambda handler, data: handler.wfile.write(b"\0" * 100),
    "stalled": stall,
    "trickling": trickle,
    "redirected": redirect,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_does_not_deliver_is_replaced_by_the_location(
    fault: str, fleet: Fleet, right: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ServerLimits(lora_timeout_s=2.0)
    with peer(fleet, FAULTS[fault]) as asked, fleet.server("s0", limits=limits) as s0:
        assert answer(s0, "a") == right["a"]
        assert asked
        assert all("/other" not in path for path in asked), "the key must not follow a redirect"
        assert fleet.holders("a") == (PEER, "s0")
        fleet.check("s0")


@pytest.mark.parametrize("fault", ["wrong bytes", "stalled", "no file"])
def test_without_a_source_a_request_is_refused_and_nothing_is_left(fault: str, fleet: Fleet) -> None:
    with peer(fleet, FAULTS[fault]), fleet.server("s0") as s0:
        fleet.lose_source("a")
        assert refusal(s0, "a") == (503, "adapter_unavailable")
        assert fleet.holders("a") == (PEER,)
        fleet.check("s0")
        s0.check_idle()


def test_a_server_that_is_gone_is_replaced_by_the_location(fleet: Fleet, right: dict[str, list[int]]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        fleet.registry.announce(PEER, f"http://127.0.0.1:{closed.getsockname()[1]}")
    fleet.registry.hold("a", fleet.registry.get("a").digest or "", PEER)
    with fleet.server("s0") as s0:
        assert answer(s0, "a") == right["a"]


@contextlib.contextmanager
def adapter_store(
    fleet: Fleet,
    send_file: Callable[[BaseHTTPRequestHandler, bytes], None] = lambda handler, data: reply(handler, data),
    location: str = "http://127.0.0.1:{port}/x/",
) -> Iterator[tuple[str, list[str]]]:
    """Let adapter a have a location at an HTTP server; yield its URL and the paths of its requests."""
    files = {file.name: file.read_bytes() for file in (fleet.top / "source" / "a").iterdir()}
    paths: list[str] = []

    def respond(handler: BaseHTTPRequestHandler) -> None:
        paths.append(handler.path)
        assert "Authorization" not in handler.headers, "the key is for servers of the fleet"
        with contextlib.suppress(OSError):
            send_file(handler, files[handler.path.rpartition("/")[2]])

    with http_server(respond) as url:
        known = fleet.registry.get("a").replace(location=location.format(port=url.rpartition(":")[2]))
        fleet.registry.add(known, replace=True)
        yield url, paths


def test_a_location_may_be_a_url_of_an_allowed_host(fleet: Fleet, right: dict[str, list[int]]) -> None:
    with adapter_store(fleet) as (url, _), fleet.server("s0", pool={"allow_location": [url]}) as s0:
        assert answer(s0, "a") == right["a"]


@pytest.mark.parametrize(
    ("location", "allowed", "reason"),
    [
        ("http://127.0.0.1:{port}/x", (), "--allow-location does not name http://127.0.0.1:"),
        ("http://127.0.0.1:{port}/x", ("http://127.0.0.1:1",), "--allow-location does not name"),
        ("http://127.0.0.1:{port}/x", ("https://127.0.0.1:{port}",), "--allow-location does not name"),
        ("http://127.1:{port}/x", ("http://127.0.0.1:{port}",), "--allow-location does not name"),
        ("http://2130706433:{port}/x", ("http://127.0.0.1:{port}",), "--allow-location does not name"),
        ("http://0.0.0.0:{port}/x", ("http://127.0.0.1:{port}",), "--allow-location does not name"),
        ("http://[::ffff:127.0.0.1]:{port}/x", ("http://127.0.0.1:{port}",), "does not name http://[::ffff:"),
        ("http://allowed.test@127.0.0.1:{port}/x", ("http://allowed.test",), None),
        ("http://allowed.test:{port}/x", ("http://allowed.test:{port}",), "no address that is allowed"),
        ("http://link.test:{port}/x", ("http://link.test:{port}",), "no address that is allowed"),
        ("http://mapped.test:{port}/x", ("http://mapped.test:{port}",), "no address that is allowed"),
        ("http://none.test:{port}/x", ("http://none.test:{port}",), "no address that is allowed"),
        ("ftp://127.0.0.1:{port}/x", ("http://127.0.0.1:{port}",), "neither a folder nor an http(s) URL"),
        ("HTTP://127.0.0.1:{port}/x", (), "neither a folder nor an http(s) URL"),
        ("ws://127.0.0.1:{port}/x", ("http://127.0.0.1:{port}",), "neither a folder nor an http(s) URL"),
    ],
)
def test_locations_reach_no_address_that_the_operator_has_not_allowed(
    location: str,
    allowed: tuple[str, ...],
    reason: str | None,
    fleet: Fleet,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Names of hosts that are allowed may be given other addresses by who answers for them."""
    hosts = {
        "allowed.test": "127.0.0.1",
        "link.test": "169.254.169.254",
        "mapped.test": "::ffff:127.0.0.1",
        "none.test": "0.0.0.0",
    }

    async def resolve(_: Any, name: str, port: int, family: Any) -> list[dict[str, Any]]:
        address = hosts[name]
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        known = {"hostname": name, "host": address, "port": port, "family": kind}
        return [{**known, "proto": 0, "flags": socket.AI_NUMERICHOST}]

    monkeypatch.setattr("aiohttp.ThreadedResolver.resolve", resolve)
    if reason is None:
        with (
            pytest.raises(InputError, match="must not hold a user or password"),
            adapter_store(fleet, location=location),
        ):
            pass
        return
    with adapter_store(fleet, location=location) as (url, paths):
        hosts_allowed = [each.format(port=url.rpartition(":")[2]) for each in allowed]
        with fleet.server("s0", pool={"allow_location": hosts_allowed}) as s0:
            assert refusal(s0, "a") == (503, "adapter_unavailable")
            assert paths == []
            assert reason in caplog.text
            fleet.check("s0")


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254", "http://[::]:80", "http://[::ffff:169.254.0.1]:80"]
)
def test_servers_are_not_asked_at_addresses_that_no_server_has(
    url: str, fleet: Fleet, right: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    fleet.registry.announce(PEER, url)
    fleet.registry.hold("a", fleet.registry.get("a").digest or "", PEER)
    with fleet.server("s0") as s0:
        assert answer(s0, "a") == right["a"]
        assert "servers have no address such as" in caplog.text


def endless(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 2**16)


def many_headers(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    handler.send_response(200)
    while True:
        handler.wfile.write(b"X: " + b"y" * 1000 + b"\r\n")


COMPRESSED = zlib.compress(b" " * 2**20)
LIES: dict[str, tuple[Callable[[BaseHTTPRequestHandler, bytes], None], str]] = {
    "redirected": (FAULTS["redirected"], "status 302: redirects are not followed"),
    "stalled": (stall, "no bytes for 0.3 s"),
    "trickling": (trickle, ""),
    "endless": (endless, "must not be larger than the registry says"),
    "endless headers": (many_headers, ""),
    "too long": (lambda handler, data: reply(handler, data, 2**62), "not completed"),
    # By whether the bytes past the length arrive with the ten before it: a broken answer, or ten good bytes.
    "too short": (lambda handler, data: reply(handler, data, 10), "connection failed|must have the digest"),
    "negative": (lambda handler, data: reply(handler, data, -1), ""),
    "cut off": (FAULTS["cut off"], ""),
    "too many bytes": (FAULTS["too many bytes"], ""),
    "no HTTP": (FAULTS["no HTTP"], ""),
    "compressed": (lambda handler, data: reply(handler, COMPRESSED), "must have the digest"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_location_that_does_not_deliver_ends_with_a_reason(
    lie: str, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    send_file, reason = LIES[lie]
    limits = ServerLimits(lora_timeout_s=3.0)
    connecting = PoolParams(3600.0, 0.0, 0.2, TransferParams(2.0, 0.3, 4))  # also on a busy machine
    with (
        adapter_store(fleet, send_file) as (url, paths),
        fleet.server("s0", limits=limits, pool={"allow_location": [url]}, pool_params=connecting) as s0,
    ):
        begin_s = time.monotonic()
        assert refusal(s0, "a")[0] == 503
        assert time.monotonic() - begin_s < 20
        assert paths
        assert all(path.startswith("/x/") for path in paths)
        assert re.search(reason, caplog.text)
        assert all("\n" not in record.getMessage() for record in caplog.records)
        fleet.check("s0")
        s0.check_idle()


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h/x", "http://u@h", "http://0.0.0.0", "h", ""])
def test_hosts_of_locations_are_urls_of_hosts(url: str) -> None:
    with pytest.raises(InputError, match="allow_location: must be an http"):
        PoolSettings("x.db", allow_location=(url,))


def test_requests_of_an_adapter_share_one_transfer(fleet: Fleet, right: dict[str, list[int]]) -> None:
    def slow(handler: BaseHTTPRequestHandler, data: bytes) -> None:
        time.sleep(0.1)
        reply(handler, data)

    with peer(fleet, slow) as asked, fleet.server("s0") as s0, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: answer(s0, "a"), range(8)))
        assert answers == [right["a"]] * 8
        assert len(asked) == 2


def test_a_client_that_leaves_does_not_end_the_transfer(fleet: Fleet) -> None:
    def slow(handler: BaseHTTPRequestHandler, data: bytes) -> None:
        time.sleep(0.15)
        reply(handler, data)

    with peer(fleet, slow) as asked, fleet.server("s0") as s0:
        body = json.dumps({"model": "a", "prompt": [1], "max_tokens": 1}).encode()
        with socket.create_connection(("127.0.0.1", int(s0.url.rpartition(":")[2]))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            while not asked:
                time.sleep(0.005)
        until_s = time.monotonic() + 10
        while "s0" not in fleet.holders("a") and time.monotonic() < until_s:
            time.sleep(0.01)
        assert fleet.holders("a") == (PEER, "s0")
        s0.check_idle()


def test_more_adapters_than_the_engine_has_room_for_take_turns(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    with fleet.server("s0", max_adapters=2) as s0:
        for name in (*NAMES, *NAMES):
            assert answer(s0, name) == right[name]
        assert len(s0.engine.adapters) == 2
        fleet.check("s0")


def test_requests_under_contention_for_room_are_answered_or_refused_with_a_reason(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    with fleet.server("s0", max_adapters=2) as s0, ThreadPoolExecutor(12) as threads:
        asked = [NAMES[number % 3] for number in range(48)]
        answers = list(threads.map(lambda name: ask(s0, name), asked))
        for name, found in zip(asked, answers, strict=True):
            if found.status == 503:
                assert found.error["code"] == "overloaded"
            else:
                assert tokens_of(found) == right[name]
        assert any(found.status == 200 for found in answers)
        s0.check_idle()
        fleet.check("s0")


def test_an_adapter_that_is_broken_or_does_not_fit_is_refused(fleet: Fleet) -> None:
    spoilt = fleet.top / "source" / "c"
    spoil_number(spoilt)
    fleet.registry.add(read_adapter("c", spoilt, "base"), replace=True)
    fleet.registry.add(fleet.registry.get("a").replace(name="other", base_model="org/other"))
    reference = {"base_model": "base", "rank": 8, "location": "s3://bucket/r"}
    fleet.registry.add(RegisteredAdapter(name="unhashed", **reference))
    fleet.registry.add(RegisteredAdapter(name="elsewhere", digest="0" * 64, **reference))
    with fleet.server("s0") as s0:
        for _ in range(2):
            assert refusal(s0, "c") == (400, "unusable_adapter")
            assert ask(s0, "c").error["message"].startswith("c: "), "not its digest"
        counted = 'capplan:adapter_transfers_total{outcome="unusable",source="location"} 1.0'
        assert counted in send(s0, "GET", "/metrics").body.decode(), "what does not fit is fetched once"
        assert refusal(s0, "other") == (400, "other_base_model")
        assert refusal(s0, "unhashed") == (503, "no_digest")
        assert refusal(s0, "elsewhere") == (503, "adapter_unavailable")
        assert refusal(s0, "unknown") == (404, "model_not_found")
        fleet.check("s0")


def test_a_registry_that_is_locked_or_gone_refuses_new_adapters_only(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    with fleet.server("s0") as s0:
        answer(s0, "a")
        with contextlib.closing(sqlite3.connect(fleet.file)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert refusal(s0, "b") == (503, "registry_unavailable")
            assert answer(s0, "a") == right["a"]
        assert answer(s0, "b") == right["b"]
        fleet.check("s0")
        fleet.file.rename(fleet.top / "elsewhere.db")
        assert refusal(s0, "c") == (503, "registry_unavailable")
        message = ask(s0, "c").error["message"]
        assert str(fleet.top) not in message
        assert answer(s0, "a") == right["a"]


def test_files_go_to_holders_of_the_admin_key_only(fleet: Fleet) -> None:
    with fleet.server("s0", api_key="client") as s0:
        digest = fleet.registry.get("a").digest
        client = {"Authorization": "Bearer client"}
        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        body = json.dumps({"model": "a", "prompt": [1], "max_tokens": 1}).encode()
        assert send(s0, "POST", "/v1/completions", body, **client).status == 200
        path = f"/v1/adapter_files/{digest}/adapter_config.json"
        assert send(s0, "GET", path, **admin).status == 200
        own, foreign = (
            {"Authorization": f"Bearer {transfer_key(ADMIN_KEY, each)}"} for each in (str(digest), "0" * 64)
        )
        assert send(s0, "GET", path, **own).status == 200
        assert send(s0, "POST", "/v1/adapter_shares", b'{"shares": {}}', **own).status == 401
        for headers in ({}, client, foreign, {"Authorization": f"Bearer {ADMIN_KEY}x"}):
            assert send(s0, "GET", path, **headers).status == 401
            assert send(s0, "POST", "/v1/adapter_shares", b'{"shares": {}}', **headers).status == 401
        (fleet.root("s0") / ("1" * 64)).mkdir()
        for other in (
            f"{digest}/other.json",
            f"{digest}/..%2F..%2Fregistry.db",
            f"{'1' * 64}/adapter_config.json",
            "..%2Fsource%2Fa/adapter_config.json",
            f"{'0' * 64}/adapter_config.json",
        ):
            assert send(s0, "GET", f"/v1/adapter_files/{other}", **admin).status == 404
        for shares in ({"a": -1}, {"a": 2}, {"": 1}, {"a": None}, [], {"a" * 300: 1}):
            wrong = json.dumps({"shares": shares}).encode()
            assert send(s0, "POST", "/v1/adapter_shares", wrong, **admin).status == 400
    with live({"a": 8}, admin_api_key=ADMIN_KEY) as alone:
        assert send(alone, "GET", path, **admin).error["code"] == "no_registry"


def test_a_stored_file_swapped_for_a_link_is_not_sent(fleet: Fleet) -> None:
    with fleet.server("s0") as s0:
        answer(s0, "a")
        digest = fleet.registry.get("a").digest
        file = fleet.root("s0") / str(digest) / "adapter_config.json"
        file.unlink()
        file.symlink_to(fleet.file)
        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        assert send(s0, "GET", f"/v1/adapter_files/{digest}/{file.name}", **admin).status == 404


def test_a_restart_in_the_middle_is_repaired(fleet: Fleet, right: dict[str, list[int]]) -> None:
    """A transfer cut off, a copy that was not recorded, a record without a copy, and a removal cut off."""
    root = fleet.root("s0")
    digests = {name: str(fleet.registry.get(name).digest) for name in NAMES}
    with fleet.server("s0") as s0:
        for name in NAMES:
            answer(s0, name)
    fleet.registry.lose("a", "s0")
    shutil.rmtree(root / digests["b"])
    hidden = root / f".{digests['b']}.{'0' * 16}.tmp"
    hidden.mkdir()
    (hidden / "adapter_config.json").write_text("{")
    (root / ("9" * 64)).mkdir()
    (root / "of-the-operator").mkdir()
    with fleet.server("s0") as s0:
        assert (fleet.holders("a"), fleet.holders("b"), fleet.holders("c")) == (("s0",), (), ("s0",))
        assert (root / "of-the-operator").is_dir()
        (root / "of-the-operator").rmdir()
        fleet.check("s0")
        assert {name: answer(s0, name) for name in NAMES} == right


def test_a_server_that_stops_during_a_transfer_leaves_no_copy(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    with peer(fleet, stall) as asked, ThreadPoolExecutor(1) as threads:
        slow = PoolParams(transfers=TransferParams(stall_timeout_s=30.0))
        with fleet.server("s0", pool_params=slow, drain_timeout_s=0.1) as s0:
            asked = threads.submit(ask, s0, "a")
            while not asked:
                time.sleep(0.005)
            for _ in range(2):  # the second time, at once
                s0.on_loop(s0.server.end)
            s0.join()
            with contextlib.suppress(OSError):
                assert asked.result().status == 503
        assert fleet.holders("a") == (PEER,)
        with fleet.server("s0") as s0:
            fleet.check("s0")
            assert answer(s0, "a") == right["a"]


@pytest.mark.parametrize("seed", range(2))
def test_random_schedules_lose_no_adapter(seed: int, fleet: Fleet, right: dict[str, list[int]]) -> None:
    """Requests, shares and restarts, when the servers have the only copies."""
    rng = random.Random(seed)
    with servers_of_last_copies(fleet, right, rng) as (running, stack):
        for _ in range(20):
            server, adapter = rng.choice(SERVERS), rng.choice(NAMES)
            match rng.choice(("ask", "ask", "zero", "zero", "share", "restart")):
                case "ask":
                    assert answer(running[server], adapter) == right[adapter]
                case "restart":
                    running[server].close()
                    running[server] = stack.enter_context(fleet.server(server))
                case change:
                    share(running[server], **{adapter: float(change == "share")})
            assert all(fleet.holders(each) for each in NAMES)
        fleet.check(*SERVERS)


def test_two_adapters_with_the_same_bytes_share_a_copy(fleet: Fleet, right: dict[str, list[int]]) -> None:
    fleet.registry.add(fleet.registry.get("a").replace(name="twin"))
    with fleet.server("s0") as s0, fleet.server("s1") as s1:
        for server in (s0, s1):
            assert answer(server, "a") == answer(server, "twin") == right["a"]
        share(s0, a=0)
        assert (fleet.holders("a"), fleet.holders("twin")) == (("s1",), ("s0", "s1"))
        fleet.check("s0", "s1")
        share(s0, twin=0)
        assert fleet.files("s0") == set()
        assert answer(s0, "twin") == right["a"]


def test_a_full_disk_is_a_refusal(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with fleet.server("s0") as s0:
        monkeypatch.setattr("capplan.engine.lora._store.sync", full)
        assert refusal(s0, "a") == (503, "storage")
        monkeypatch.undo()
        fleet.check("s0")
        assert post(s0, "/v1/completions", model="a", prompt=[1], max_tokens=1).status == 200


def test_servers_fetch_from_the_host_that_another_one_announces(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    with fleet.server("s0", pool={"announce_host": "localhost"}) as s0, fleet.server("s1") as s1:
        port = s0.url.rpartition(":")[2]
        assert fleet.registry.servers() == {"s0": f"http://localhost:{port}", "s1": s1.url}
        assert answer(s0, "a") == right["a"]
        fleet.lose_source("a")
        assert answer(s1, "a") == right["a"]
        assert fleet.holders("a") == ("s0", "s1")
