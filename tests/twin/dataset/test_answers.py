"""A row depends on design, seed and number of its scenario alone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from capplan import InfeasibleError, load_profile, simulate
from capplan.models.surrogates import FEATURES, feature_of, steady_share
from capplan.models.training import OUTCOMES
from capplan.models.training._data import LATENCIES
from capplan.spec import STARVED_BELOW
from capplan.twin.dataset import DESIGNS, Sample, draw
from capplan.twin.dataset._generate import NoRow, ScenarioRow, simulate_sample, simulate_span, simulation_seed
from capplan.twin.instance import SimulateSettings
from tests.twin.examples import profile, workload

SHIPPED = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
DURATION_S = 20.0


def sample(rate_rps: float = 0.5, a_max: int = 2) -> Sample:
    return Sample(
        7, workload(rate_rps=rate_rps), SimulateSettings(a_max=a_max, s_max=8, max_model_len=512) | ENGINE
    )


ENGINE = SimulateSettings(  # type: ignore[typeddict-item]
    max_num_seqs=8, max_num_batched_tokens=512, gpu_memory_utilization=0.9
)


def comparable(answers: list[ScenarioRow | NoRow]) -> list[object]:
    """Return comparable values; NaN is not equal to itself, but its text is."""
    return [
        each
        if isinstance(each, NoRow)
        else (each.number, each.group, each.features.tobytes(), str(each.outcomes))
        for each in answers
    ]


@pytest.mark.parametrize("design", DESIGNS)
def test_a_row_depends_on_its_number_alone(design: str) -> None:
    together = simulate_span(design, SHIPPED, 3, DURATION_S, 5, 17)
    alone = [simulate_span(design, SHIPPED, 3, DURATION_S, n, n + 1)[0] for n in range(5, 17)]
    assert comparable(together) == comparable(alone)
    assert [row.number for row in together if isinstance(row, ScenarioRow)] == [
        number for number, row in enumerate(together, start=5) if isinstance(row, ScenarioRow)
    ]


@pytest.mark.parametrize("design", DESIGNS)
def test_another_seed_gives_other_scenarios_and_rows(design: str) -> None:
    one, two = (simulate_span(design, SHIPPED, seed, DURATION_S, 0, 6) for seed in (0, 1))
    assert all(
        a != b for a, b in zip(comparable(one), comparable(two), strict=True) if not isinstance(a, NoRow)
    )


@pytest.mark.parametrize("design", DESIGNS)
def test_a_row_holds_the_result_of_simulate(design: str) -> None:
    asked = draw(design, SHIPPED, 1, 0, 12)
    answered = simulate_span(design, SHIPPED, 1, DURATION_S, 0, 12)
    rows = [(each, row) for each, row in zip(asked, answered, strict=True) if isinstance(row, ScenarioRow)]
    assert rows
    for each, row in rows:
        settings: SimulateSettings = {
            **each.settings,
            "duration_s": DURATION_S,
            "seed": simulation_seed(1, row.number),
        }
        result = simulate(each.workload, SHIPPED, **settings)
        named = dict(zip(OUTCOMES, row.outcomes, strict=True))
        same = set(OUTCOMES) - {"offered_drawn_tok_s", "step_ms_mean"}
        expected = {name: float(getattr(result, name)) for name in same}
        assert str({name: named[name] for name in sorted(same)}) == str(dict(sorted(expected.items())))
        assert named["offered_drawn_tok_s"] == result.offered_tok_s > 0
        busy_s = named["step_ms_mean"] / 1e3 * result.steps
        assert busy_s == pytest.approx(result.busy_fraction * DURATION_S)
        assert row.features.shape == (len(FEATURES),)
        assert row.features.dtype == np.float32
        assert feature_of(row.features, "a_max") == each.settings["a_max"]
        assert all(math.isfinite(named[name]) for name in set(OUTCOMES) - set(LATENCIES))


def test_loads_near_starvation_lie_around_the_edge_of_the_fluid_model() -> None:
    """Both sides of the edge are there, whether slots or capacity bind."""
    drawn = draw("near-starvation", SHIPPED, 2, 0, 64)

    def shares(factor: float) -> NDArray[np.float64]:
        samples = [dataclasses.replace(each, workload=each.workload.at_rates_times(factor)) for each in drawn]
        return steady_share(np.array([each.features(SHIPPED) for each in samples]))

    assert np.all(shares(1 / 1.51) >= STARVED_BELOW)
    assert np.all(shares(1.51) < STARVED_BELOW)
    starved = shares(1.0) < STARVED_BELOW
    assert 0.35 < starved.mean() < 0.65
    slots_bind = feature_of(np.array([each.features(SHIPPED) for each in drawn]), "slots_share") < 1.0
    assert 0.1 < slots_bind.mean() < 0.9


def test_designs_share_no_group() -> None:
    spans = [simulate_span(design, SHIPPED, 0, 5.0, 0, 40) for design in DESIGNS]
    groups = [{row.group for row in span if isinstance(row, ScenarioRow)} for span in spans]
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_similar_scenarios_share_a_group() -> None:
    for design in DESIGNS:
        drawn = draw(design, SHIPPED, 0, 0, 40)
        rows = [row for row in simulate_span(design, SHIPPED, 0, 5.0, 0, 40) if isinstance(row, ScenarioRow)]
        pairs = {(drawn[row.number].group, row.group) for row in rows}
        assert len(pairs) == len({ours for ours, _ in pairs}) == len({theirs for _, theirs in pairs})


def test_scenarios_beyond_memory_or_without_requests_have_no_row() -> None:
    engine = profile()
    assert isinstance(simulate_sample(sample(), engine, "paper-grid", 0, 30.0, 0), ScenarioRow)
    refused = simulate_sample(sample(a_max=4000), engine, "paper-grid", 0, 30.0, 0)
    assert refused is NoRow.REFUSED_FOR_MEMORY
    silent = simulate_sample(sample(rate_rps=0.0), engine, "paper-grid", 0, 30.0, 0)
    assert silent is NoRow.WITHOUT_REQUESTS


def test_another_reason_than_memory_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def starve(*_: object, **__: object) -> None:
        raise InfeasibleError("starves", "starvation")

    monkeypatch.setattr("capplan.twin.dataset._generate.simulate", starve)
    with pytest.raises(InfeasibleError, match="starves"):
        simulate_sample(sample(), profile(), "paper-grid", 0, 30.0, 0)


def test_seeds_of_simulations_differ_and_are_seeds() -> None:
    seeds = {simulation_seed(seed, number) for seed in (0, 1, 2**40) for number in range(500)}
    assert len(seeds) == 1500
    assert all(0 <= seed < 2**63 for seed in seeds)
