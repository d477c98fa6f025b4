"""Registry with adapters, and real servers that share them, for tests of the distributed pool."""

import contextlib
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from capplan.registry import AdapterRegistry, read_adapter
from capplan.server import PoolSettings
from capplan.server._adapter_pool import OWNER_FILE, PoolParams
from capplan.server._transfer import TransferParams
from tests.engine.live import ADMIN_KEY, TINY, Live, live
from tests.engine.test_faults import Answer, complete, send, tokens_of
from tests.engine.test_generate import write_adapter

QUICK = PoolParams(3600.0, 0.0, 0.2, TransferParams(1.0, 1.0, 4))
PATIENT = PoolParams(3600.0, 0.0)
"""For tests in which no source stalls: a busy machine ends no transfer."""
NAMES = ("a", "b", "c")
SERVERS = ("s0", "s1", "s2")


class Fleet:
    """A registry with adapters by folder, and servers that share it."""

    def __init__(self, top: Path, names: tuple[str, ...] = NAMES, params: PoolParams = QUICK) -> None:
        self.params = params
        self.top = top
        self.file = top / "registry.db"
        self.registry = AdapterRegistry(self.file, create=True, timeout_s=0.2)
        for scale, name in enumerate(names, start=1):
            folder = top / "source" / name
            folder.parent.mkdir(exist_ok=True)
            write_adapter(folder, SimpleNamespace(config=TINY), scale=float(scale))  # type: ignore[arg-type]
            self.registry.add(read_adapter(name, folder, "base"))

    def root(self, name: str) -> Path:
        return self.top / name

    @contextlib.contextmanager
    def server(self, name: str, **changes: Any) -> Iterator[Live]:
        """Serve the registry's adapters; none is there at the start."""
        self.root(name).mkdir(exist_ok=True)
        pool = PoolSettings(str(self.file), server_name=name, **changes.pop("pool", {}))
        engine = {"max_adapters": changes.pop("max_adapters", 8), "max_loras": 2}
        changes = {"lora_root": self.root(name), "pool": pool, "pool_params": self.params} | changes
        with live({}, engine, **changes) as running:
            yield running

    def lose_source(self, name: str) -> None:
        shutil.rmtree(self.top / "source" / name)

    def files(self, server: str) -> set[str]:
        """Return the names in the folder of a server, except the file that it has from its start."""
        return {path.name for path in self.root(server).iterdir()} - {OWNER_FILE}

    def copy(self, server: str, name: str) -> Path:
        """Return the folder of a copy."""
        return self.root(server) / str(self.registry.get(name).digest)

    def holders(self, name: str) -> tuple[str, ...]:
        return self.registry.get(name).holders

    def check(self, *servers: str) -> None:
        """Check that registry and files agree, and that nothing half-written is left."""
        for server in servers:
            held = {adapter.digest for adapter in self.registry.adapters(server=server)}
            assert self.files(server) == held
            for adapter in self.registry.adapters(server=server):
                stored = read_adapter(adapter.name, self.root(server) / str(adapter.digest), "base")
                assert (stored.digest, stored.size_bytes) == (adapter.digest, adapter.size_bytes)


def right_answers(top: Path) -> dict[str, list[int]]:
    """Return the answers of a server that has all adapters from the start."""
    fleet = Fleet(top)
    with live({name: fleet.top / "source" / name for name in NAMES}) as server:
        answers = {name: answer(server, name) for name in NAMES}
    fleet.registry.close()
    assert len({tuple(tokens) for tokens in answers.values()}) == len(NAMES)
    return answers


@contextlib.contextmanager
def servers_of_last_copies(
    fleet: Fleet, right: Mapping[str, list[int]], rng: random.Random
) -> Iterator[tuple[dict[str, Live], contextlib.ExitStack]]:
    """Yield three servers, which have the only copies, and the stack that ends those that a test restarts."""
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(fleet.server(name)) for name in SERVERS}
        for name in NAMES:
            assert answer(running[rng.choice(SERVERS)], name) == right[name]
            fleet.lose_source(name)
        yield running, stack


def ask(server: Live, name: str, **fields: Any) -> Answer:
    return complete(server, **({"model": name, "max_tokens": 12, "return_token_ids": True} | fields))


def answer(server: Live, name: str) -> list[int]:
    return tokens_of(ask(server, name))


def refusal(server: Live, name: str) -> tuple[int, str]:
    refused = ask(server, name)
    return refused.status, refused.error["code"]


def share(server: Live, **shares: float) -> None:
    """Set shares, and remove copies."""
    set_shares(server, **shares)
    pool = server.service.pool
    assert pool is not None
    server.run(pool.remove_copies())


def set_shares(server: Live, **shares: float) -> None:
    """Set shares."""
    body = json.dumps({"shares": shares}).encode()
    set_ = send(server, "POST", "/v1/adapter_shares", body, Authorization=f"Bearer {ADMIN_KEY}")
    assert set_.status == 200, set_.body


def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for a condition."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, "the condition does not come true"
        time.sleep(0.005)
