"""The closed loop on vLLM, shortened, where vLLM is installed (extra `oracle`)."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from benchmarks.closed_loop_vllm import Loop, parsed

PYTHON = os.environ.get(
    "CAPPLAN_ORACLE_PYTHON", sys.executable if importlib.util.find_spec("vllm") is not None else ""
)
"""A Python that has vLLM: this one, or one in an environment of its own."""
POINTS = ("adapters4-slots4-load40", "adapters16-slots1-load150", "adapters16-slots8-load150")

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="needs vllm (extra `oracle`), or CAPPLAN_ORACLE_PYTHON"),
]


def test_a_profile_of_a_server_predicts_vllm(tmp_path: Path) -> None:
    words = ["--oracle", PYTHON, "--out", str(tmp_path), "--budget-s", "40", "--point-s", "4"]
    runs = Loop(parsed([*words, "--duration", "20", "--only", *POINTS])).run()
    assert [held.name for held, _ in runs] == list(POINTS)
    by_slots = {}
    for held, comparisons in runs:
        throughput = next(each for each in comparisons if each.name == "throughput_tok_s")
        # Short profiles of a machine that others use are rough; the benchmark has the narrow bounds.
        assert throughput.error < 25.0, held.name
        by_slots[held.slots] = throughput
    assert by_slots[1].measured < by_slots[8].measured
    assert by_slots[1].predicted < by_slots[8].predicted
