"""Databases of servers, made for a run and dropped at its end."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa


@contextlib.contextmanager
def scratch_database(url: str) -> Iterator[str]:
    """Make a database on the server of a URL, whose own database is not touched; yield its URL."""
    name = f"capplan_{secrets.token_hex(6)}"
    _run(url, f"CREATE DATABASE {name}")
    try:
        yield sa.make_url(url).set(database=name).render_as_string(hide_password=False)
    finally:
        disconnect_all(url, name)
        _run(url, f"DROP DATABASE {name}")


def disconnect_all(url: str, name: str) -> int:
    """End all connections to a database, at the server; return their number."""
    if sa.make_url(url).get_backend_name() == "postgresql":
        query = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        return len(_run(url, query))
    found = _run(url, f"SELECT id FROM information_schema.processlist WHERE db = '{name}'")
    for (number,) in found:
        with contextlib.suppress(sa.exc.DBAPIError):  # it has ended meanwhile
            _run(url, f"KILL {int(number)}")
    return len(found)


def _run(url: str, command: str) -> list[Any]:
    """Run a command outside a transaction and return its rows."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        result = connection.exec_driver_sql(command)
        return list(result.all()) if result.returns_rows else []
