"""Points of the closed loop on vLLM, with a stand-in for its server."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the model is written with torch (extra `engine`)")
pytest.importorskip("tokenizers", reason="its tokenizer is written with tokenizers (extra `engine`)")

from benchmarks import closed_loop_vllm
from benchmarks.closed_loop_vllm import ADAPTERS, PROFILED_SLOTS, Loop, parsed
from capplan.profiling.load import BenchResult, LoadMetrics
from capplan.profiling.load._result import ClientHealth, Failure, MeasuredStats
from tests.cli.examples import profile_document

NAME = "adapters4-slots4-load40"


def result(**changes: Any) -> BenchResult:
    stats = MeasuredStats(mean=1.0)
    numbers = dict.fromkeys(("failed", "rejected", "executing", "waiting"), 0)
    rates = ("throughput_tok_s", "input_tok_s", "output_tok_s", "offered_tok_s", "request_rate_rps")
    latencies = ("ttft_s", "ttft_sent_s", "e2e_s", "tpot_ms", "tpt_ms", "itl_ms")
    overall = LoadMetrics(
        name="",
        submitted=5,
        completed=5,
        served_fraction=1.0,
        starved=False,
        **{**numbers, "failed": changes.pop("failed", 0)},
        **dict.fromkeys(rates, 10.0),
        **dict.fromkeys(latencies, stats),
    )
    return BenchResult(
        created_by="a test",
        started_at="",
        url="",
        base_model="base",
        warm_up_s=0.0,
        duration_s=2.0,
        overall=overall,
        client=ClientHealth(lag_ms=stats, kept_up=changes.pop("kept_up", True)),
        **changes,
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a loop whose first stages are done, with a given load-test result."""
    profile = profile_document()
    profile["model"]["hf_ids"] = ["base"]
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    for folder, name in (("model", "config"), *((f"a{at}", "adapter_config") for at in range(ADAPTERS))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.json").touch()
    for slots in PROFILED_SLOTS:
        (tmp_path / f"profiled-{slots}").touch()

    @contextmanager
    def server(*_: object) -> Iterator[str]:
        yield "http://127.0.0.1:9"

    def start(found: BenchResult | None, *words: str) -> Any:
        monkeypatch.setattr(closed_loop_vllm, "oracle_server", server)
        monkeypatch.setattr(closed_loop_vllm, "bench", lambda *_, **__: found)
        known = ("--oracle", "python", "--out", str(tmp_path), "--only", NAME, "--duration", "20")
        return Loop(parsed([*known, *words])).run()

    return start


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partial": True}, "stopped before its time"),
        ({"failed": 2}, "2 requests failed, 0 were rejected"),
        (
            {"failed": 2, "failures": (Failure(kind="http_503", requests=2, message="overloaded"),)},
            r"2 requests failed, 0 were rejected: http_503 2 \(overloaded\)",
        ),
        ({"kept_up": False}, "could not keep up"),
    ],
)
def test_a_void_point_leaves_no_file(
    run: Callable[..., Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit, match=rf"{NAME} is void: .*{message}"):
        run(result(**change))
    assert not (tmp_path / f"{NAME}.json").exists()
    run(result())
    assert (tmp_path / f"{NAME}.json").exists()


def test_a_point_is_predicted_with_the_seed_of_its_measurement(run: Callable[..., Any]) -> None:
    ((_, (first,)),) = run(result(), "--seed", "3")
    ((_, (again,)),) = run(None, "--seed", "0")  # the file is there
    assert [each.predicted for each in again] == [each.predicted for each in first]
