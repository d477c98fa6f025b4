"""PostgreSQL for tests and benchmarks: a server, and databases, made for a run and removed at its end."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from capplan.processes import end_by_kernel_with

_UNPRIVILEGED: Final = ("postgres", "nobody")
_STARTS: Final = 5
_START_S: Final = 30.0


def postgresql_programs() -> Path | None:
    """Return the folder of the newest PostgreSQL of Debian's packages; None if there is none."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("[0-9]*/bin/postgres")]
    return max(found, key=lambda path: int(path.parent.name), default=None)


@contextlib.contextmanager
def postgresql_server() -> Iterator[str]:
    """Start a PostgreSQL server on loopback; yield the URL of a user who may create databases.

    It ends with this process, however that ends. PostgreSQL does not run as root, but as another user then.
    """
    programs = postgresql_programs()
    assert programs is not None
    user = _user()
    with tempfile.TemporaryDirectory(prefix="capplan-postgresql-") as folder:
        if user is not None:
            shutil.chown(folder, user)
        password, data = secrets.token_hex(8), f"{folder}/data"
        (Path(folder) / "password").write_text(password, encoding="utf-8")
        words = (f"--pwfile={folder}/password", "--username=capplan", "--encoding=UTF8", "--no-sync")
        command = [programs / "initdb", f"--pgdata={data}", "--auth=scram-sha-256", "--locale=C", *words]
        subprocess.run(command, user=user, cwd=folder, check=True, capture_output=True)
        with _running(programs, folder, user, password) as url:
            yield url


def _user() -> str | None:
    """Return the user that a server of this process runs as; None: that of the process."""
    if os.geteuid():
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in _UNPRIVILEGED if name in names)


@contextlib.contextmanager
def _running(programs: Path, folder: str, user: str | None, password: str) -> Iterator[str]:
    parent = os.getpid()
    settings = ("fsync=off", "listen_addresses=127.0.0.1", f"unix_socket_directories={folder}")
    for _ in range(_STARTS):  # another process may take the port
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [str(programs / "postgres"), "-D", f"{folder}/data", "-p", str(port)]
        for setting in settings:
            command += ["-c", setting]
        server = subprocess.Popen(
            command,
            user=user,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: end_by_kernel_with(parent),
        )
        url = f"postgresql+psycopg://capplan:{password}@127.0.0.1:{port}/postgres"
        try:
            if _accepts(server, url):
                yield url
                return
        finally:
            server.send_signal(signal.SIGINT)  # ends all connections
            server.wait()


def _accepts(server: subprocess.Popen[bytes], url: str) -> bool:
    until_s = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < until_s:
        with contextlib.suppress(sa.exc.OperationalError):
            run_command(url, "SELECT 1")
            return True
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def scratch_database(url: str) -> Iterator[str]:
    """Make a database on the server of a URL, whose own database is not touched; yield its URL."""
    name = f"capplan_{secrets.token_hex(6)}"
    run_command(url, f"CREATE DATABASE {name}")
    try:
        yield sa.make_url(url).set(database=name).render_as_string(hide_password=False)
    finally:
        disconnect_all(url, name)
        run_command(url, f"DROP DATABASE {name}")


def disconnect_all(url: str, name: str) -> int:
    """End all connections to a database, at the server; return their number."""
    return len(
        run_command(url, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    )


def run_command(url: str, command: str) -> list[Any]:
    """Run a command outside a transaction and return its rows."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        result = connection.exec_driver_sql(command)
        return list(result.all()) if result.returns_rows else []
