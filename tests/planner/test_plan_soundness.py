"""The benchmark of plans against what they serve: its draws and its findings."""

from pathlib import Path

import pytest

from benchmarks.plan_soundness import Outcome, horizon, misplaced, starving_hours, structure, summary
from benchmarks.soundness_workloads import draw_case
from capplan import load_workload, plan
from capplan.spec import BaseTraffic, Burst, Renewal
from capplan.twin.cluster import Instance, simulate_cluster
from tests.twin.cluster.workloads import PROFILE, even


@pytest.mark.parametrize("number", [1, 3, 7])
def test_the_same_seed_and_number_draw_the_same_workload(tmp_path: Path, number: int) -> None:
    first, second = (draw_case(tmp_path / name, 5, number) for name in ("a", "b"))
    files = [sorted((p.name, p.read_bytes()) for p in case.path.parent.iterdir()) for case in (first, second)]
    assert files[0] == files[1]
    assert first.solver == second.solver
    assert load_workload(first.path).digest() == load_workload(second.path).digest()


def test_base_traffic_and_arguments_of_planning_are_drawn(tmp_path: Path) -> None:
    case = draw_case(tmp_path, 1, 45)
    assert case.options == {"robust": 0.9}
    base = load_workload(case.path).base
    assert base is not None
    assert base.rate_rps > 0.0


def test_the_longest_period_of_the_arrivals_is_simulated() -> None:
    hour = even(2, 0.2)
    assert horizon(hour) == 3600.0
    burst = Burst(factor=2.0, every_s=7200.0, length_s=60.0, at_s=5400.0)
    base = BaseTraffic(rate_rps=0.1, arrivals=Renewal(modulation=burst))
    assert horizon(hour.replace(base=base)) == 7200.0


def test_a_plan_against_its_constraints_is_found() -> None:
    workload = even(2, 0.2).replace(gpus={"count": 1}, profile=PROFILE.name)
    made = plan(workload, seeds=1)
    assert not list(structure(made, workload))
    apart = [a.replace(apart_from=("a1",)) if a.name == "a0" else a for a in workload.adapters]
    assert list(misplaced(made, workload.replace(adapters=apart))) == ["a0: with a1"]
    fixed = workload.replace(engine={"max_num_seqs": 7})
    assert any("max_num_seqs is" in words for words in structure(made, fixed))


def test_an_hour_that_ends_with_a_queue_is_found() -> None:
    slow = Instance(PROFILE, a_max=4, s_max=8, max_num_seqs=1)
    fleet = simulate_cluster(even(4, 1.0), [slow], duration_s=7200.0)
    hours = dict(starving_hours(fleet, 0, 7200.0, 0.9))
    assert len(hours) == 2
    assert min(hours.values()) > 1.0


def test_starving_plans_are_counted() -> None:
    broken = Outcome(0, "capplan", "verified", broken=["g0 served_fraction: 2.0 +- 0.1 of the bound"])
    text = summary([broken, Outcome(1, "capplan", "verified"), Outcome(2, "greedy", "refused")])
    assert "| verified plans that starve | 1 |" in text
