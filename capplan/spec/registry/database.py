"""Database of an adapter registry: tables, connections, transactions, and errors in one line."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event

from capplan.errors import InputError

SCHEMA_VERSION: Final = 1
_WRITES: Final = "capplan_writes"
_RETRY_S: Final = 0.05

_NAME = sa.String(256)
_METADATA = sa.MetaData()

STATE = sa.Table(
    "capplan_registry",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("changes", sa.BigInteger, nullable=False),
)
"""One row, which every transaction that writes updates first: such transactions follow each other."""

ADAPTERS = sa.Table(
    "capplan_adapters",
    _METADATA,
    sa.Column("name", _NAME, primary_key=True),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("rank", sa.Integer, nullable=False),
    sa.Column("target_modules", sa.Text),
    sa.Column("size_bytes", sa.BigInteger),
    sa.Column("digest", sa.String(64), index=True),
    sa.Column("location", sa.Text, nullable=False),
)

SERVERS = sa.Table(
    "capplan_servers",
    _METADATA,
    sa.Column("name", _NAME, primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
)

HOLDERS = sa.Table(
    "capplan_holders",
    _METADATA,
    sa.Column("adapter", _NAME, sa.ForeignKey(ADAPTERS.c.name), primary_key=True),
    sa.Column("server", _NAME, sa.ForeignKey(SERVERS.c.name), primary_key=True, index=True),
)


class RegistryUnavailableError(InputError):
    """The registry is missing, locked, unreachable, or another kind of database."""


class Database:
    """Connections to the database of a registry.

    Parameters
    ----------
    where
        SQLite file, or SQLAlchemy URL.
    create
        Make the registry if there is none.
    timeout_s
        Time to wait for a lock of another process.

    Raises
    ------
    RegistryUnavailableError
        If there is no registry, or it cannot be used.
    """

    def __init__(self, where: str, *, create: bool, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._file: Path | None = None
        self._counter: Any = None
        self.location = where
        url = self._url(where)
        if self._file is not None and not create:
            self._require_file()
        try:
            self._engine = sa.create_engine(url, connect_args=self._connect_args(url))
        except (sa.exc.ArgumentError, ImportError) as error:
            raise InputError(
                f"must be a file or an SQLAlchemy URL: {error}", location=self.location
            ) from None
        event.listen(self._engine, "begin", _begin)
        if self._is_sqlite:
            event.listen(self._engine, "connect", _prepare_sqlite)
        if create:
            self._create()
        self._require_registry()

    def _url(self, where: str) -> sa.URL:
        if "://" not in where:
            url = sa.URL.create("sqlite", database=where)
        else:
            try:
                url = sa.make_url(where)
            except (sa.exc.ArgumentError, ValueError):
                rule = "must be a file or an SQLAlchemy URL"
                raise InputError(rule, location=where.partition("://")[0]) from None
            self.location = url.render_as_string(hide_password=True)
        self._is_sqlite = url.get_backend_name() == "sqlite"
        if self._is_sqlite:
            if not url.database or url.database == ":memory:":
                raise InputError("must be a file: servers share a registry", location=self.location)
            self._file = Path(url.database)
        return url

    def _connect_args(self, url: sa.URL) -> dict[str, Any]:
        return {"timeout": self._timeout_s} if url.get_backend_name() == "sqlite" else {}

    def _require_file(self) -> None:
        if self._file is not None and not self._file.is_file():
            rule = "is missing: 'capplan registry add' makes a registry"
            raise RegistryUnavailableError(rule, location=self.location)

    def _create(self) -> None:
        with self._errors():
            if self._is_sqlite:
                self._use_wal()
            with (
                self._engine.connect().execution_options(**{_WRITES: True}) as connection,
                connection.begin(),
            ):
                _METADATA.create_all(connection)
                if connection.execute(sa.select(STATE.c.id)).first() is None:
                    connection.execute(
                        sa.insert(STATE).values(id=1, schema_version=SCHEMA_VERSION, changes=0)
                    )

    def _use_wal(self) -> None:
        """Let readers and a writer of an SQLite file work beside each other."""
        until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                with contextlib.closing(self._engine.raw_connection()) as connection:
                    connection.cursor().execute("PRAGMA journal_mode = WAL")
                return
            except self._engine.dialect.loaded_dbapi.Error:  # SQLite does not wait for this lock
                if time.monotonic() > until_s:
                    raise
                time.sleep(_RETRY_S)

    def _require_registry(self) -> None:
        rule = "must be an adapter registry: 'capplan registry add' makes one"
        with self.reading() as connection:
            if not sa.inspect(connection).has_table(STATE.name):
                raise RegistryUnavailableError(rule, location=self.location)
            version = connection.execute(sa.select(STATE.c.schema_version)).scalar()
        if version != SCHEMA_VERSION:
            rule = f"must have version {SCHEMA_VERSION} of its tables"
            raise RegistryUnavailableError(rule, version, self.location)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a transaction that reads one state of the registry."""
        self._require_file()
        with self._errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction that writes: all of it or nothing, and alone."""
        self._require_file()
        with (
            self._errors(),
            self._engine.connect().execution_options(**{_WRITES: True}) as connection,
            connection.begin(),
        ):
            connection.execute(sa.update(STATE).values(changes=STATE.c.changes + 1))
            yield connection

    def changes(self) -> int:
        """Return the number of committed writes, by any process, at the least cost; not for two threads."""
        self._require_file()
        with self._errors():
            try:
                if self._counter is None:
                    self._counter = self._engine.raw_connection()
                cursor = self._counter.cursor()
                cursor.execute(f"SELECT changes FROM {STATE.name}")  # noqa: S608 - a constant
                found = int(cursor.fetchone()[0])
                cursor.close()
                if not self._is_sqlite:  # which has begun no transaction
                    self._counter.rollback()
            except BaseException:
                self._close_counter()
                raise
        return found

    def _close_counter(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.invalidate()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the database as one line."""
        try:
            yield
        except (sa.exc.SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error) as error:
            original = getattr(error, "orig", None) or error
            reason = (str(original).strip().splitlines() or [type(original).__name__])[0]
            if "locked" in reason:
                reason = f"another process has locked it for over {self._timeout_s:g} s"
            rule = f"cannot be used: {reason}"
            raise RegistryUnavailableError(rule, location=self.location) from None

    def close(self) -> None:
        """Close all connections."""
        self._close_counter()
        self._engine.dispose()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin where `_begin` says
    connection.execute("PRAGMA foreign_keys = ON")


def _begin(connection: sa.Connection) -> None:
    """Begin a transaction of SQLite; one that writes waits for its lock at the beginning."""
    if connection.dialect.name == "sqlite":
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
