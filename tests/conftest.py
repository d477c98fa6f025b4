import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
REFERENCE_DIR = Path(__file__).resolve().parents[2] / "shared" / "reference"
CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores already
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores Ctrl-C for what it runs in the background, and processes of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# CI must give the same answer twice: fixed examples, no deadline on a busy machine.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("dev", deadline=None, max_examples=50)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which no test is selected: each worker would import them."""
    without = config.getoption("markexpr")
    if collection_path.suffix != ".py" or not re.fullmatch(r"not \w+( and not \w+)*", without):
        return None
    marks = re.search(r"^pytestmark = (.*)", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    left_out = {f"pytest.mark.{mark}" for mark in re.findall(r"not (\w+)", without)}
    return True if marks and left_out & set(re.findall(r"pytest\.mark\.\w+", marks[1])) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True


def output_of_python(*arguments: object, **variables: str) -> str:
    """Run Python in this checkout with environment variables; it must succeed. Return its output."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def http_server(respond: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Respond to GET requests at a loopback address, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def reply(handler: BaseHTTPRequestHandler, data: bytes, length: int | None = None, status: int = 200) -> None:
    """Answer a request; `length` is what the header says of the data."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """Other people's measurements and recordings, kept in a folder beside the checkout."""
    if not REFERENCE_DIR.is_dir():
        pytest.skip("no ../shared/reference beside the checkout with the published measurements")
    return REFERENCE_DIR


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Public traces of requests, kept in a folder beside the checkout."""
    if not TRACES.is_dir():
        pytest.skip("no ../shared/traces beside the checkout: public traces are missing")
    return TRACES


@pytest.fixture(scope="session")
def cases_dir() -> Path:
    """Inputs made after public bug reports, kept in a folder beside the checkout."""
    if not CASES.is_dir():
        pytest.skip("no ../shared/cases beside the checkout: inputs of public bug reports are missing")
    return CASES
