from pathlib import Path

import pytest

from capplan.models import Surrogate
from capplan.models.surrogates import KINDS, surrogate_bytes
from tests.models.surrogates.making import surrogates


@pytest.fixture(params=KINDS)
def surrogate(request: pytest.FixtureRequest) -> Surrogate:
    """One of each kind."""
    return surrogates()[request.param]


@pytest.fixture
def file(surrogate: Surrogate, tmp_path: Path) -> Path:
    """The same in a file."""
    path = tmp_path / f"s.{surrogate.kind}.{'json' if surrogate.kind == 'tree' else 'npz'}"
    path.write_bytes(surrogate_bytes(surrogate))
    return path
