"""Registries that a workload names: URLs, passwords, hostile tables and servers, in bounded time."""

import itertools
import json
import os
import re
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from capplan import InputError
from capplan.registry import AdapterRegistry, RegisteredAdapter
from tests.cli.conftest import ROOT, Run, environment, error_line
from tests.spec.conftest import entry

pytestmark = pytest.mark.process

WORKLOAD = """
base_model: org/model
profile: p
requests: {{prompt_tokens: {{mean: 9}}, output_tokens: {{mean: 9}}}}
adapters: {{registry: {}, rate_rps: 1}}
"""


@pytest.fixture
def workload(tmp_path: Path) -> Callable[[str], Path]:
    """Return a workload file that names a registry."""

    def written(registry: str) -> Path:
        path = tmp_path / "w.yaml"
        path.write_text(WORKLOAD.format(json.dumps(registry)))
        return path

    return written


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Return a socket that listens; a test checks that nobody has connected."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(0)
        yield made
        with pytest.raises(BlockingIOError):
            made.accept()


MEASURED = """
import atexit, re, sys, time
from pathlib import Path
def measure():
    peak_kib = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]
    print(time.process_time(), peak_kib)
atexit.register(measure)
from capplan.cli import main
main()
"""


def refused(folder: Path, *arguments: object) -> str:
    """Return the one line of a command in a process, which takes 10 s of CPU time and 500 MiB at most."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    cpu_s, peak_kib = map(float, done.stdout.split())
    assert cpu_s < 10
    assert peak_kib < 500 * 2**10
    return done.stderr


def test_mysql_is_refused_before_any_connection(
    case: Callable[[str], Path], run: Run, listener: socket.socket
) -> None:
    path = case("21-mysql-local-infile") / "workload.yaml"
    text = path.read_text()
    path.write_text(re.sub(r":\d+/", f":{listener.getsockname()[1]}/", text))
    line = error_line(run("plan", path))
    assert "mysql+pymysql://..." in line
    assert "schemes are sqlite" in line


POSTGRESQL_KEYS = (
    *("passfile", "service", "servicefile", "sslkey", "sslcert", "sslrootcert", "sslcrl", "sslpassword"),
    *("sslmode", "options", "host", "hostaddr", "port", "dbname", "user", "password", "krbsrvname"),
    *("require_auth", "gssencmode", "load_balance_hosts", "replication", "local_infile", "client_encoding"),
    *("prepare_threshold", "autocommit", "keepalives", "connect_timeout", "unix_socket", "async_fallback"),
)


@pytest.mark.parametrize("key", POSTGRESQL_KEYS)
def test_keys_of_a_url_are_refused_by_name(
    key: str, run: Run, workload: Callable[[str], Path], listener: socket.socket
) -> None:
    url = f"postgresql+psycopg://u@127.0.0.1:{listener.getsockname()[1]}/d"
    for text in (f"{url}?{key}=hunter2", f"{url}?application_name=a&{key}=hunter2", f"{url}?{key}="):
        line = error_line(run("plan", workload(text)))
        assert f"?{key}: is not allowed in the URL of a registry" in line
        assert "hunter2" not in line


@pytest.mark.parametrize("key", ["mode", "uri", "vfs", "immutable", "cache", "nolock", "psow", "timeout"])
def test_keys_of_a_file_are_refused_by_name(key: str, run: Run, tmp_path: Path) -> None:
    AdapterRegistry(tmp_path / "x.db", create=True).close()
    for path in (tmp_path / "x.db", f"file:{tmp_path}/x.db"):
        line = error_line(run("registry", "list", "--registry", f"sqlite:///{path}?{key}=1"))
        assert f"?{key}: is not allowed" in line


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg:///d",
        "postgresql+psycopg://%2Ftmp%2Fsocket/d",
        "postgresql+psycopg://u@%2Ftmp/d",
        "postgresql+psycopg://u@127.0.0.1:{port},127.0.0.1:{port}/d",
        "postgresql+psycopg://u@127.0.0.1:{port}/d?@",
        "postgresql+psycopg://u@127.0.0.1:{port}/d#x",
        "postgresql+psycopg://u@127.0.0.1:{port}/host=%2Ftmp passfile=x",
        "postgresql+psycopg://u@127.0.0.1:{port}/d x=y",
        "postgresql+psycopg://u@127.0.0.1:{port}/postgresql:%2F%2Fh",
        "postgresql+psycopg://u@127.0.0.1:{port}/",
        "postgresql+psycopg2://u@127.0.0.1:{port}/d",
        "postgresql+asyncpg://u@127.0.0.1:{port}/d",
        "postgres://u@127.0.0.1:{port}/d",
        "mariadb+pymysql://u@127.0.0.1:{port}/d",
        "oracle://u@127.0.0.1:{port}/d",
        "mssql+pyodbc:///?odbc_connect=x",
        "sqlite+pysqlcipher://:secret@/x.db",
        "sqlite+aiosqlite:///x.db",
        "sqlite://host/x.db",
        "file:///x.db?mode=rw",
        "http://127.0.0.1:{port}/x",
        "POSTGRESQL+psycopg://u@127.0.0.1:{port}/d?service=x",
    ],
)
def test_other_urls_are_refused_before_any_connection(
    url: str, run: Run, workload: Callable[[str], Path], listener: socket.socket
) -> None:
    line = error_line(run("plan", workload(url.format(port=listener.getsockname()[1]))))
    assert "secret" not in line
    assert "must " in line


def test_names_that_are_urls_of_sqlite_are_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite takes names that begin with file: for URLs, if it is compiled so."""
    monkeypatch.chdir(tmp_path)
    for name in ("file:x.db?mode=memory", "file:x.db?vfs=unix-none", "%41.db", "a?b#c.db"):
        words = ("add", "a=s3://x", "--rank", 8, "--base-model", "m", "--registry", name)
        assert run("registry", *words).exit_code == 0
        assert (tmp_path / name).is_file()
        assert [
            each["name"] for each in json.loads(run("registry", "list", "--registry", name, "--json").stdout)
        ]


