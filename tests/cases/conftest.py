import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import process, run

__all__ = ["process", "run"]


@pytest.fixture
def case(cases_dir: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a writable copy of a case's folder."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(cases_dir / name, tmp_path / name, copy_function=shutil.copyfile))

    return copied
