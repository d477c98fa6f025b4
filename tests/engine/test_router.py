"""Router over fake instances: shares, failures, limits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capplan.server import ServerLimits
from capplan.spec import Totals
from tests.cli.examples import group
from tests.engine.fake_instances import QUICK, Routed, events, routed, tiny_plan


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Routed]:
    async with asyncio.timeout(60), routed(**settings) as router:
        yield router


async def test_requests_follow_the_shares_of_the_plan() -> None:
    async with running() as r:
        answers = await asyncio.gather(*(r.post("shared") for _ in range(200)))
        assert [status for status, _, _ in answers] == [200] * 200
        got = [body["instance"] for _, body, _ in answers]
        assert abs(got.count("g0-1") - 50) <= 1
        assert {(await r.post("a"))[1]["instance"] for _ in range(5)} == {"g0-1"}
        assert {(await r.post("b"))[1]["instance"] for _ in range(5)} == {"g1-1"}
        base = [(await r.post("base"))[1]["instance"] for _ in range(6)]
        assert base.count("g0-1") == 3
        text = await (await r.client.get("/metrics")).text()
        assert (
            f'capplan:router_requests_total{{group="g0",instance="g0-1"}} {got.count("g0-1") + 8}.0' in text
        )
        assert 'x{instance="g0-1",l="1"} 1.0\nx{instance="g1-1",l="1"} 1.0\n' in text
        assert text.count("# HELP x An x") == 1
        assert 'y{instance="g1-1"} 2.0' in text


async def test_concurrent_scrapes_share_the_metrics_of_instances() -> None:
    async with running() as r:

        async def scrape() -> str:
            return await (await r.client.get("/metrics")).text()

        texts = await asyncio.gather(*(scrape() for _ in range(8)))
        assert len(set(texts)) == 1
        assert 'y{instance="g1-1"} 2.0' in texts[0]
        assert r.launcher["g1-1"].scrapes == 1
        await scrape()
        assert r.launcher["g1-1"].scrapes == 2


async def test_a_single_group_gets_all_requests_of_its_adapters() -> None:
    async with running(groups=["g0"]) as r:
        assert {(await r.post("shared"))[1]["instance"] for _ in range(4)} == {"g0-1"}
        assert (await r.post("b"))[0] == 404


async def test_streams_are_forwarded_in_whole_events() -> None:
    async with running() as r:
        body = {"model": "a", "prompt": [1], "stream": True}
        async with r.client.post("/v1/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert await answer.content.readuntil(b"\n\n") == b'data: {"n": 1}\n\n'
            r.launcher["g0-1"].resume.set()
            assert events(await answer.content.read()) == [{"n": 2}, b"[DONE]"]


async def test_a_crash_ends_streams_with_an_error_event_and_other_requests_with_503() -> None:
    async with running() as r:
        doomed = r.launcher["g0-1"]
        body = {"model": "a", "prompt": [1], "stream": True}
        async with r.client.post("/v1/completions", json=body) as stream:
            plain = asyncio.ensure_future(r.post("a", hold=True))
            await r.until(lambda: doomed.busy == 2)
            await stream.content.readuntil(b"\n\n")
            r.launcher.may_start.clear()
            await doomed.crash()
            [last] = events(await stream.content.read())
            assert last["error"]["code"] == "instance_failed"
        status, body, headers = await plain
        assert (status, body["error"]["code"]) == (503, "instance_failed")
        assert int(headers["Retry-After"]) >= 1


async def test_requests_go_to_other_holders_while_an_instance_is_down() -> None:
    async with running() as r:
        r.launcher.may_start.clear()
        await r.launcher["g1-1"].crash()
        answers = [await r.post("shared") for _ in range(10)]
        assert {(status, body["instance"]) for status, body, _ in answers} == {(200, "g0-1")}
        status, body, headers = await r.post("b")
        assert (status, body["error"]["code"]) == (503, "no_instance")
        assert int(headers["Retry-After"]) >= 1
        assert (await r.client.get("/ping")).status == 200
        health = await r.client.get("/health")
        assert health.status == 503
        assert (await health.json())["instances"]["g1-1"]["state"] == "down"
        r.launcher.may_start.set()
        await r.until(lambda: r.state.fleet.instances[1].is_up)
        assert (await r.post("b"))[0] == 200
        assert (await (await r.client.get("/health")).json())["status"] == "ok"
        got = [(await r.post("shared"))[1]["instance"] for _ in range(40)]
        assert abs(got.count("g1-1") - 30) <= 1
        assert r.log == ["instance g1-1 has ended by SIGKILL", "instance g1-1 is back"]


async def test_requests_refused_by_a_failed_engine_go_to_other_holders() -> None:
    async with running() as r:
        r.launcher["g1-1"].refusal = "engine_failed"
        answers = [await r.post("shared") for _ in range(8)]
        assert {(status, body["instance"]) for status, body, _ in answers} == {(200, "g0-1")}
        status, body, headers = await r.post("b")
        assert (status, body["error"]["code"]) == (503, "no_instance")
        assert int(headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    "code", ["overloaded", "adapter_changed", "adapter_unavailable", "server_name_taken", "storage"]
)
async def test_requests_that_an_instance_cannot_start_now_go_to_other_holders(code: str) -> None:
    async with running(policy=replace(QUICK, ping_every_s=60.0)) as r:
        r.launcher["g1-1"].refusal = code
        answers = [await r.post("shared") for _ in range(4)]
        assert {(status, body["instance"]) for status, body, _ in answers} == {(200, "g0-1")}
        status, body, _ = await r.post("b")
        assert (status, body["error"]["code"]) == (503, code)
        sent = [each["model"] for each in r.launcher["g1-1"].bodies]
        assert r.state.retries == sent.count("shared") > 0, "there is no other instance for the other adapter"
        assert all(instance.is_up for instance in r.state.fleet.instances), "it serves other requests"


@pytest.mark.parametrize(
    "code", ["adapter_changed", "adapter_unavailable", "registry_unavailable", "server_name_taken", "storage"]
)
async def test_requests_of_an_adapter_that_no_holder_can_get_go_to_one_other_instance(
    code: str, tmp_path: Path
) -> None:
    """In a pool, in which it may be stored."""
    sizes = {"max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 256}
    groups = (
        group("g0", (("a", 8, 1.0, None),), replicas=3, **sizes),
        group("g1", (("b", 4, 1.0, None), ("large", 32, 1.0, None)), max_lora_rank=32, **sizes),
    )
    plan = tiny_plan().replace(groups=groups, totals=Totals(gpus=4, lower_bound_gpus=1))
    async with running(
        plan=plan, registry=str(tmp_path / "r.db"), policy=replace(QUICK, ping_every_s=60.0)
    ) as r:
        holder, others = r.launcher["g1-1"], [r.launcher[f"g0-{number}"] for number in (1, 2, 3)]
        holder.refusal = code
        for _ in range(3):
            status, body, _ = await r.post("b")
            assert status == 200
            assert body["instance"].startswith("g0")
        assert r.state.refused_by_holders == r.state.retries == len(holder.bodies) == 3
        status, body, _ = await r.post("large")
        assert (status, body["error"]["code"]) == (503, code), "it does not fit elsewhere"
        for each in others:
            each.refusal = code
            each.bodies.clear()
        status, body, _ = await r.post("b")
        assert (status, body["error"]["code"]) == (503, code)
        assert sum(len(each.bodies) for each in others) == 1
        holder.refusal = "overloaded"
        status, body, _ = await r.post("b")
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert sum(len(each.bodies) for each in others) == 1, "the load of holders is no other's"
        async with r.client.get("/metrics") as metrics:
            assert "capplan:router_refused_by_holders_total 4.0" in await metrics.text()


async def test_an_adapter_too_large_for_the_instances_that_are_up_waits_for_its_holder(
    tmp_path: Path,
) -> None:
    """In a pool, in which other instances fetch the adapters of one that is down."""
    sizes = {"max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 256}
    groups = (
        group("g0", (("a", 8, 1.0, None), ("large", 16, 1.0, None)), **sizes),
        group("g1", (("b", 4, 1.0, None),), max_lora_rank=8, **sizes),
    )
    async with running(plan=tiny_plan().replace(groups=groups), registry=str(tmp_path / "r.db")) as r:
        r.launcher.may_start.clear()
        await r.launcher["g0-1"].crash()
        await r.until(lambda: not r.state.fleet.instances[0].is_up)
        for model in ("a", "b"):
            status, body, _ = await r.post(model)
            assert (status, body["instance"]) == (200, "g1-1")
        status, body, headers = await r.post("large")
        assert (status, body["error"]["code"]) == (503, "no_instance")
        assert int(headers["Retry-After"]) >= 1
        async with r.client.get("/health") as health:
            assert (await health.json())["status"] == "unavailable", "as without a pool"
        r.launcher.may_start.set()
        await r.until(lambda: r.state.fleet.instances[0].is_up)
        assert (await r.post("large"))[0] == 200


async def test_an_instance_that_refuses_connections_is_restarted() -> None:
    async with running(policy=replace(QUICK, max_refused_probes=2)) as r:
        await r.launcher["g0-1"].stop_listening()
        await r.until(lambda: len(r.launcher.lives["g0-1"]) == 2)
        await r.until(lambda: r.state.fleet.instances[0].is_up)
        assert (await r.post("a"))[0] == 200


async def test_a_hanging_instance_is_killed_and_restarted() -> None:
    async with running(policy=replace(QUICK, probe_timeout_s=0.2)) as r:
        hung = r.launcher["g0-1"]
        waiting = asyncio.ensure_future(r.post("a", hold=True))
        await r.until(lambda: hung.busy == 1)
        hung.hung = True
        assert (await waiting)[0] == 503
        await r.until(lambda: len(r.launcher.lives["g0-1"]) == 2)
        assert hung.stopped_within_s == 0
        await r.until(lambda: r.state.fleet.instances[0].is_up)
        assert (await r.post("a"))[0] == 200


async def test_the_router_exits_when_all_restarts_are_used_up() -> None:
    async with running(policy=replace(QUICK, max_restarts=2)) as r:
        r.launcher.is_broken = True
        await r.launcher["g0-1"].crash()
        await r.until(lambda: r.state.fleet.instances[0].state == "failed")
        assert r.state.fleet.instances[0].restarts == 2
        assert (await r.post("shared"))[0] == 200
        assert (await r.post("a"))[0] == 503
        await r.launcher["g1-1"].crash()
        await r.until(r.serving.done)  # type: ignore[attr-defined]
        assert r.state.fleet.failed.is_set()


async def test_an_exception_of_the_supervisor_ends_the_router_and_is_raised() -> None:
    async def launch(*_: Any) -> Any:
        raise ZeroDivisionError

    async def ended() -> None:
        async with running() as r:
            r.launcher.launch = launch  # type: ignore[method-assign]
            await r.launcher["g0-1"].crash()
            await r.until(r.serving.done)  # type: ignore[attr-defined]

    with pytest.raises(ZeroDivisionError):
        await ended()


async def test_draining_finishes_running_requests_and_refuses_new_ones() -> None:
    async with running() as r:
        plain = asyncio.ensure_future(r.post("a", hold=True))
        await r.until(lambda: r.launcher["g0-1"].busy == 1)
        r.router.end()  # type: ignore[attr-defined]
        status, body, headers = await r.post("b")
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert headers["Retry-After"] == "1"
        for path in ("/health", "/ping"):
            state = await r.client.get(path)
            assert (state.status, (await state.json())["reason"]) == (503, "shutting_down")
        r.launcher["g0-1"].resume.set()
        assert (await plain)[0] == 200
        await r.serving  # type: ignore[attr-defined]
        assert r.launcher["g0-1"].stopped_within_s == QUICK.stop_grace_s


async def test_draining_ends_at_its_timeout() -> None:
    async with running(drain_timeout_s=0.05) as r:
        plain = asyncio.ensure_future(r.post("a", hold=True))
        await r.until(lambda: r.launcher["g0-1"].busy == 1)
        r.router.end()  # type: ignore[attr-defined]
        assert (await plain)[0] == 503
        await r.serving  # type: ignore[attr-defined]


async def test_a_disconnect_of_the_client_closes_the_request_at_the_instance() -> None:
    async with running() as r:
        instance = r.launcher["g0-1"]
        for fields in ({"hold": True}, {"stream": True}):
            leaving = asyncio.ensure_future(r.post("a", **fields))
            await r.until(lambda: instance.busy == 1)
            leaving.cancel()
            await r.until(lambda: r.state.in_flight == 0)
            instance.resume.set()
            await r.until(lambda: instance.busy == 0)
            instance.resume.clear()


async def test_refusals_have_the_format_of_openai_errors() -> None:
    async with running(api_key="secret", max_requests=3, limits=ServerLimits(max_body_bytes=200_000)) as r:
        status, body, headers = await r.post("a", refuse=True)
        assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "full", "7")
        status, body, _ = await r.post("unknown")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        for wrong in (b"{", b"[]", b'{"prompt": "x"}', b"[" * 100_000):
            async with r.client.post("/v1/completions", data=wrong) as answer:
                assert answer.status == 400
                assert "message" in (await answer.json())["error"]
        async with r.client.post("/v1/completions", data=b"x" * 300_000) as answer:
            assert answer.status == 413
        async with r.client.get("/v1/models", headers={"Authorization": "Bearer no"}) as answer:
            assert answer.status == 401
        cards = (await (await r.client.get("/v1/models")).json())["data"]
        assert [card["id"] for card in cards] == ["base", "a", "shared", "b"]
        assert (await (await r.client.get("/v1/models/b")).json())["root"] == "b"
        assert (await r.client.get("/v1/models/unknown")).status == 404
        held = [asyncio.ensure_future(r.post("a", hold=True)) for _ in range(3)]
        await r.until(lambda: r.state.in_flight == 3)
        status, body, _ = await r.post("a")
        assert (status, body["error"]["code"]) == (429, "queue_full")
        r.launcher["g0-1"].resume.set()
        assert [answer[0] for answer in await asyncio.gather(*held)] == [200] * 3