SECRETS = ("hunter22secret", "hunter%322secret", "hunter22/secret", "hunter22@secret", "hunter22:@/?#secret")
SPELLINGS = (
    "postgresql+psycopg://u:{}@127.0.0.1:1/d",
    "postgresql+psycopg://:{}@127.0.0.1:1/d",
    "postgresql+psycopg://127.0.0.1:1/d?user=u&password={}",
    "postgresql+psycopg://127.0.0.1:1/d?user=u&sslpassword={}&passwd={}",
    "postgresql+psycopg://u:{}@127.0.0.1:x/d",
    "postgresql+psycopg://u:{}@127.0.0.1:99999/d",
    "postgresql+psycopg://u:{}@/d",
    "postgresql+psycopg://u:{}@127.0.0.1:1/d?service=x",
    "postgresql+none://u:{}@127.0.0.1:1/d",
    "mysql+pymysql://u:{}@127.0.0.1:1/d",
    "postgresql:/u:{}@127.0.0.1:1/d",
    "//u:{}@127.0.0.1:1/d",
    "host=127.0.0.1 user=u password={} dbname=d",
    "sqlite://u:{}@127.0.0.1/d",
    "sqlite:///x.db?password={}",
    "https://u:{}@127.0.0.1:1/d",
)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_passwords_are_not_printed(
    spelling: str,
    secret: str,
    run: Run,
    workload: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    url = spelling.format(secret, secret)
    as_csv = tmp_path / "csv.yaml"
    as_csv.write_text(WORKLOAD.format(1).replace("{registry: 1, rate_rps: 1}", json.dumps(url)))
    broken = workload(f"{url}\x07")
    for words in (
        ("registry", "list", "--registry", url),
        ("registry", "show", "a", "--registry", url, "--json"),
        ("registry", "add", "a=s3://x", "--rank", 8, "--base-model", "m", "--registry", f"{url}/none/x"),
        ("plan", as_csv),
        ("plan", broken),
    ):
        line = error_line(run(*words))
        assert "hunter" not in line
    assert "hunter" not in error_line(run("plan", workload(url)))
    monkeypatch.setenv("CAPPLAN_REGISTRY", url)
    assert "hunter" not in error_line(run("registry", "list"))


@pytest.mark.parametrize(
    "location", ["https://u:secretpw@host/x", "http://token@host/x", "s3://k:v@bucket/x"]
)
def test_locations_hold_no_users_and_passwords(location: str, run: Run, tmp_path: Path) -> None:
    """They are paths of plans, tables and reports."""
    words = ("--rank", 8, "--base-model", "m", "--registry", tmp_path / "x.db")
    line = error_line(run("registry", "add", f"a={location}", *words))
    assert "location: must not hold a user or password" in line
    assert "secretpw" not in line
    with AdapterRegistry(tmp_path / "x.db", create=True) as registry:
        with pytest.raises(InputError, match="must not hold a user"):
            registry.announce("s", location)
        registry.announce("s", "http://host:8000/a@b")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("w-view.yaml", "view.db: capplan_adapters: must be a plain table"),
        ("w-big.yaml", "big.db: capplan_adapters: must be a plain table"),
        ("w-badrow.yaml", r"badrow.db: adapter b'\xff\xfe': name: must be a name"),
        ("w-bad-changes.yaml", "bad-changes.db: capplan_registry: row 1: changes: must be a whole number"),
    ],
)
def test_hostile_registries_are_refused_in_one_line(
    case: Callable[[str], Path], name: str, line: str
) -> None:
    folder = case("22-registry-view-endless")
    made = (folder / "make.py").read_text().replace("CHECKOUT", str(ROOT))
    made = made.replace("capplan.spec.registry.database", "capplan.registry._database")
    subprocess.run([sys.executable, "-c", made], cwd=folder, env=environment(), check=True)
    assert line in refused(folder, "plan", name)
    registry = line.partition(":")[0]
    shown = refused(folder, "registry", "show", "a1", "--registry", registry)
    assert registry in shown
    if registry == "bad-changes.db":
        assert line in shown


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
COLUMNS = "name, base_model, rank, target_modules, size_bytes, digest, location"
HOSTILE: dict[str, tuple[str, str]] = {
    "view of constants": (
        "DROP TABLE capplan_holders; DROP TABLE capplan_adapters; CREATE VIEW capplan_adapters AS "
        "SELECT 'a' name, 'org/model' base_model, 8 rank, NULL target_modules, 9 size_bytes, NULL digest, "
        "'x' location",
        "capplan_adapters: must be a plain table",
    ),
    "endless state": (
        "DROP TABLE capplan_registry; CREATE VIEW capplan_registry AS "
        f"{ENDLESS} SELECT 1 id, 2 schema_version, i changes FROM n WHERE i < 0",
        "capplan_registry: must be a plain table",
    ),
    "view beside": (f"CREATE VIEW v AS {ENDLESS} SELECT i FROM n", "v: must be a plain table"),
    "trigger": (
        "CREATE TRIGGER t AFTER UPDATE ON capplan_registry BEGIN DELETE FROM capplan_adapters; END",
        "t: must be a plain table",
    ),
    "virtual table": (
        "DROP TABLE capplan_holders; DROP TABLE capplan_adapters; "
        "CREATE VIRTUAL TABLE capplan_adapters USING rtree(id, x, y)",
        "capplan_adapters: must be a plain table",
    ),
    "generated column": (
        "ALTER TABLE capplan_adapters ADD COLUMN x AS (printf('%.*c', 100000000, 'x'))",
        "capplan_adapters.x: must be a plain table",
    ),
    "disguised view": (
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE VIEW capplan_adapters AS "
        "SELECT 1 AS name' WHERE name = 'capplan_adapters'",
        "malformed database schema",
    ),
    "view of another name": (
        "PRAGMA writable_schema = ON; DELETE FROM sqlite_master WHERE tbl_name = 'capplan_adapters'; "
        "INSERT INTO sqlite_master VALUES ('table', 'x', 'x', 0, "
        "'CREATE VIEW capplan_adapters AS SELECT 1 AS name')",
        "",
    ),
    "many tables": (
        "PRAGMA writable_schema = ON; INSERT INTO sqlite_master WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL "
        "SELECT i + 1 FROM n LIMIT 300000) SELECT 'table', 't' || i, 't' || i, 2, "
        "'CREATE TABLE t' || i || '(a, b, c, d, e, f, g)' FROM n",
        "",
    ),
    "many rows": (
        "INSERT INTO capplan_adapters (name, base_model, rank, location) WITH RECURSIVE n(i) AS (SELECT 1 "
        "UNION ALL SELECT i + 1 FROM n LIMIT 1000001) SELECT 'b' || i, 'org/model', 8, 'x' FROM n",
        "must be at most 1,000,000 adapters; capplan --max-adapters",
    ),
    "large value": (
        "UPDATE capplan_adapters SET location = printf('%.*c', 50000000, 'x')",
        "capplan_adapters: row 1: cannot be used: string or blob too big",
    ),
    "long location": (
        "UPDATE capplan_adapters SET location = printf('%.*c', 9000, 'x')",
        "adapter a: location: must have at most 8192 characters",
    ),
    "bytes": (
        "UPDATE capplan_adapters SET location = CAST(x'ff41' AS TEXT)",
        "adapter a: location: must be text",
    ),
    "no text": ("UPDATE capplan_adapters SET location = x'6161'", "adapter a: location: must be text"),
    "control character": (
        "UPDATE capplan_adapters SET location = 'x' || char(27) || '[31m'",
        "adapter a: location: must be text",
    ),
    "broken rank": ("UPDATE capplan_adapters SET rank = 8.5", "adapter a: rank: must be a whole number"),
    "infinite size": ("UPDATE capplan_adapters SET size_bytes = 1e999", "adapter a: size_bytes: must be"),
    "number of modules": ("UPDATE capplan_adapters SET target_modules = 5", "adapter a: target_modules"),
    "bytes of modules": ("UPDATE capplan_adapters SET target_modules = x'00'", "adapter a: target_modules"),
    "digest": ("UPDATE capplan_adapters SET digest = 'x'", "adapter a: digest: must be a SHA-256"),
    "flag": ("UPDATE capplan_adapters SET name = '--x'", "adapter --x: name: must be a name"),
    "no state": ("DELETE FROM capplan_registry", "capplan_registry: must have one row"),
    "two states": ("INSERT INTO capplan_registry VALUES (2, 2, 0)", "capplan_registry: must have one row"),
    "version": (
        "UPDATE capplan_registry SET schema_version = 'x'",
        "capplan_registry: schema_version: must be a whole number",
    ),
    "no column": ("ALTER TABLE capplan_adapters RENAME COLUMN location TO x", "no such column"),
    "repeated name": (
        f"CREATE TABLE former AS SELECT * FROM capplan_adapters; DROP TABLE capplan_holders; "
        f"DROP TABLE capplan_adapters; CREATE TABLE capplan_adapters ({COLUMNS}); "
        "INSERT INTO capplan_adapters SELECT * FROM former UNION ALL SELECT * FROM former",
        "name: must be unique (got 'a')",
    ),
}


