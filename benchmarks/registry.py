"""Adapter registry: time of look-ups, and writers that are killed: `python -m benchmarks.registry`.

An SQLite file with 50,000 adapters. A warm look-up checks that no process has changed the registry, and
answers from memory; a cold one queries the file, as the first one of an adapter after a change. The median of
warm look-ups has a bar of 50 us.

Eight processes then write to another file: adapters in pairs, each pair one transaction, and holders of a few
shared adapters, which they hold and release at random. Every few milliseconds one is killed by SIGKILL and
replaced. Afterwards the file must be intact, each acknowledged pair there, no pair halved, and each shared
adapter with a holder.

``--url postgresql+psycopg://user:password@host/postgres`` does both in databases of their own on this server,
by the URL of a user who may create databases; warm look-ups have no bar then.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from benchmarks.common import command_line, records_table
from benchmarks.scratch_database import scratch_database
from capplan.registry import AdapterRegistry, RegisteredAdapter
from capplan.registry._database import Database

BAR_US: Final = 50.0
_WRITERS: Final = 8
_SHARED: Final = 4
_MAX_LIFE_S: Final = 0.05
_MAX_REMOTE_LIFE_S: Final = 0.3
"""Of writers that connect to a server first."""
_COLD: Final = 2_000
_LOCK_TIMEOUT_S: Final = 60.0


def entry(name: str) -> RegisteredAdapter:
    return RegisteredAdapter(
        name=name,
        base_model="org/model",
        rank=16,
        size_bytes=100,
        digest=f"{sum(name.encode()):064x}",
        location=f"s3://bucket/{name}",
    )


def look_ups(where: str, adapters: int, count: int, bar_us: float | None) -> list[dict[str, object]]:
    names = [f"adapter-{number}" for number in range(adapters)]
    rng = random.Random(0)
    with AdapterRegistry(where, create=True) as registry, AdapterRegistry(where) as other:
        begin_s = time.perf_counter()
        registry.add(*map(entry, names))
        add_s = time.perf_counter() - begin_s
        cold_us = _timed_us(registry, rng.sample(names, min(_COLD, adapters)))
        for name in names:
            registry.find(name)
        warm_us = _timed_us(registry, rng.choices(names, k=count))
        other.announce("server", "http://server")
        begin_s = time.perf_counter()
        found = registry.adapters()
        list_s = time.perf_counter() - begin_s
        assert len(found) == adapters
    return [
        {"operation": "add all, one transaction", "median": f"{add_s:.1f} s", "p99": "", "holds": ""},
        {"operation": "list all", "median": f"{list_s:.1f} s", "p99": "", "holds": ""},
        _row("look-up, cold", cold_us, None),
        _row("look-up, warm", warm_us, bar_us),
    ]


def _timed_us(registry: AdapterRegistry, names: Sequence[str]) -> list[float]:
    times_us = []
    for name in names:
        begin_ns = time.perf_counter_ns()
        adapter = registry.find(name)
        times_us.append(1e-3 * (time.perf_counter_ns() - begin_ns))
        assert adapter is not None
        assert adapter.name == name
    return times_us


def _row(operation: str, times_us: Sequence[float], bar_us: float | None) -> dict[str, object]:
    median_us, p99_us = np.percentile(times_us, (50, 99))
    holds = "" if bar_us is None else "yes" if median_us < bar_us else "NO"
    return {
        "operation": operation,
        "median": f"{median_us:.1f} us",
        "p99": f"{p99_us:.1f} us",
        "holds": holds,
    }


class Outcome(NamedTuple):
    """Result of writers that were killed; `faults` is empty if the registry is consistent."""

    kills: int
    commits: int
    acknowledged: int
    faults: list[str]


def killed_writers(where: str, log: Path, seconds: float, seed: int) -> Outcome:
    """Let processes write, kill them at random moments, and check the registry."""
    rng = random.Random(seed)
    kills = 0
    with AdapterRegistry(where, create=True) as registry:
        for writer in range(_WRITERS):
            registry.announce(f"s{writer}", f"http://s{writer}")
        for name in _shared():
            registry.add(entry(name))
            registry.hold(name, entry(name).digest or "", "s0")
    pids = [_fork(where, log, writer) for writer in range(_WRITERS)]
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(rng.uniform(0, _MAX_LIFE_S if "://" not in where else _MAX_REMOTE_LIFE_S))
        victim = rng.randrange(_WRITERS)
        _kill(pids[victim])
        pids[victim] = _fork(where, log, victim)
        kills += 1
    for pid in pids:
        _kill(pid)
    acknowledged = log.read_text(encoding="utf-8").split() if log.exists() else []
    return Outcome(kills, _commits(where), len(acknowledged), _faults(where, acknowledged))


def _shared() -> list[str]:
    return [f"shared-{number}" for number in range(_SHARED)]


def _fork(where: str, log: Path, writer: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _write(where, log, f"s{writer}")
        finally:
            os._exit(1)
    return pid


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "a writer ended by itself"


def _write(where: str, log: Path, server: str) -> None:
    rng = random.Random(os.getpid())
    acknowledged = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with AdapterRegistry(where, timeout_s=_LOCK_TIMEOUT_S) as registry:
        for number in range(1_000_000):
            pair = f"{server}-{os.getpid()}-{number}"
            registry.add(entry(f"{pair}.a"), entry(f"{pair}.b"))
            os.write(acknowledged, f"{pair}\n".encode())
            name = rng.choice(_shared())
            if rng.random() < 0.5:
                registry.hold(name, entry(name).digest or "", server)
            else:
                registry.release(name, server, keeper=f"s{rng.randrange(_WRITERS)}")


def _commits(where: str) -> int:
    database = Database(where, create=False, timeout_s=_LOCK_TIMEOUT_S)
    with contextlib.closing(database):
        return database.changes()[1]


def _file_faults(file: str) -> list[str]:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        checks = connection.execute("PRAGMA integrity_check").fetchall()
        found = [str(row) for row in checks if row != ("ok",)]
        return found + [str(row) for row in connection.execute("PRAGMA foreign_key_check")]


def _faults(where: str, acknowledged: Sequence[str]) -> list[str]:
    faults = [] if "://" in where else _file_faults(where)
    with AdapterRegistry(where) as registry:
        found = {adapter.name: adapter for adapter in registry.adapters()}
    halves = {half: {name[:-2] for name in found if name.endswith(half)} for half in (".a", ".b")}
    faults += [f"half a pair: {pair}" for pair in halves[".a"] ^ halves[".b"]]
    faults += [f"lost: {pair}" for pair in set(acknowledged) - halves[".a"]]
    faults += [f"no holder: {name}" for name in _shared() if not found[name].holders]
    return faults


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--adapters", type=int, default=50_000)
    parser.add_argument("--look-ups", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of writers that are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-writers", action="store_true")
    parser.add_argument("--url", help="of a database server; default: SQLite files")
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as databases:

        def place(name: str) -> str:
            if given.url is None:
                return str(Path(folder) / name)
            return databases.enter_context(scratch_database(given.url))

        outcome = killed_writers(place("killed.db"), Path(folder) / "log", given.seconds, given.seed)
        if not given.only_writers:
            bar_us = BAR_US if given.url is None else None
            rows = look_ups(place("adapters.db"), given.adapters, given.look_ups, bar_us)
    if rows:
        print(records_table(rows))
    print(
        f"\n{_WRITERS} writers, {given.seconds:g} s: {outcome.kills} kills, {outcome.commits} commits, "
        f"{outcome.acknowledged} acknowledged pairs, {len(outcome.faults)} faults"
    )
    for fault in outcome.faults[:10]:
        print(fault)
    return int(bool(outcome.faults) or any(row["holds"] == "NO" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
