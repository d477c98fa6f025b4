"""Workers and child commands end with their parent, whatever ends it; full garbage collections are rare."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from capplan.processes import PARENT, attached, collect_rarely, without_full_collections

pytestmark = pytest.mark.process

_POOL = """
from capplan.twin import _sweep as sweep
from tests.test_processes import sleep
sweep.is_compiled = lambda: True  # nothing is simulated here
list(sweep.in_parallel(sleep, range(2), workers=2, chunk=1))
"""

_COMMAND = """
import subprocess, sys
from capplan.processes import attached
program = "import time; from capplan.processes import end_with_parent; end_with_parent(); print(flush=True)"
program += "; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", program], env=attached(), stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def sleep(item: int) -> None:
    Path(os.environ["STARTED"], str(os.getpid())).touch()
    time.sleep(600)


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: object, seconds: float = 20.0) -> bool:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if holds():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_workers_of_a_pool_end_with_their_parent(tmp_path: Path, end: signal.Signals) -> None:
    environment = {**os.environ, "STARTED": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", _POOL], env=environment)
    try:
        assert until(lambda: len(list(tmp_path.iterdir())) == 2, 60.0)
        workers = [int(path.name) for path in tmp_path.iterdir()]
        assert all(map(is_running, workers))
    finally:
        parent.send_signal(end)
        parent.wait()
    assert until(lambda: not any(map(is_running, workers)))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_command_ends_with_the_process_that_started_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _COMMAND], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert until(lambda: not is_running(child))


def test_the_environment_names_this_process() -> None:
    assert attached({"A": "b"})[PARENT] == str(os.getpid())
    assert attached({"A": "b"})["A"] == "b"


class Node:
    """Object of a reference cycle, which only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def test_no_full_collection_starts_by_itself_until_the_end() -> None:
    before = gc.get_threshold()
    with without_full_collections():
        assert gc.get_freeze_count() > 0
        started = full_collections()
        kept = [[at] for at in range(400_000)]
        assert full_collections() == started
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    kept += [[at] for at in range(400_000)]
    assert full_collections() > started


def test_garbage_is_collected_now_and_then() -> None:
    async def old_garbage() -> None:
        node = Node()
        gc.collect(1)  # it is old then, and left to full collections
        found = weakref.ref(node)
        del node
        gc.collect(1)
        assert found() is not None
        task = asyncio.ensure_future(collect_rarely(every_s=0.01))
        while found() is not None:
            await asyncio.sleep(0.01)
        task.cancel()

    with without_full_collections():
        asyncio.run(asyncio.wait_for(old_garbage(), 20.0))