ENDLESS_KINDS = ("endless state", "generated column", "many tables", "many rows", "large value")


@pytest.mark.parametrize("kind", HOSTILE)
def test_tables_are_read_within_bounds_and_checked(
    kind: str, run: Run, workload: Callable[[str], Path], tmp_path: Path
) -> None:
    script, line = HOSTILE[kind]
    hostile_file(tmp_path, script)
    path = workload("x.db")
    found = refused(tmp_path, "plan", path) if kind in ENDLESS_KINDS else error_line(run("plan", path))
    assert "x.db" in found
    assert line in found


def hostile_file(folder: Path, script: str) -> Path:
    """Write a registry without a write-ahead log, and run a script on it."""
    path = folder / "x.db"
    with AdapterRegistry(path, create=True) as registry:
        registry.add(entry("a"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.executescript(script)
    return path


@pytest.mark.parametrize("end", ["-journal", ""])
def test_a_fifo_does_not_block(end: str, workload: Callable[[str], Path], tmp_path: Path) -> None:
    path = hostile_file(tmp_path, "")
    if not end:
        path.unlink()
    os.mkfifo(f"{path}{end}")
    assert "must be a regular file" in refused(tmp_path, "plan", workload("x.db"))


def test_a_journal_that_names_a_file_does_not_delete_it(
    run: Run, workload: Callable[[str], Path], tmp_path: Path
) -> None:
    """A rollback would delete the super-journal, any file, and write to the registry."""
    path, victim = hostile_file(tmp_path, ""), tmp_path / "victim"
    victim.write_text("")
    before = path.read_bytes()
    name = str(victim).encode()
    magic = b"\xd9\xd5\x05\xf9 \xa1c\xd7"
    header = magic + struct.pack(">IIIII", 0, 0, len(before) // 4096, 512, 4096)
    end = struct.pack(">I", 2**30 // 4096 + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    Path(f"{path}-journal").write_bytes(header.ljust(512, b"\0") + end)
    for words in (("plan", workload("x.db")), ("registry", "list", "--registry", path)):
        assert "x.db-journal: is left by a killed writer" in error_line(run(*words))
    assert victim.exists()
    assert path.read_bytes() == before


def test_planning_leaves_a_registry_as_it_is(
    run: Run, workload: Callable[[str], Path], tmp_path: Path
) -> None:
    with AdapterRegistry(tmp_path / "x.db", create=True) as registry:
        registry.add(entry("a", base_model="org/other"))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("x.db*")}
    assert "must hold adapters of base_model" in error_line(run("plan", workload("x.db")))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("x.db*")} == before
    with AdapterRegistry(tmp_path / "x.db", read_only=True) as registry:
        for write in (
            lambda: registry.add(RegisteredAdapter(name="b", base_model="m", rank=8, location="x")),
            lambda: registry.remove("a"),
            lambda: registry.announce("s", "http://s"),
        ):
            with pytest.raises(InputError, match="readonly"):
                write()


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def table(value: bytes, type_: int = 25) -> bytes:
    """Return the description of a result of one column, and a row."""
    column = b"x\0" + struct.pack("!IhIhih", 0, 0, type_, -1, -1, 0)
    row = struct.pack("!Hi", 1, len(value)) + value
    return message(b"T", struct.pack("!H", 1) + column) + message(b"D", row)


READY = message(b"Z", b"I")
DONE = message(b"C", b"SELECT 1\0") + READY
STARTED = message(b"R", struct.pack("!I", 0)) + message(b"S", b"server_version\00015.1\0") + READY


def endless(part: bytes, period_s: float = 0.0) -> Iterator[bytes]:
    for each in itertools.repeat(part):
        yield each
        time.sleep(period_s)


ROGUES: dict[str, Callable[[], tuple[Iterator[bytes] | list[bytes], Iterator[bytes] | list[bytes]]]] = {
    "silent": lambda: ([], []),
    "slow start": lambda: (endless(b"R", 0.1), []),
    "no PostgreSQL": lambda: ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], []),
    "asks for the password": lambda: ([message(b"R", struct.pack("!I", 3))], []),
    "no answer": lambda: ([STARTED], []),
    "slow answer": lambda: ([STARTED], endless(message(b"N", b"SNOTICE\0Mx\0\0"), 0.05)),
    "endless rows": lambda: ([STARTED], endless(table(b"x" * 1000)[: -len(table(b"")) or None] * 100)),
    "endless value": lambda: (
        [STARTED],
        itertools.chain(
            [table(b"")[:30], b"D" + struct.pack("!IHi", 2**30 - 1, 1, 2**30 - 11)], endless(b"x" * 2**20)
        ),
    ),
    "nested value": lambda: ([STARTED], [table(b"[" * 200_000, 114) + DONE] * 99),
    "wrong value": lambda: ([STARTED], [table(b"abc", 23) + DONE] * 99),
    "random bytes": lambda: ([STARTED], [bytes(range(256)) * 99]),
    "error with the password": lambda: (
        [STARTED],
        [message(b"E", b"SERROR\0C42P01\0Mno hunter22 here\0\0") + READY] * 99,
    ),
}


