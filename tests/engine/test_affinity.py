"""CPUs of the engine core: claims, lists, and clients beside it."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from capplan.engine import bound_to, core_cpus, other_cpus
from capplan.engine._affinity import allowed_cpus, parse_cpus
from capplan.engine._timing import WallClock
from capplan.engine.lora._loader import ThreadLoader
from capplan.errors import InputError
from capplan.profiling.load import Target
from capplan.profiling.load import _preflight as preflight
from capplan.profiling.load._preflight import beside_engine, engine_info

needs_two = pytest.mark.skipif(len(allowed_cpus()) < 2, reason="needs two CPUs")


@pytest.fixture(autouse=True)
def own_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Claims that other processes do not see."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@needs_two
def test_cores_claim_different_cpus_and_give_them_back() -> None:
    with contextlib.ExitStack() as stack:
        claimed = [stack.enter_context(core_cpus("auto", "cpu")) for _ in allowed_cpus()]
        assert claimed[-1] == ()  # one CPU is left for servers and clients
        assert sorted(cpu for each in claimed for cpu in each) == list(allowed_cpus()[1:])
    with core_cpus("auto", "cpu") as again:
        assert again == allowed_cpus()[-1:]


@pytest.mark.parametrize(("choice", "device"), [("none", "cpu"), ("auto", "cuda"), ("auto", "cuda:1")])
def test_some_cores_are_bound_to_no_cpu(choice: str, device: str) -> None:
    with core_cpus(choice, device) as cpus, bound_to(cpus):
        assert cpus == ()
        assert other_cpus(cpus) == allowed_cpus()


def test_a_core_with_as_many_threads_as_cpus_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(len(allowed_cpus())))
    with core_cpus("auto", "cpu") as cpus:
        assert cpus == ()


@pytest.mark.parametrize("text", ["", "all", "1-", "-1", "0,,1", "99999", "0-99999"])
def test_a_list_must_name_cpus_of_this_process(text: str) -> None:
    with pytest.raises(InputError, match="cpu_affinity: must"):
        parse_cpus(text)


@needs_two
def test_a_list_leaves_a_cpu_for_the_server() -> None:
    first, *rest = allowed_cpus()
    assert parse_cpus(",".join(map(str, rest))) == tuple(rest)
    with pytest.raises(InputError, match="must leave a CPU for the server"):
        parse_cpus(f"{first},{','.join(map(str, rest))}")


@needs_two
@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://192.0.2.1:1"])
def test_a_client_on_the_same_machine_keeps_off_the_cpus_of_the_core(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything, last = allowed_cpus(), allowed_cpus()[-1]
    line = f'capplan:engine_core_info{{cpus="{last}"}} 1.0'

    async def metrics(*_: object) -> str:
        return line

    async def inside() -> tuple[int, ...]:
        async with beside_engine(Target(url)):
            return allowed_cpus()

    monkeypatch.setattr(preflight, "fetch_metrics", metrics)
    assert engine_info(line).cpus == (last,)
    local = "127" in url
    assert asyncio.run(inside()) == (tuple(c for c in everything if c != last) if local else everything)
    assert allowed_cpus() == everything
    line = f'capplan:engine_core_info{{cpus="{",".join(map(str, everything))}"}} 1.0'
    assert asyncio.run(inside()) == everything  # no other is left


def test_cpus_of_a_server_that_reports_none() -> None:
    assert engine_info("").cpus == ()
    assert os.sched_getaffinity(0) == set(allowed_cpus())


@needs_two
def test_adapters_are_copied_on_the_cpus_beside_the_core() -> None:
    first, last = allowed_cpus()[0], allowed_cpus()[-1]
    where: list[set[int]] = []

    def load() -> str | None:
        where.append(os.sched_getaffinity(0))
        return None

    loader = ThreadLoader(WallClock())
    with bound_to([last]), contextlib.closing(loader):
        loader.bind([first])
        loader.start(1, load, report=False)
        assert loader.wait(1) is None
        assert where == [{first}]
        assert allowed_cpus() == (last,)
