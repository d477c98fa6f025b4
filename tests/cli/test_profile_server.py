import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, error_line
from tests.profiling.load.servers import toy_server

SHORT = (
    "--budget-s",
    "2",
    "--point-s",
    "2",
    "--max-streams",
    "2",
    "--prompt-tokens",
    "8",
    "--output-tokens",
    "16",
)


def test_a_server_becomes_tables_for_calibrate(run: Run, tmp_path: Path) -> None:
    with toy_server(load_ms=0.0, base_ms=4.0) as (url, server):
        flags = ("--model", "base", "--adapters", "a0:8,a1", "--rank", "16", "--max-num-seqs", "32")
        done = run("profile", "server", url, *flags, *SHORT, "-o", tmp_path / "m")
    assert done.exit_code == 0, done.output
    for shown in ("a2-s16-b32-t2048", "operating points", "TTFT p50, ms", "--steps", "--runs"):
        assert shown in done.stdout
    assert {each["model"] for each in server.asked} == {"base", "a0", "a1"}
    noted = json.loads((tmp_path / "m" / "provenance.json").read_text())
    assert noted["a2-s16-b32-t2048"]["told_by_the_server"]["kv_tokens"] == 64_000


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--adapters", "a:900"), "--adapters: must be NAME or NAME:RANK"),
        ((), "must name an adapter"),
        (("--adapters", "a0"), "does not answer"),
    ],
)
def test_what_is_wrong_is_one_line(run: Run, tmp_path: Path, flags: tuple[str, ...], told: str) -> None:
    result = run("profile", "server", "http://127.0.0.1:9", *flags, *SHORT, "-o", tmp_path / "m")
    assert told in error_line(result)