@contextmanager
def rogue(kind: str) -> Iterator[tuple[int, list[bytes]]]:
    """Answer as a PostgreSQL server that lies; yield the port, and what clients sent after the start."""
    received: list[bytes] = []

    def answer(client: socket.socket) -> None:
        start, answers = ROGUES[kind]()
        with suppress(OSError), client:
            while struct.unpack("!II", (head := client.recv(8, socket.MSG_WAITALL)))[1] in (
                80877103,
                80877104,
            ):
                client.sendall(b"N")
            client.recv(struct.unpack("!I", head[:4])[0] - 8, socket.MSG_WAITALL)
            for part in start:
                client.sendall(part)
            for part in answers:
                received.append(client.recv(2**16))
                client.sendall(part)
                while kind.startswith("endless") or kind == "slow answer":
                    client.sendall(next(answers))  # type: ignore[call-overload]
            while data := client.recv(2**16):
                received.append(data)

    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1], received
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("kind", ROGUES)
def test_a_server_that_lies_or_stalls_ends_in_one_line(
    kind: str,
    run: Run,
    workload: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("psycopg", reason="PostgreSQL needs a driver (extra `databases`)")
    monkeypatch.setenv("PGPASSWORD", "hunter22")
    user = "u:hunter22" if kind == "error with the password" else "u"
    with rogue(kind) as (port, received):
        path = workload(f"postgresql+psycopg://{user}@127.0.0.1:{port}/d")
        begin_s = time.monotonic()
        line = refused(tmp_path, "plan", path) if "endless" in kind else error_line(run("plan", path))
        assert time.monotonic() - begin_s < (60 if "endless" in kind else 10), "a process starts slowly"
    assert "cannot be used: " in line
    assert "hunter22" not in line
    assert not any(b"hunter22" in data for data in received)
