from pathlib import Path

import pytest

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """Public traces of requests, kept in a folder beside the checkout."""
    if not TRACES.is_dir():
        pytest.skip("no ../shared/traces beside the checkout: public traces are not at hand")
    return TRACES
