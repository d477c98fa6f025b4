import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import process, run

__all__ = ["process", "run"]


@pytest.fixture
def case(cases_dir: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a writable copy of the folder of a case, by its name or number; its programs can be run."""

    def copied(name: str) -> Path:
        (folder,) = cases_dir.glob(f"{name}*")
        shutil.copytree(folder, tmp_path / name, copy_function=shutil.copyfile)
        for path in (tmp_path / name).rglob("*"):
            path.chmod(0o755)
        return tmp_path / name

    return copied
