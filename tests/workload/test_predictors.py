"""Predicted output lengths."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.engine._engine import OutputPredictor
from capplan.models.training import PredictorOptions, train_predictor
from capplan.spec import Predictor
from capplan.workload import Requests, length_classes, predicted_tokens


def requests_of(outputs, prompts=None, adapters=None):
    count = len(outputs)
    return Requests(
        np.arange(count, dtype=np.int64) * 1_000_000_000,
        np.ones(count, np.int32) if adapters is None else np.asarray(adapters, np.int32),
        np.ones(count, np.int32) if prompts is None else np.asarray(prompts, np.int32),
        np.asarray(outputs, np.int32),
    )


NAMES = ["a", "b", "c"]
LONG_TAILED = requests_of(np.random.default_rng(0).geometric(0.02, 20_000))


def test_oracle_is_the_output_itself():
    assert predicted_tokens(LONG_TAILED, Predictor(), 0).tolist() == LONG_TAILED.output_tokens.tolist()


@pytest.mark.parametrize("accuracy", [1.0, 0.8, 0.6, 0.0])
def test_classes_are_right_as_often_as_set(accuracy):
    predicted = predicted_tokens(LONG_TAILED, Predictor(kind="classes", accuracy=accuracy), 3)
    classes = length_classes(LONG_TAILED.output_tokens)
    right = classes.tokens[classes.classify(LONG_TAILED.output_tokens)]
    assert set(predicted) <= set(classes.tokens)
    assert np.mean(predicted == right) == pytest.approx(accuracy, abs=0.01)


def test_wrong_classes_are_equally_likely():
    predicted = predicted_tokens(LONG_TAILED, Predictor(kind="classes", accuracy=0.0), 3)
    classes = length_classes(LONG_TAILED.output_tokens)
    shortest = classes.classify(LONG_TAILED.output_tokens) == 0
    counts = np.unique(predicted[shortest], return_counts=True)[1]
    assert counts / shortest.sum() == pytest.approx(np.full(4, 0.25), abs=0.03)


def test_a_better_predictor_keeps_the_right_classes_of_a_worse_one():
    """Accuracies are compared under common random numbers."""
    classes = length_classes(LONG_TAILED.output_tokens)
    right = classes.tokens[classes.classify(LONG_TAILED.output_tokens)]
    worse, better = (
        predicted_tokens(LONG_TAILED, Predictor(kind="classes", accuracy=accuracy), 1) == right
        for accuracy in (0.6, 0.8)
    )
    assert np.all(better[worse])


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.floats(0, 1), st.integers(0, 9))
def test_classes_of_any_outputs_partition_them(outputs, accuracy, seed):
    classes = length_classes(np.array(outputs))
    of = classes.classify(np.array(outputs))
    assert set(of) == set(range(classes.tokens.size))
    assert np.all(np.diff(classes.tokens) >= 0)
    predicted = predicted_tokens(requests_of(outputs), Predictor(kind="classes", accuracy=accuracy), seed)
    assert predicted.dtype == np.int64
    assert predicted.min() >= min(outputs)
    assert predicted.max() <= max(outputs)


def test_no_requests():
    for predictor in (Predictor(), Predictor(kind="classes", accuracy=0.8)):
        assert predicted_tokens(requests_of([]), predictor, 0).size == 0


@pytest.fixture(scope="module")
def learnable():
    """Outputs that follow from adapter and prompt."""
    rng = np.random.default_rng(1)
    adapters, prompts = rng.integers(0, 4, 3000), rng.integers(1, 200, 3000)
    return requests_of(10 + 90 * adapters + prompts, prompts, adapters)


def test_a_learned_predictor_finds_what_can_be_learned(learnable, tmp_path: Path):
    trained = train_predictor(learnable, NAMES, PredictorOptions(trees=30))
    assert trained.accuracy > 0.85
    assert trained.baseline < 0.4
    assert trained.trained + trained.held_out == 3000
    file = tmp_path / "predictor.json"
    file.write_bytes(trained.content)
    predicted = predicted_tokens(learnable, Predictor(kind="learned", file=str(file)), 0, NAMES)
    assert set(predicted) <= set(trained.class_tokens)
    assert np.corrcoef(predicted, learnable.output_tokens)[0, 1] > 0.9
    assert train_predictor(learnable, NAMES, PredictorOptions(trees=30)).content == trained.content


def test_a_learned_predictor_finds_adapters_by_name(learnable, tmp_path: Path):
    """Instances of a plan and engines number their adapters otherwise."""
    file = tmp_path / "predictor.json"
    file.write_bytes(train_predictor(learnable, NAMES, PredictorOptions(trees=10)).content)
    learned = Predictor(kind="learned", file=str(file))
    expected = predicted_tokens(learnable, learned, 0, NAMES)
    part = learnable.adapter != 1
    numbers = np.array([0, 0, 2, 1])[learnable.adapter[part]]  # "c", "b", without "a"
    of_part = requests_of(learnable.output_tokens[part], learnable.prompt_tokens[part], numbers)
    of_part = of_part._replace(arrival_ns=learnable.arrival_ns[part])
    assert np.array_equal(predicted_tokens(of_part, learned, 0, ["c", "b"]), expected[part])
    engine = OutputPredictor(learned, 0, time_s=lambda: learnable.arrival_ns[number] / 1e9)
    for number in range(20):
        name = [None, *NAMES][learnable.adapter[number]]
        assert engine.predict(int(learnable.prompt_tokens[number]), name, 1000) == expected[number]
    unknown = [predicted_tokens(learnable, learned, 0, names) for names in (["x", "y", "z"], ["u", "v", "w"])]
    assert np.array_equal(*unknown)


@pytest.mark.parametrize("content", [None, b"", b"[1]", b'{"learner": {}}', b"\x80\x04pickle"])
def test_a_wrong_file_is_refused(content, tmp_path: Path):
    file = tmp_path / "predictor.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=r"predictor\.(file|json)"):
        predicted_tokens(LONG_TAILED, Predictor(kind="learned", file=str(file)), 0)


def test_too_few_or_equal_outputs_cannot_be_learned():
    with pytest.raises(InputError, match="at least 200 requests"):
        train_predictor(requests_of([1, 2, 3]), NAMES)
    with pytest.raises(InputError, match="different lengths"):
        train_predictor(requests_of([7] * 500), NAMES)


def test_a_file_without_an_end_is_refused():
    with pytest.raises(InputError, match=r"/dev/zero: must be a regular file, not a device"):
        predicted_tokens(LONG_TAILED, Predictor(kind="learned", file="/dev/zero"), 0)
