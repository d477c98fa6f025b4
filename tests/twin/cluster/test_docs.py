"""The programs of docs/cluster.md run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_the_examples_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", Path("docs/cluster.md").read_text(), re.DOTALL):
        exec(block, names)
    result, base = names["result"], names["base"]
    assert result.submitted == base.submitted == sum(result.requests_per_instance)
