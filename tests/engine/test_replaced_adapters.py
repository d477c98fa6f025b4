"""Adapters that are replaced in or removed from the registry while servers of a pool serve them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from capplan import InputError
from capplan.registry import read_adapter
from capplan.server import ServerLimits
from capplan.server._adapter_pool import PoolParams
from tests.engine.adapter_fleet import Fleet, answer, ask, refusal, share, until
from tests.engine.test_faults import tokens_of
from tests.spec.test_registry_restored import back_up, put_in_place

pytestmark = pytest.mark.process


def test_an_adapter_that_is_replaced_in_the_registry_is_replaced_at_its_servers(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    with fleet.server("s0") as s0:
        assert answer(s0, "a") == right["a"]
        fleet.registry.add(read_adapter("a", fleet.top / "source" / "b", "base"), replace=True)
        share(s0)
        assert answer(s0, "a") == right["b"]
        fleet.registry.remove("a")
        share(s0)
        assert refusal(s0, "a") == (404, "model_not_found")
        fleet.check("s0")


def test_an_adapter_with_steady_requests_is_replaced_and_removed_at_the_next_round(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    with fleet.server("s0", pool_params=PoolParams(0.2, 3600.0)) as s0, ThreadPoolExecutor(1) as threads:
        assert answer(s0, "a") == right["a"]
        running = threads.submit(ask, s0, "a", max_tokens=400, ignore_eos=True)
        until(lambda: s0.service.engine.in_flight > 0)
        fleet.registry.add(read_adapter("a", fleet.top / "source" / "b", "base"), replace=True)
        until(lambda: answer(s0, "a") == right["b"])
        former = tokens_of(running.result())
        assert (len(former), former[:12]) == (400, right["a"]), "a request ends with the bytes of its start"
        until(lambda: fleet.files("s0") == {str(fleet.registry.get("b").digest)})
        fleet.registry.remove("a")
        until(lambda: ask(s0, "a").status == 404)
        until(lambda: fleet.files("s0") == set())
        s0.check_idle()


def test_requests_wait_for_those_of_the_former_adapter_within_the_time_limit(
    fleet: Fleet, right: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_use(_: str) -> None:
        raise InputError("must not be in use")

    with fleet.server("s0", limits=ServerLimits(lora_timeout_s=1.0)) as s0:
        answer(s0, "a")
        former = fleet.registry.get("a")
        monkeypatch.setattr(s0.engine, "replace_adapter", lambda *_: False)
        monkeypatch.setattr(s0.engine, "remove_adapter", in_use)
        fleet.registry.add(read_adapter("a", fleet.top / "source" / "b", "base"), replace=True)
        share(s0)
        assert refusal(s0, "a") == (503, "adapter_changed")
        assert former.digest in fleet.files("s0")
        fleet.registry.add(former, replace=True)
        assert answer(s0, "a") == right["a"], "the engine still has it"
        fleet.registry.add(read_adapter("a", fleet.top / "source" / "b", "base"), replace=True)
        monkeypatch.undo()
        share(s0)
        assert answer(s0, "a") == right["b"]
        share(s0)
        fleet.check("s0")


def test_a_server_enters_itself_and_its_copies_in_a_registry_that_was_restored(
    fleet: Fleet, right: dict[str, list[int]]
) -> None:
    backup = fleet.top / "backup.db"
    back_up(fleet.file, backup)
    with fleet.server("s0", pool_params=PoolParams(0.2, 3600.0, renew_s=0.2)) as s0:
        assert answer(s0, "a") == right["a"]
        fleet.registry.remove("c")
        put_in_place(backup, fleet.file)
        until(lambda: fleet.holders("a") == ("s0",))
        assert fleet.registry.servers() == {"s0": s0.url}
        assert answer(s0, "c") == right["c"]
        fleet.check("s0")
