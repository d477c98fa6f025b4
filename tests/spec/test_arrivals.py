"""How arrivals are written down, and how each mistake is reported."""

import pytest
from pydantic import ValidationError

from capplan import Adapter, InputError, Lengths, Workload, load_workload
from capplan.spec import Arrivals, Burst, Renewal, Stickiness, Unpredictable


def workload(**changes):
    fields = {
        "base_model": "m",
        "adapters": [Adapter(name="a", rank=8, rate_rps=1.0)],
        "prompt_tokens": Lengths(mean=10),
        "output_tokens": Lengths(mean=5),
    }
    return Workload(**(fields | changes))


def modulation(kind, **fields):
    return {"modulation": {"kind": kind, **fields}}


STEPS = [[0, 1], [60, 3.5]]


@pytest.mark.parametrize(
    ("written", "understood"),
    [
        ("poisson", Arrivals.POISSON),
        ("deterministic", Arrivals.DETERMINISTIC),
        ({}, Arrivals.POISSON),
        ({"process": "deterministic"}, Arrivals.DETERMINISTIC),
        ({"process": "gamma", "cv": 2}, Renewal(process="gamma", cv=2.0)),
        (Renewal(process="weibull", cv=0.5), Renewal(process="weibull", cv=0.5)),
        ({"process": "unpredictable"}, Unpredictable()),
        (
            modulation("burst", factor=4, every_s=60, length_s=5),
            Renewal(modulation=Burst(factor=4, every_s=60, length_s=5)),
        ),
    ],
)
def test_a_name_or_a_mapping_is_understood(written, understood):
    assert workload(arrivals=written).arrivals == understood


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("uniform", "Workload.arrivals: must be 'poisson' or 'deterministic' (got 'uniform')"),
        (3, "Workload.arrivals: must be 'poisson' or 'deterministic' (got 3)"),
        ("gamma", "Workload.arrivals: must be written as {process: gamma, cv: 2} (got 'gamma')"),
        ("unpredictable", "must be written as {process: unpredictable}"),
        ({"process": "gama"}, "arrivals.process: must be one of poisson, deterministic, gamma"),
        ({"process": ["gamma"]}, "arrivals.process: must be one of poisson"),
        ({"proces": "gamma"}, "arrivals.proces: unknown key; did you mean 'process'?"),
        ({"process": "gamma"}, "Workload.arrivals.cv: is required for gamma"),
        ({"process": "poisson", "cv": 2.0}, "arrivals.cv: does not go with poisson (got 2.0)"),
        ({"process": "weibull", "cv": 0}, "arrivals.cv: must be a number from 0.01 to 50"),
        ({"process": "weibull", "cv": float("nan")}, "arrivals.cv: must be a number from 0.01 to 50"),
        ({"process": "unpredictable", "cv": 2}, "arrivals.cv: unknown key; valid keys are process, every_s"),
        ({"process": "unpredictable", "clip": 0.5}, "arrivals.clip: must be a finite number >= 1"),
        ({"process": "unpredictable", "lognormal_gaps": "x"}, "lognormal_gaps: must be 'mean_preserving' or"),
        ({"modulation": "diurnal"}, "arrivals.modulation: must be a mapping"),
        ({"modulation": {"amplitude": 1}}, "arrivals.modulation.kind: must be one of steps, diurnal, burst"),
        (
            modulation("daily"),
            "arrivals.modulation.kind: must be one of steps, diurnal, burst, shifting_skew",
        ),
        (modulation("diurnal"), "arrivals.modulation.amplitude: is required"),
        (
            modulation("diurnal", amplitude=1.5),
            "modulation.amplitude: must be a number from 0 to 1 (got 1.5)",
        ),
        (modulation("diurnal", amplitude=1, period_s=0), "modulation.period_s: must be a finite number > 0"),
        (modulation("diurnal", amplitude=1, phase=1), "modulation.phase: must be a number from 0 to below 1"),
        (modulation("steps", steps=[]), "modulation.steps: must not be empty"),
        (modulation("steps", steps=[[1, 2]]), "modulation.steps[0][0]: must begin at 0 seconds (got 1.0)"),
        (modulation("steps", steps=[*STEPS, [60, 1]]), "modulation.steps[2][0]: must ascend (got 60.0)"),
        (modulation("steps", steps=[[0, -1]]), "modulation.steps[0][1]: must be a finite number >= 0"),
        (modulation("steps", steps=[[0, 0]]), "modulation.steps: must have a factor above 0"),
        (modulation("steps", steps=[[0, 1, 2]]), "modulation.steps[0]: "),
        (modulation("steps", steps=STEPS, period_s=60), "period_s: must be after the last step (got 60"),
        (
            modulation("burst", factor=0.5, every_s=9, length_s=1),
            "modulation.factor: must be a finite number >= 1",
        ),
        (modulation("burst", factor=2, every_s=9, length_s=5, at_s=5), "modulation: a burst must end before"),
        (modulation("shifting_skew", from_rank=8, to_rank=8), "to_rank: must be below from_rank, which is 8"),
        (
            modulation("shifting_skew", from_rank=8, to_rank=4, swing=2),
            "modulation.swing: must be a number from",
        ),
    ],
)
def test_a_mistake_is_reported_with_key_rule_and_value(written, message):
    with pytest.raises(InputError) as caught:
        workload(arrivals=written)
    assert message in str(caught.value)
    assert "<" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"last": 0, "probability": 0.5}, "stickiness.last: must be a whole number from 1 to 10000"),
        ({"last": 1, "probability": 1.5}, "stickiness.probability: must be a number from 0 to 1"),
        ({"last": 1}, "stickiness.probability: is required"),
    ],
)
def test_a_mistake_in_stickiness_is_reported(written, message):
    with pytest.raises(InputError) as caught:
        workload(stickiness=written)
    assert message in str(caught.value)


def test_equal_processes_have_equal_digests_and_different_ones_do_not():
    written = [
        "deterministic",
        {"process": "gamma", "cv": 2.0},
        {"process": "weibull", "cv": 2.0},
        {"process": "unpredictable"},
        modulation("steps", steps=STEPS),
        modulation("steps", steps=STEPS, period_s=90),
    ]
    digests = {workload(arrivals=each).digest() for each in written}
    assert len(digests | {workload().digest()}) == 7
    assert workload(arrivals={"process": "poisson"}).digest() == workload().digest()
    assert workload(stickiness=Stickiness(last=1, probability=0.5)).digest() != workload().digest()


def test_processes_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Unpredictable().factor = 3.0


FILE = """\
base_model: m
profile: p
requests:
  prompt_tokens: {mean: 10}
  output_tokens: {mean: 5}
  stickiness: {last: 4, probability: 0.3}
  arrivals:
    process: gamma
    cv: 2.5
    modulation: {kind: diurnal, amplitude: 0.5}
adapters: [{name: a, rank: 8, rate_rps: 1}]
"""


def test_a_file_says_the_same(tmp_path):
    path = tmp_path / "workload.yaml"
    path.write_text(FILE, encoding="utf-8")
    w = load_workload(path)
    assert (w.arrivals.process, w.arrivals.cv, w.arrivals.modulation.period_s) == ("gamma", 2.5, 86_400)
    assert w.stickiness == Stickiness(last=4, probability=0.3)
    path.write_text(FILE.replace("amplitude: 0.5", "amplitude: 5"), encoding="utf-8")
    with pytest.raises(InputError, match=r"yaml:10: requests\.arrivals\.modulation\.amplitude: must be a"):
        load_workload(path)
