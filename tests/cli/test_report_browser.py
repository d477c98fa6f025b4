"""Reports in a real browser: every figure is drawn, and nothing is loaded or logged.

These tests need Chromium (`apt-get install chromium`) and are skipped without it:
`pytest -m slow tests/cli -k browser`.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.cli.conftest import Run
from tests.cli.examples import write_inputs
from tests.cli.test_report import figures_of

pytestmark = pytest.mark.process

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
)


def browse(page: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    profile = page.parent / f"browser-{len(list(page.parent.iterdir()))}"
    command = [str(CHROMIUM), *QUIET, f"--user-data-dir={profile}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def drawn(page: Path, seen: "subprocess.CompletedProcess[str]") -> None:
    """Check that every figure of a page is drawn and that the browser reports no error."""
    assert seen.stdout.count('class="chart js-plotly-plot"') == len(figures_of(page.read_text())) > 5
    assert re.search(r"CONSOLE|Content Security Policy", seen.stderr) is None


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine to look at the report with")
def test_a_browser_draws_the_whole_report_and_complains_about_nothing(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "sim.html"
    run("simulate", write_inputs(tmp_path), "--max-loras", "2,4", "--duration", "60", "--html", page)
    seen = browse(page, "--dump-dom")
    drawn(page, seen)
    picture = tmp_path / "picture.png"
    browse(page, f"--screenshot={picture}", "--window-size=1280,6000")
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (6000, 1280)
    # Blue lines of the first curve, on every chart of the page from top to bottom.
    blue = (abs(pixels - (0x1F / 255, 0x88 / 255, 0xCC / 255)) < 0.05).all(axis=2)
    assert blue.any(axis=1).sum() > 500
