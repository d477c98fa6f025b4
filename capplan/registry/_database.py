"""Database of an adapter registry: tables, connections, transactions, and errors in one line."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import sqlite3
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import sqlalchemy as sa
from sqlalchemy import event

from capplan.errors import CapplanError, InputError, redacted
from capplan.spec import beyond, input_limits, open_regular

SCHEMA_VERSION: Final = 2
_WRITES: Final = "capplan_writes"
_RETRY_S: Final = 0.05
_CREATE_ATTEMPTS: Final = 5

_MAX_NAME: Final = 256
_IDLE_S: Final = 60
"""Time after which PostgreSQL ends an idle transaction: the machine of its process may be gone."""
_SILENT_S: Final = 30
"""Time, beyond that for locks, after which a connection that does not respond is given up."""

_DRIVERS: Final = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql",
    "postgresql+psycopg": "postgresql",
}
_QUERY_KEYS: Final = ("application_name",)
"""Keys of a PostgreSQL URL. Most others name files or services, or run commands, of this machine."""
_HOST: Final = re.compile(r"[\w.-]+|[0-9A-Fa-f:.]+(%[\w.-]+)?")
_DATABASE: Final = re.compile(r"[\w.$-]+")
_EXAMPLE: Final = "must be a file, or a URL such as postgresql+psycopg://USER@HOST/DATABASE"

_READ_S: Final = 4.0
_ROW_S: Final = 3e-5
_READ_BYTES: Final = 2**26
_MAX_READ_BYTES: Final = 2**27
"""Of the rows of one transaction, beyond `_ROW_BYTES` of each."""
_ROW_BYTES: Final = 512
_MAX_ROWS_OF_ADAPTERS: Final = 2
"""Rows of one query, as a multiple of `InputLimits.max_adapters`: holders."""
_POLL_S: Final = 0.05
_INSTRUCTIONS: Final = 10_000
"""Of SQLite's virtual machine, about 0.1 ms."""
_MAX_VALUE_BYTES: Final = 2**16
_JOURNAL_MAGIC: Final = b"\xd9\xd5\x05\xf9 \xa1c\xd7"
_BYTES_RECEIVED: Final = 128
"""Place of `tcpi_bytes_received` in Linux's `struct tcp_info`."""

_NAME = sa.String(_MAX_NAME)
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
    sa.Column("owner", sa.Text),
    sa.Column("renewals", sa.BigInteger, nullable=False),
)

HOLDERS = sa.Table(
    "capplan_holders",
    _METADATA,
    sa.Column("adapter", _NAME, sa.ForeignKey(ADAPTERS.c.name), primary_key=True),
    sa.Column("server", _NAME, sa.ForeignKey(SERVERS.c.name), primary_key=True, index=True),
)


_TABLES: Final = (STATE, ADAPTERS, SERVERS, HOLDERS)

_NO_TABLE_OF_SQLITE: Final = """
SELECT name FROM sqlite_master WHERE NOT coalesce(
    type = 'table' AND rootpage > 0 AND sql LIKE 'CREATE TABLE %'
    OR type = 'index' AND coalesce(sql LIKE 'CREATE INDEX %' OR sql LIKE 'CREATE UNIQUE INDEX %', 1), 0)
UNION ALL
SELECT column1 || '.' || name FROM (VALUES {names}), pragma_table_xinfo(column1) WHERE hidden
LIMIT 1
"""
"""Name of a view, trigger, virtual table or generated column: reading it may run for ever."""

_NO_TABLE_OF_POSTGRESQL: Final = """
SELECT class.relname FROM (VALUES {names}) AS name
JOIN pg_catalog.pg_class AS class ON class.oid = to_regclass(column1)
WHERE class.relkind <> 'r' OR class.relhassubclass OR class.relrowsecurity OR EXISTS (
    SELECT FROM pg_catalog.pg_attribute AS column_
    WHERE column_.attrelid = class.oid AND column_.attgenerated <> '')
LIMIT 1
"""
"""The same, and tables with policies or children, which may be foreign."""


