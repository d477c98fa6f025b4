import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import TrialState

from capplan import InputError
from capplan.models.calibration import smape
from capplan.models.training import FAMILIES
from capplan.models.training._candidates import (
    CandidateModel,
    SearchOptions,
    Tuned,
    candidate_model,
    quiet_storage,
    tune,
)
from capplan.models.training._evaluation import macro_f1
from tests.models.training.scenarios import scenarios

pytestmark = pytest.mark.long

KILLED = """
import sys
from pathlib import Path
from tests.models.training.test_search import boosted
boosted(budget=40, storage=Path(sys.argv[1]))
"""


def tuned(family: str, task: str = "throughput", progress: object = None, **given: object) -> Tuned:
    x, throughput, starved, groups = scenarios()
    target = throughput if task == "throughput" else starved
    options = SearchOptions(**{"budget": 4, "folds": 3, "seed": 1} | given)
    return tune(quick(family, task), x, target, groups, options, progress)


def quick(family: str, task: str) -> CandidateModel:
    """Return a candidate whose models are small."""
    whole = candidate_model(family, task)
    start = {**whole.start, "n_estimators": 10}
    distributions = {**whole.distributions, "n_estimators": IntDistribution(5, 25)}
    return replace(whole, distributions=distributions, start=start)


def boosted(budget: int, storage: Path | None, seed: int = 1) -> Tuned:
    return tuned("xgboost", "starvation", budget=budget, storage=storage, seed=seed)


def record(found: Tuned) -> list[tuple[object, ...]]:
    return [(sorted(trial.params.items(), key=str), trial.state, trial.value) for trial in found.trials]


@pytest.mark.parametrize("task", ["throughput", "starvation"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_search_depends_on_data_and_seed_alone(family: str, task: str) -> None:
    one = tuned(family, task, n_jobs=1)
    two = tuned(family, task, n_jobs=2)
    assert record(one) == record(two)
    assert one.params == two.params
    assert np.array_equal(one.out_of_fold, two.out_of_fold)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_winner_beats_the_constant_answer(family: str) -> None:
    _, throughput, starved, _ = scenarios()
    constant = np.full(throughput.size, np.median(throughput))
    assert smape(tuned(family).out_of_fold, throughput) < smape(constant, throughput)
    # Of one class alone it is at most 0.5.
    assert macro_f1(tuned(family, "starvation").out_of_fold, starved) > 0.5


def test_out_of_fold_predictions_are_of_models_that_had_not_seen_the_group() -> None:
    x, throughput, _, groups = scenarios()
    # A label that only the near twin gives away: who sees it scores well, nobody else can.
    secret = np.random.default_rng(0).uniform(1.0, 9.0, groups.max() + 1)[groups] * throughput
    found = tune(quick("forest", "throughput"), x, secret, groups, SearchOptions(budget=2, folds=3))
    assert smape(found.out_of_fold, secret) > 20.0


def test_the_winner_has_the_least_loss_of_complete_trials() -> None:
    found = boosted(budget=8, storage=None)
    complete = [trial for trial in found.trials if trial.state is TrialState.COMPLETE]
    assert found.params == min(complete, key=lambda trial: trial.value).params


@pytest.mark.parametrize("task", ["throughput", "starvation"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_search_starts_with_known_settings(family: str, task: str) -> None:
    first = tuned(family, task, budget=1).trials[0]
    assert first.params == dict(quick(family, task).start)


def test_progress_ends_with_all_done() -> None:
    seen: list[tuple[int, int]] = []
    tuned("xgboost", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 4) for done in range(5)]


def test_bad_trials_are_pruned() -> None:
    found = boosted(budget=25, storage=None)
    given_up = [trial for trial in found.trials if trial.state is TrialState.PRUNED]
    assert given_up
    assert len(given_up) < len(found.trials)
    assert all(trial.state is TrialState.COMPLETE for trial in found.trials[:5])


def test_a_larger_budget_continues_the_same_search(tmp_path: Path) -> None:
    journal = tmp_path / "study.jsonl"
    boosted(budget=7, storage=journal)
    resumed = boosted(budget=12, storage=journal)
    assert record(resumed) == record(boosted(budget=12, storage=None))
    # What is on disk already is not tried again.
    before = journal.read_bytes()
    assert record(boosted(budget=12, storage=journal)) == record(resumed)
    assert journal.read_bytes() == before


def test_a_killed_search_resumes_with_the_same_trials(tmp_path: Path) -> None:
    journal = tmp_path / "study.jsonl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(journal)])
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline and process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > 120:
            break
        time.sleep(0.02)
    process.kill()
    process.wait()
    written = journal.read_bytes()
    assert written
    journal.write_bytes(written[:-7])  # and the last line half written
    assert record(boosted(budget=14, storage=journal)) == record(boosted(budget=14, storage=None))


def test_studies_of_other_data_do_not_mix(tmp_path: Path) -> None:
    journal = tmp_path / "study.jsonl"
    boosted(budget=3, storage=journal, seed=1)
    assert record(boosted(budget=3, storage=journal, seed=2)) == record(
        boosted(budget=3, storage=None, seed=2)
    )


def test_a_damaged_journal_is_refused_in_one_line(tmp_path: Path) -> None:
    journal = tmp_path / "study.jsonl"
    first = b'{"op_code":0,"worker_id":"a","study_name":"b","directions":[1]}\n'
    for content in (
        *(b'{"a": 1}\n{"b": 2}\n', b"[]\n[]\n", b"not a journal\nat all", b"\xff\xfe\x00\n\n"),
        *(first + b"{}\n{}\n", first + b"[]\n[]\n", first + b"\xff\n" + first, b'{"op_code":77}\n' + first),
    ):
        journal.write_bytes(content)
        with pytest.raises(InputError) as refused:
            boosted(budget=1, storage=journal)
        assert "\n" not in str(refused.value)
        assert str(journal) in str(refused.value)
        assert journal.read_bytes() == content
    with pytest.raises(InputError):
        boosted(budget=1, storage=tmp_path / "missing" / "study.jsonl")


def test_optunas_log_level_is_restored(capsys: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    try:
        boosted(budget=1, storage=None)
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
    finally:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
    assert capsys.readouterr().err == ""


def test_an_empty_budget_and_one_class_are_refused() -> None:
    x, _, _, groups = scenarios()
    with pytest.raises(InputError):
        tuned("forest", budget=0)
    with pytest.raises(InputError):
        tune(candidate_model("forest", "starvation"), x, np.zeros(len(x), bool), groups, SearchOptions())


def test_two_searches_do_not_write_one_journal(tmp_path: Path) -> None:
    journal = tmp_path / "study.jsonl"
    with quiet_storage(journal), pytest.raises(InputError, match="in use by another search"):
        boosted(budget=1, storage=journal)
    assert len(boosted(budget=1, storage=journal).trials) == 1
