"""Database of an adapter registry: tables, connections, transactions, and errors in one line."""

from __future__ import annotations

import contextlib
import math
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import mysql

from capplan.errors import InputError

SCHEMA_VERSION: Final = 2
_WRITES: Final = "capplan_writes"
_RETRY_S: Final = 0.05
_CREATE_ATTEMPTS: Final = 5

_MYSQL: Final = ("mysql", "mariadb")
_MAX_NAME: Final = 256
_UTF8_BYTES: Final = 4
_IDLE_S: Final = 60
"""Time after which PostgreSQL ends an idle transaction: the machine of its process may be gone."""
_SILENT_S: Final = 30
"""Time, beyond that for locks, after which a connection that does not respond is given up."""
_CONNECT_TIMEOUTS: Final = ("psycopg", "psycopg2", "pymysql", "mysqldb", "mariadbconnector")
"""Drivers with an argument of this name."""


class _ExactName(sa.types.TypeDecorator[str]):
    """Name that equals another one if all its bytes do.

    Collations of MySQL and MariaDB take letters of both cases, or names with spaces behind, for equal.
    """

    impl = sa.String(_MAX_NAME)
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        """Return the type in a kind of database."""
        if dialect.name not in _MYSQL:
            return dialect.type_descriptor(sa.String(_MAX_NAME))
        return dialect.type_descriptor(mysql.VARBINARY(_UTF8_BYTES * _MAX_NAME))

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Return a value for the database."""
        return value if value is None or dialect.name not in _MYSQL else value.encode()

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> str | None:
        """Return a value from the database."""
        return bytes(value).decode() if isinstance(value, bytes | bytearray | memoryview) else value


_TABLE: Final[Mapping[str, Any]] = MappingProxyType(
    {f"{name}_charset": "utf8mb4" for name in _MYSQL} | {f"{name}_engine": "InnoDB" for name in _MYSQL}
)
_NAME = _ExactName()
_METADATA = sa.MetaData()

STATE = sa.Table(
    "capplan_registry",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("changes", sa.BigInteger, nullable=False),
    **_TABLE,
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
    **_TABLE,
)

SERVERS = sa.Table(
    "capplan_servers",
    _METADATA,
    sa.Column("name", _NAME, primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("owner", sa.Text),
    sa.Column("renewals", sa.BigInteger, nullable=False),
    **_TABLE,
)

HOLDERS = sa.Table(
    "capplan_holders",
    _METADATA,
    sa.Column("adapter", _NAME, sa.ForeignKey(ADAPTERS.c.name), primary_key=True),
    sa.Column("server", _NAME, sa.ForeignKey(SERVERS.c.name), primary_key=True, index=True),
    **_TABLE,
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
        self._identity: tuple[int, int] | None = None
        self._reopening = threading.Lock()
        self._openings = 0
        self._counter: Any = None
        self._counter_opening = 0
        self.location = where
        url = self._url(where)
        if not create:
            self._identity = self._file_identity()
        try:
            self._engine = sa.create_engine(
                url, connect_args=self._connect_args(url), pool_pre_ping=not self._is_sqlite
            )
        except ImportError as error:
            rule = f"needs a driver, for example of the extra `databases`: {error}"
            raise InputError(rule, location=self.location) from None
        except sa.exc.ArgumentError as error:
            raise InputError(
                f"must be a file or an SQLAlchemy URL: {error}", location=self.location
            ) from None
        event.listen(self._engine, "begin", _begin)
        event.listen(self._engine, "connect", self._prepare)
        if create:
            self._create()
            self._identity = self._file_identity()
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
        """Return the time-outs of a driver."""
        if self._is_sqlite:
            return {"timeout": self._timeout_s}
        driver, seconds = url.get_driver_name(), max(2, math.ceil(self._timeout_s))
        found = {"connect_timeout": seconds} if driver in _CONNECT_TIMEOUTS else {}
        if driver in ("psycopg", "psycopg2"):
            found["tcp_user_timeout"] = 1000 * _SILENT_S
        elif driver in ("pymysql", "mysqldb"):
            found |= dict.fromkeys(("read_timeout", "write_timeout"), seconds + _SILENT_S)
        return found

    def _prepare(self, connection: Any, _record: Any) -> None:
        """Set up a new connection."""
        if self._is_sqlite:
            connection.isolation_level = None  # transactions begin where `_begin` says
            connection.execute("PRAGMA foreign_keys = ON")
            return
        settings = {
            "postgresql": (
                f"SET lock_timeout = {math.ceil(1000 * self._timeout_s)}",
                f"SET idle_in_transaction_session_timeout = {1000 * _IDLE_S}",
            ),
            **dict.fromkeys(
                _MYSQL, (f"SET SESSION innodb_lock_wait_timeout = {max(1, math.ceil(self._timeout_s))}",)
            ),
        }
        cursor = connection.cursor()
        for setting in settings.get(self._engine.dialect.name, ()):
            cursor.execute(setting)
        cursor.close()
        connection.commit()

    def _file_identity(self) -> tuple[int, int] | None:
        """Return what tells an SQLite file from another one at its path; None for other databases.

        Raises
        ------
        RegistryUnavailableError
            If there is no file.
        """
        if self._file is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            found = self._file.stat()
            if stat.S_ISREG(found.st_mode):
                return found.st_dev, found.st_ino
        rule = "is missing: 'capplan registry add' makes a registry"
        raise RegistryUnavailableError(rule, location=self.location)

    def _require_file(self) -> None:
        """Check that the SQLite file is there; open it again if it is another one than that of before.

        The former file has no name any more while it is open: no other process sees what is written to it.

        Raises
        ------
        RegistryUnavailableError
            If there is no file, or it is no registry.
        """
        if self._file is None or self._file_identity() == self._identity:
            return
        with self._reopening:
            found = self._file_identity()
            if found != self._identity:
                self._openings += 1
                self._engine.dispose()
                self._require_registry()
                self._identity = found

    def _create(self) -> None:
        for attempts_left in reversed(range(_CREATE_ATTEMPTS)):
            try:
                with self._errors():
                    if self._is_sqlite:
                        self._use_wal()
                    self._create_tables()
                return
            except RegistryUnavailableError:  # another process may have made some of the tables meanwhile
                if self._is_sqlite or not attempts_left:
                    raise
                time.sleep(_RETRY_S)

    def _create_tables(self) -> None:
        with self._connected(writes=True) as connection:
            _METADATA.create_all(connection)
            if connection.execute(sa.select(STATE.c.id)).first() is None:
                row = {"id": 1, "schema_version": SCHEMA_VERSION, "changes": 0}
                connection.execute(sa.insert(STATE).values(**row))

    @contextlib.contextmanager
    def _connected(self, *, writes: bool) -> Iterator[sa.Connection]:
        """Open a transaction.

        One that reads sees one state of the registry. One that writes sees what was committed before it got
        its turn.
        """
        options: dict[str, Any] = {_WRITES: writes}
        if not self._is_sqlite:
            options["isolation_level"] = "READ COMMITTED" if writes else "REPEATABLE READ"
        with self._engine.connect() as connection, connection.execution_options(**options).begin():
            yield connection

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
        with self._errors(), self._connected(writes=False) as connection:
            if not sa.inspect(connection).has_table(STATE.name):
                raise RegistryUnavailableError(rule, location=self.location)
            version = connection.execute(sa.select(STATE.c.schema_version)).scalar()
        if version != SCHEMA_VERSION:
            is_former = version is not None and version < SCHEMA_VERSION
            step = "remove it and add its adapters again" if is_former else "upgrade capplan to open it"
            rule = f"must have version {SCHEMA_VERSION} of its tables; {step}"
            raise RegistryUnavailableError(rule, version, self.location)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a transaction that reads one state of the registry."""
        self._require_file()
        with self._errors(), self._connected(writes=False) as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, *, counts: bool = True) -> Iterator[sa.Connection]:
        """Open a transaction that writes: all of it or nothing, and alone.

        Parameters
        ----------
        counts
            Whether it is one of the `changes`, after which nothing is answered from memory.
        """
        self._require_file()
        with self._errors(), self._connected(writes=True) as connection:
            connection.execute(sa.update(STATE).values(changes=STATE.c.changes + int(counts)))
            yield connection

    def changes(self) -> tuple[int, int]:
        """Return what every committed change by any process changes, at the least cost; not for two threads.

        Returns
        -------
        tuple of int
            Number of times that the registry was opened again, and number of changes in it.
        """
        self._require_file()
        with self._errors():
            opening = self._openings
            if opening != self._counter_opening:
                self._close_counter()
            if self._counter is not None:
                try:
                    return opening, self._read_counter()
                except self._engine.dialect.loaded_dbapi.Error:
                    if self._is_sqlite:
                        raise
                    # The database may have ended a connection that was idle.
            self._counter, self._counter_opening = self._engine.raw_connection(), opening
            return opening, self._read_counter()

    def _read_counter(self) -> int:
        try:
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
            text = original.args[1] if _has_number(original) else str(original)
            reason = (str(text).strip().splitlines() or [type(original).__name__])[0]
            if "locked" in reason or ("lock" in reason.lower() and "timeout" in reason.lower()):
                reason = f"another process has locked it for over {self._timeout_s:g} s"
            rule = f"cannot be used: {reason}"
            raise RegistryUnavailableError(rule, location=self.location) from None

    def close(self) -> None:
        """Close all connections."""
        self._close_counter()
        self._engine.dispose()


def _has_number(error: BaseException) -> bool:
    """Return whether an error of a driver is a number and a text."""
    return len(error.args) == 2 and isinstance(error.args[0], int)


def _begin(connection: sa.Connection) -> None:
    """Begin a transaction of SQLite; one that writes waits for its lock at the beginning."""
    if connection.dialect.name == "sqlite":
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
