"""The wheel, away from the checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from tests.cli.examples import WORKLOAD, profile_document

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and the wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    source = [
        sys.executable,
        "-c",
        "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])",
        str(folder),
    ]
    subprocess.run(source, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    wheel = [
        sys.executable,
        "-c",
        "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])",
        str(folder),
    ]
    subprocess.run(wheel, cwd=unpacked, check=True, capture_output=True, timeout=300)
    return folder


@pytest.mark.process
@pytest.mark.long
def test_the_installed_wheel_plans_without_the_checkout(built: Path, tmp_path: Path) -> None:
    import json

    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    # Dependencies are those of this environment; its own capplan comes after the installed one.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    work = tmp_path / "work"
    work.mkdir()
    (work / "w.yaml").write_text(WORKLOAD.replace(", path: adapters/legal", ""))
    (work / "profile.json").write_text(json.dumps(profile_document()))
    environment = {"PATH": os.environ["PATH"], "HOME": str(work)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(python), *words], cwd=work, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(tmp_path / "venv") in run("-c", "import capplan; print(capplan.__file__)")
    run("-m", "capplan", "plan", "w.yaml", "-o", "plan.json", "--quiet")
    assert json.loads((work / "plan.json").read_text())["verification"]["ok"]
    run("-m", "capplan", "export", "plan.json", "--target", "kubernetes", "-o", "deploy")
    assert "profiles" in run("-m", "capplan", "--help")
    assert "h100-80g/llama-3.1-8b" in run("-m", "capplan", "profiles", "--json")
