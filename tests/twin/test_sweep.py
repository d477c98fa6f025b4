"""Sweeps answer the same wherever they run."""

import dataclasses
import multiprocessing
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capplan import InfeasibleError, InputError, SimulationResult, simulate, sweep
from capplan.twin import DetailedResult, Job, sweep_detailed
from capplan.twin._sweep import in_parallel
from capplan.twin.instance import SimulateSettings
from tests.conftest import output_of_python
from tests.twin.examples import profile, workload

pytestmark = pytest.mark.process


def jobs() -> list[Job]:
    """Return nine jobs, of which one does not fit in memory."""
    busy, engine = workload(adapters=6, rate_rps=2.0), profile(load_ms=5)
    points = [(a_max, seed) for a_max in (1, 3) for seed in range(4)]
    points.insert(5, (4000, 0))
    return [
        Job(busy, engine, SimulateSettings(a_max=a, s_max=8, seed=seed, duration_s=30.0, max_model_len=512))
        for a, seed in points
    ]


def told(answers: list[SimulationResult | InfeasibleError]) -> list[Any]:
    """Return comparable values: the reason of an error, or a result without its computing time."""
    return [
        str(each) if isinstance(each, InfeasibleError) else dataclasses.replace(each, wall_s=0.0)
        for each in answers
    ]


def test_one_and_two_workers_give_the_results_of_simulate() -> None:
    one, two = (sweep(jobs(), workers=workers) for workers in (1, 2))
    assert told(one) == told(two)
    assert isinstance(one[5], InfeasibleError)
    first = jobs()[0]
    assert told(one)[0] == dataclasses.replace(
        simulate(first.workload, first.profile, **first.settings), wall_s=0.0
    )
    assert len({each.e2e_s_mean for each in one if isinstance(each, SimulationResult)}) == 8


def test_detailed_results_are_equal_in_other_processes() -> None:
    one, two = (sweep_detailed(jobs()[:3], workers=workers) for workers in (1, 2))
    for ours, theirs in zip(one, two, strict=True):
        assert isinstance(ours, DetailedResult)
        assert isinstance(theirs, DetailedResult)
        for part in ("overall", "by_rank", "by_adapter", "slo"):  # as text: NaN is not equal to itself
            assert repr(getattr(ours, part)) == repr(getattr(theirs, part))
        for name, column in ours.requests.columns().items():
            np.testing.assert_array_equal(column, theirs.requests.columns()[name])
        for field in dataclasses.fields(ours.series):
            np.testing.assert_array_equal(
                getattr(ours.series, field.name), getattr(theirs.series, field.name)
            )


def test_progress_is_called_after_every_result() -> None:
    calls: list[tuple[int, int]] = []
    sweep(jobs(), workers=2, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 9) for done in range(1, 10)]


def test_a_sweep_without_jobs_is_empty() -> None:
    assert sweep([], workers=2) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_invalid_job_stops_the_sweep_with_its_error(workers: int) -> None:
    wrong = [*jobs(), dataclasses.replace(jobs()[0], settings=SimulateSettings(a_max=0, s_max=8))]
    with pytest.raises(InputError, match=r"^a_max: must be a whole number"):
        sweep(wrong, workers=workers)


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2"])
def test_an_invalid_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(InputError, match=r"^workers: must be a whole number from 1 to 1024"):
        sweep(jobs(), workers=workers)


def test_results_come_in_order_and_one_by_one() -> None:
    answers = in_parallel(partial(pow, 2), range(50), workers=2)
    assert next(answers) == 1
    answers.close()
    assert list(in_parallel(partial(pow, 2), range(50), workers=2)) == [2**n for n in range(50)]


def end_worker(item: int) -> None:
    """End a worker process as the system does that runs out of memory."""
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_ends_the_sweep_with_an_error() -> None:
    with pytest.raises(InputError, match="workers: a worker process was ended from outside"):
        list(in_parallel(end_worker, range(8), workers=2))


_SPAWNED = """
import multiprocessing
from tests.twin.test_sweep import jobs, told
from capplan.twin._sweep import sweep
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    print(repr(told(sweep(jobs(), workers=2))))
"""


@pytest.mark.long
def test_spawned_workers_give_the_same_results(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_SPAWNED)
    assert output_of_python(program).strip() == repr(told(sweep(jobs(), workers=1)))


def test_a_missing_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError) as caught:
        sweep(jobs(), ray_address="auto")
    assert str(caught.value) == "ray_address: needs Ray: pip install '.[ray]', in the checkout"


@pytest.mark.long
def test_a_ray_cluster_gives_the_same_results() -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    program = (
        "from tests.twin.test_sweep import assert_a_ray_cluster_gives_the_same_results as check; check()"
    )
    # In a process of its own: Ray ends the process whose node dies.
    output_of_python("-c", program)


def assert_a_ray_cluster_gives_the_same_results() -> None:
    calls: list[tuple[int, int]] = []
    clustered = sweep(jobs(), ray_address="local", progress=lambda done, total: calls.append((done, total)))
    assert told(clustered) == told(sweep(jobs(), workers=1))
    assert calls[-1] == (9, 9)
    wrong = dataclasses.replace(jobs()[0], settings=SimulateSettings(a_max=0, s_max=8))
    with pytest.raises(InputError, match=r"^a_max: must be a whole number"):
        sweep([wrong], ray_address="local")
    with pytest.raises(InputError, match=r"^ray_address: must be the address of a Ray cluster"):
        sweep(jobs(), ray_address="127.0.0.1:1")
