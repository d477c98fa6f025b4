import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import settings

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