class RegistryUnavailableError(InputError):
    """The registry is missing, locked, unreachable, damaged, or another kind of database."""


class _Budget:
    """Time and bytes of a transaction that reads a database which may be slow or endless."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._until_s = math.inf
        self._max_received_bytes = 0
        self._taken_bytes = 0
        self.spent = ""

    def start(self) -> None:
        self._until_s = time.monotonic() + _READ_S
        self._max_received_bytes += _READ_BYTES
        self._taken_bytes = 0

    def stop(self) -> None:
        self._until_s = math.inf

    def take(self, row: sa.Row[Any]) -> None:
        """Count a row, for which there is some more time."""
        size_bytes = sum(map(sys.getsizeof, row))
        self._taken_bytes += max(0, size_bytes - _ROW_BYTES)
        self._max_received_bytes += 2 * size_bytes
        self._until_s += _ROW_S
        if self._taken_bytes > _MAX_READ_BYTES:
            self.spent = f"its rows take over {_MAX_READ_BYTES >> 20} MiB"
        if self.is_spent():
            raise ValueError(self.spent)

    def is_spent(self, received_bytes: int = 0) -> bool:
        """Return whether the transaction has to end."""
        if received_bytes > self._max_received_bytes:
            self.spent = self.spent or f"the server sends over {_READ_BYTES >> 20} MiB beside its rows"
        elif time.monotonic() > self._until_s:
            self.spent = self.spent or f"it is not read within {_READ_S:g} s"
        return bool(self.spent)

    def watch(self, descriptor: int) -> None:
        """Shut a TCP connection down when the transaction has to end: its driver waits without a limit."""
        with socket.socket(fileno=descriptor) as connection:
            while not self.closed.wait(_POLL_S):
                if self.is_spent(_received_bytes(connection)):
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                    return


def _received_bytes(connection: socket.socket) -> int:
    """Return the bytes that a TCP connection has received; 0 where the kernel does not count them."""
    with contextlib.suppress(AttributeError, OSError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
        return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0])
    return 0


def _parse_url(where: str) -> tuple[sa.URL, str]:
    """Return a URL whose parts are allowed, and its text without the password.

    The error of a part that is not has nothing of the rest of the URL: a password may stand anywhere in it.
    """
    scheme, _, rest = where.partition("://")
    if scheme not in _DRIVERS:
        valid = ", ".join(_DRIVERS)
        raise InputError(f"{_EXAMPLE}; schemes are {valid}", location=f"{scheme[:40]}://...")
    location = f"{scheme}://..."
    if _DRIVERS[scheme] == "sqlite":
        path, _, keys = rest.partition("?")
        _require_keys(keys, (), location)
        if not path.startswith("/"):
            raise InputError("must name a file, as sqlite:///PATH", location=location)
        return sa.URL.create(scheme, database=path[1:]), where
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise InputError(_EXAMPLE, location=location) from None
    if parts.fragment or "@" in f"{parts.path}{parts.query}":
        rule = "must have '/', '?', '#' and '@' in user and password as %2F, %3F, %23 and %40"
        raise InputError(rule, location=location)
    query = _require_keys(parts.query, _QUERY_KEYS, location)
    for part, value, pattern in (("host", host, _HOST), ("database", parts.path[1:], _DATABASE)):
        if not pattern.fullmatch(value):
            raise InputError(f"must name a {part} by letters, digits, '.', '_' and '-'", location=location)
    user, password = (value and unquote(value) for value in (parts.username, parts.password))
    url = sa.URL.create(scheme, user, password, host, port, parts.path[1:])
    return url.set(query=query), url.render_as_string(hide_password=True)


def _require_keys(query: str, allowed: Sequence[str], location: str) -> dict[str, str]:
    """Return the keys and values of the query of a URL; raise for the first key that is not allowed."""
    found = dict(parse_qsl(query, keep_blank_values=True))
    for key in found:
        if key not in allowed:
            hint = f"; the keys are {', '.join(allowed)}" if allowed else ""
            if key.startswith("ssl"):
                hint += "; TLS is set up by the variables PGSSLMODE, PGSSLROOTCERT ... of libpq"
            elif "pass" in key:
                hint += "; USER:PASSWORD@HOST, PGPASSWORD or ~/.pgpass give it"
            raise InputError(f"is not allowed in the URL of a registry{hint}", location=f"{location}?{key}")
    return found


class Database:
    """Connections to the database of a registry: an SQLite file, or a URL of SQLite or PostgreSQL.

    One that is `read_only` is for one thread, and within bounds of time and bytes, whatever the database is.
    If there is no registry, and it is not to be created, or it cannot be used, raise
    `RegistryUnavailableError`, also in all methods.
    """

    def __init__(self, where: str, *, create: bool, timeout_s: float, read_only: bool = False) -> None:
        self._timeout_s = timeout_s
        self._read_only = read_only
        self._budget = _Budget()
        self._file: Path | None = None
        self._identity: tuple[int, int] | None = None
        self._reopening = threading.Lock()
        self._openings = 0
        self._counter: Any = None
        self._counter_opening = 0
        self._password: str | None = None
        self.location = redacted(where)
        self._engine = self._make_engine(where, create)
        if not create or (self._file is not None and os.path.lexists(self._file)):
            self._identity = self._file_identity()
        event.listen(self._engine, "begin", _begin)
        event.listen(self._engine, "connect", self._prepare)
        if create:
            self._create()
            self._identity = self._file_identity()
        try:
            self._require_registry()
        except BaseException:
            self.close()
            raise

    def _make_engine(self, where: str, create: bool) -> sa.Engine:
        url = None
        if "://" in where:
            url, self.location = _parse_url(where)
        if url is None or _DRIVERS[url.drivername] == "sqlite":
            name = where if url is None else url.database
            if not name or name == ":memory:":
                raise InputError("must be a file: servers share a registry", location=self.location)
            self._file = Path(name)
            return sa.create_engine(
                "sqlite://", creator=lambda: self._connect_file(create), poolclass=sa.QueuePool
            )
        try:
            return sa.create_engine(
                "postgresql+psycopg://",
                creator=lambda: self._connect_server(url),
                pool_pre_ping=True,
                use_native_hstore=False,
            )
        except ImportError as error:
            rule = f"needs a driver, for example of the extra `databases`: {error}"
            raise InputError(rule, location=self.location) from None

    @property
    def _is_sqlite(self) -> bool:
        return self._file is not None

    def _connect_file(self, create: bool) -> sqlite3.Connection:
        """Return a connection to the SQLite file, whose text is decoded whatever its bytes are."""
        if self._read_only:
            self._require_no_journal()
        # The path is quoted: names such as "file:x?vfs=y" are no URLs.
        path = quote(os.path.abspath(self._file or ""))  # noqa: PTH100 - keeps links
        mode = "rwc" if create else "rw"
        connection = sqlite3.connect(
            f"file://{path}?mode={mode}", timeout=self._timeout_s, check_same_thread=False, uri=True
        )
        connection.text_factory = lambda data: data.decode(errors="surrogateescape")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        if self._read_only:
            connection.set_progress_handler(self._budget.is_spent, _INSTRUCTIONS)
            connection.execute("PRAGMA query_only = ON")
        return connection

    def _require_no_journal(self) -> None:
        """Refuse a file with a rollback journal: SQLite would write to it, and to files that this names.

        Registries have write-ahead logs instead.
        """
        path = Path(f"{self._file}-journal")
        if not os.path.lexists(path):
            return
        with open_regular(path, None, str(path)) as journal:
            if journal.read(len(_JOURNAL_MAGIC)) == _JOURNAL_MAGIC:
                rule = (
                    "is left by a killed writer, or one that still runs: 'sqlite3 FILE .tables' recovers it"
                )
                raise RegistryUnavailableError(rule, location=str(path))

    def _connect_server(self, url: sa.URL) -> Any:
        """Return a connection to the PostgreSQL server of a URL, by its allowed parts alone."""
        import psycopg

        self._password = url.password
        options: dict[str, Any] = {
            **url.translate_connect_args(username="user", database="dbname"),
            **url.query,
            "connect_timeout": max(2, math.ceil(self._timeout_s)),
            "tcp_user_timeout": 1000 * _SILENT_S,
        }
        if self._read_only and url.password is None and psycopg.pq.version() >= 160000:
            # PGPASSWORD and ~/.pgpass are not told to the server of somebody's workload.
            options["require_auth"] = os.environ.get("PGREQUIREAUTH", "!password")
        connection = psycopg.connect(**options)
        if self._read_only:
            copy = os.dup(connection.fileno())
            threading.Thread(target=self._budget.watch, args=(copy,), daemon=True).start()
        return connection

    def _prepare(self, connection: Any, _record: Any) -> None:
        if self._is_sqlite:
            connection.isolation_level = None  # transactions begin where `_begin` says
            connection.execute("PRAGMA foreign_keys = ON")
            return
        with connection.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = {math.ceil(1000 * self._timeout_s)}")
            cursor.execute(f"SET idle_in_transaction_session_timeout = {1000 * _IDLE_S}")
            if self._read_only:
                cursor.execute("SET default_transaction_read_only = on")
                cursor.execute(f"SET statement_timeout = {math.ceil(1000 * _READ_S)}")
        connection.commit()

    def _file_identity(self) -> tuple[int, int] | None:
        """Return what tells an SQLite file from another one at its path; None for other databases."""
        if self._file is None:
            return None
        rule = "is missing: 'capplan registry add' makes a registry"
        with contextlib.suppress(OSError, ValueError):
            found = self._file.stat()
            if stat.S_ISREG(found.st_mode):
                return found.st_dev, found.st_ino
            rule = "must be a regular file"
        raise RegistryUnavailableError(rule, location=self.location)

    def _require_file(self) -> None:
        """Check that the SQLite file is there; open it again if it is another one than that of before.

        The former file has no name any more while it is open: no other process sees what is written to it.
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
            self._require_tables(connection)
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
        """Check that the database is a registry of this version, in tables of its own."""
        rule = "must be an adapter registry: 'capplan registry add' makes one"
        with self._errors(), self._bounded(), self._connected(writes=False) as connection:
            self._require_tables(connection)
            if not sa.inspect(connection).has_table(STATE.name):
                raise RegistryUnavailableError(rule, location=self.location)
            rows = connection.execute(sa.select(STATE.c.schema_version, STATE.c.changes).limit(2)).all()
        where = f"{self.location}: {STATE.name}"
        if len(rows) != 1:
            raise RegistryUnavailableError("must have one row", location=where)
        ((version, changes),) = rows
        if not isinstance(version, int):
            raise RegistryUnavailableError("must be a whole number", version, f"{where}: schema_version")
        if version != SCHEMA_VERSION:
            is_former = version < SCHEMA_VERSION
            step = "remove it and add its adapters again" if is_former else "upgrade capplan to open it"
            rule = f"must have version {SCHEMA_VERSION} of its tables; {step}"
            raise RegistryUnavailableError(rule, version, self.location)
        self._require_count(changes)

    def _require_count(self, changes: object) -> int:
        if not isinstance(changes, int):
            where = f"{self.location}: {STATE.name}: row 1: changes"
            raise RegistryUnavailableError("must be a whole number", changes, where)
        return changes

    def _require_tables(self, connection: sa.Connection) -> None:
        """Check that what is read are tables: a view may be endless, or read what others may not."""
        names = ", ".join(f"('{table.name}')" for table in _TABLES)
        query = _NO_TABLE_OF_SQLITE if self._is_sqlite else _NO_TABLE_OF_POSTGRESQL
        found = connection.execute(sa.text(query.format(names=names))).scalar()
        if found is not None:
            rule = (
                "must be a plain table: a registry has no views, triggers, virtual tables, generated "
                "columns, policies or child tables"
            )
            raise RegistryUnavailableError(rule, location=f"{self.location}: {found}")

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        if not self._read_only:
            yield
            return
        self._budget.start()
        try:
            yield
        finally:
            self._budget.stop()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a transaction that reads one state of the registry."""
        self._require_file()
        with self._errors(), self._bounded(), self._connected(writes=False) as connection:
            yield connection

    def rows(self, connection: sa.Connection, query: sa.Select[Any]) -> Iterator[Any]:
        """Yield the rows of a query as they are read.

        The error of one that cannot be read has its number. All of them must not take too long or too much
        memory.
        """
        number, most = 0, _MAX_ROWS_OF_ADAPTERS * input_limits().max_adapters
        try:
            # PostgreSQL's driver stores all rows of other queries first.
            for row in connection.execute(query.execution_options(stream_results=self._read_only)):
                number += 1
                if number > most:
                    raise InputError(beyond(most, "rows", "--max-adapters"), location=self.location)
                if self._read_only:
                    self._budget.take(row)
                yield row
        except self._faults() as error:
            table = query.get_final_froms()[0]
            raise self._unavailable(error, f": {table}: row {number + 1}") from None

    @contextlib.contextmanager
    def writing(self, *, counts: bool = True) -> Iterator[sa.Connection]:
        """Open a transaction that writes: all of it or nothing, and alone.

        `counts`: it is one of the `changes`, after which nothing is answered from memory.
        """
        self._require_file()
        with self._errors(), self._connected(writes=True) as connection:
            connection.execute(sa.update(STATE).values(changes=STATE.c.changes + int(counts)))
            yield connection

    def changes(self) -> tuple[int, int]:
        """Return what every committed change by any process changes, at the least cost; not for two threads.

        It is the number of times that the registry was opened again, and the number of changes in it.
        """
        self._require_file()
        with self._errors(), self._bounded():
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
            row = cursor.fetchone()
            cursor.close()
            if not self._is_sqlite:  # which has begun no transaction
                self._counter.rollback()
        except BaseException:
            self._close_counter()
            raise
        return self._require_count(row and row[0])

    def _close_counter(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.invalidate()

    def _faults(self) -> tuple[type[Exception], ...]:
        """Return the errors of the database, and of drivers that read values of an unknown one."""
        found: tuple[type[Exception], ...] = (sa.exc.SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error)
        if self._read_only:
            found += (ArithmeticError, AssertionError, LookupError, RecursionError, TypeError, ValueError)
        return (*found, UnicodeError)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the database as one line."""
        try:
            yield
        except self._faults() as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: Exception, where: str = "") -> CapplanError:
        """Return an error of the database as one line, without the password."""
        if isinstance(error, CapplanError):
            return error
        original = getattr(error, "orig", None) or error
        reason = (str(original).strip().splitlines() or [type(original).__name__])[0]
        if self._budget.spent:
            reason = self._budget.spent
        elif "locked" in reason or ("lock" in reason.lower() and "timeout" in reason.lower()):
            reason = f"another process has locked it for over {self._timeout_s:g} s"
        elif "statement timeout" in reason:
            reason = f"it is not read within {_READ_S:g} s"
        if self._password:
            reason = reason.replace(self._password, "***")
        return RegistryUnavailableError(f"cannot be used: {reason}", location=f"{self.location}{where}")

    def close(self) -> None:
        self._budget.closed.set()
        self._close_counter()
        self._engine.dispose()


def _begin(connection: sa.Connection) -> None:
    """Begin a transaction of SQLite; one that writes waits for its lock at the beginning."""
    if connection.dialect.name == "sqlite":
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
