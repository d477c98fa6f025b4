import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capplan import errors, load_surrogate
from capplan.models import Surrogate
from capplan.models.learning.train import train_surrogate
from capplan.models.surrogates.features import FEATURES, feature_vector
from capplan.models.surrogates.files import profile_digest, read_surrogate, surrogate_bytes
from capplan.spec import Lengths
from tests.twin.examples import profile, workload

SETTINGS = {"a_max": 4, "s_max": 8, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
CAPACITY_TOK_S = 3000.0
HOPED_TOK_S = 3600.0
"""What the mean field takes the capacity for; the forests have the rest to learn."""


@pytest.fixture(scope="module")
def surrogate() -> Surrogate:
    """Trained on an engine of known capacity: the share served is what fits."""
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 100, (800, len(FEATURES))).astype(np.float32)
    offered = np.exp(rng.uniform(np.log(300), np.log(30_000), 800)).astype(np.float32)
    x[:, FEATURES.index("offered_tok_s")] = offered
    x[:, FEATURES.index("load_over_saturation")] = offered / HOPED_TOK_S
    throughput = np.minimum(offered.astype(float), CAPACITY_TOK_S)
    return train_surrogate(profile(), x, throughput, throughput / offered)


@pytest.fixture
def file(surrogate: Surrogate, tmp_path: Path) -> Path:
    path = tmp_path / "s.forest.npz"
    path.write_bytes(surrogate_bytes(surrogate))
    return path


def asked(offered_tok_s: float) -> np.ndarray:
    x = np.full(len(FEATURES), 50, np.float32)
    x[FEATURES.index("offered_tok_s")] = offered_tok_s
    x[FEATURES.index("load_over_saturation")] = offered_tok_s / HOPED_TOK_S
    return x


@pytest.mark.parametrize("offered", [500.0, 1500.0, 6000.0, 20_000.0])
def test_it_learns_what_it_was_shown(surrogate: Surrogate, offered: float) -> None:
    answer = surrogate.answer(asked(offered))
    expected = min(offered, CAPACITY_TOK_S)
    assert answer.throughput_tok_s == pytest.approx(expected, rel=0.1)
    assert answer.low_tok_s <= answer.throughput_tok_s <= answer.high_tok_s
    assert answer.starved == (offered > CAPACITY_TOK_S)
    assert answer.in_range


def test_its_report_is_of_scenarios_it_had_not_seen(surrogate: Surrogate) -> None:
    report: dict[str, Any] = surrogate.report
    assert report["scenarios"] == 800
    assert 0 < report["throughput_smape"] < 3
    assert report["throughput_smape_offered_load"] > report["throughput_smape"]
    assert report["starvation_macro_f1"] > 0.95


def test_nine_of_ten_unseen_answers_lie_in_the_interval(surrogate: Surrogate) -> None:
    rng = np.random.default_rng(1)
    offered = np.exp(rng.uniform(np.log(300), np.log(30_000), 400))
    inside = [
        answer.low_tok_s <= min(load, CAPACITY_TOK_S) <= answer.high_tok_s
        for load in offered
        for answer in [surrogate.answer(asked(load))]
    ]
    assert np.mean(inside) > 0.85


@pytest.mark.parametrize(
    ("offered", "in_range"), [(299.0, False), (301.0, True), (29_000.0, True), (31_000.0, False)]
)
def test_a_question_outside_the_training_range_says_so(
    surrogate: Surrogate, offered: float, in_range: bool
) -> None:
    assert surrogate.answer(asked(offered)).in_range == in_range


def test_a_workload_is_answered_by_its_features(surrogate: Surrogate) -> None:
    features = feature_vector(workload(), profile(), **SETTINGS, gpu_memory_utilization=0.9)
    assert surrogate.predict(workload(), **SETTINGS) == surrogate.answer(features)


def test_features_are_what_their_names_say() -> None:
    varied = workload(adapters=2, rate_rps=0.5)
    own = varied.adapters[1].replace(rank=16, rate_rps=1.5, prompt_tokens=Lengths(mean=164))
    varied = varied.replace(adapters=(varied.adapters[0], own))
    x = dict(
        zip(FEATURES, feature_vector(varied, profile(), **SETTINGS, gpu_memory_utilization=0.9), strict=True)
    )
    assert x["adapters"] == 2
    assert x["rate_sum_rps"] == 2.0
    assert x["rate_std_rps"] == 0.5
    assert (x["rank_max"], x["rank_mean"], x["rank_std"]) == (16, 12, 4)
    assert x["prompt_mean_tokens"] == pytest.approx(0.25 * 64 + 0.75 * 164)
    assert x["prompt_std_tokens"] == pytest.approx(100 * (0.25 * 0.75) ** 0.5)
    assert x["offered_tok_s"] == pytest.approx(0.5 * 80 + 1.5 * 180)
    assert x["a_max"] == 4


def test_a_file_gives_back_the_surrogate(surrogate: Surrogate, file: Path) -> None:
    again = read_surrogate(file, profile())
    for offered in (400.0, 2900.0, 25_000.0):
        assert again.answer(asked(offered)) == surrogate.answer(asked(offered))
    assert again.report == surrogate.report
    assert surrogate_bytes(again) == file.read_bytes()


def refused(path: Path, other: Any = None) -> str:
    with pytest.raises(errors.InputError) as caught:
        read_surrogate(path, other or profile())
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    return text


def test_a_missing_file_names_the_command_that_makes_one(tmp_path: Path) -> None:
    assert "capplan train test/tiny/vllm-0.8.5" in refused(tmp_path / "absent.npz")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(file: Path, keep: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    assert "damaged" in refused(file)


def test_garbled_compressed_data_is_refused(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        member = archive.getinfo("throughput_value.npy")
    data = bytearray(file.read_bytes())
    name, extra = (int.from_bytes(data[member.header_offset + i :][:2], "little") for i in (26, 28))
    start = member.header_offset + 30 + name + extra
    data[start : start + 8] = b"\xff" * 8  # no kind of block begins so
    file.write_bytes(data)
    assert "damaged" in refused(file)


def test_a_surrogate_of_another_profile_is_refused(file: Path) -> None:
    assert "profile_digest does not match" in refused(file, profile(step_ms=11.0))


def test_a_change_of_provenance_alone_keeps_the_surrogate(file: Path) -> None:
    same = profile()
    read_surrogate(file, same.replace(provenance=same.provenance.replace(notes="checked again")))


def rewrite(file: Path, **changes: Any) -> None:
    with np.load(file) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    header = json.loads(columns["header"].item()) | changes.pop("header", {})
    text = changes.pop("header_text", json.dumps(header))
    columns = {**columns, "header": np.array(text), **changes}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: value for name, value in columns.items() if value is not None})
    file.write_bytes(buffer.getvalue())


def test_a_later_version_is_refused(file: Path) -> None:
    rewrite(file, header={"version": 3})
    assert "version does not match" in refused(file)


def test_other_features_are_refused(file: Path) -> None:
    rewrite(file, header={"features": [*FEATURES[:-1], "phase_of_the_moon"]})
    assert "features does not match" in refused(file)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"throughput_left": None}, id="no children"),
        pytest.param({"throughput_value": np.zeros(3, np.float32)}, id="few values"),
        pytest.param({"starvation_roots": np.array([10**6], np.int32)}, id="root beyond the nodes"),
        pytest.param({"starvation_roots": np.array([], np.int32)}, id="no roots"),
        pytest.param({"header": {"interval": None}}, id="no interval"),
        pytest.param({"header": {"interval": [0.1]}}, id="half an interval"),
        pytest.param({"low": np.zeros(2, np.float32)}, id="short range"),
        pytest.param({"high": np.array(["x"] * len(FEATURES))}, id="range of letters"),
        pytest.param({"starvation_roots": np.array([0.0])}, id="fractional roots"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(file: Path, changes: dict[str, Any]) -> None:
    rewrite(file, **changes)
    assert "damaged" in refused(file)


def test_a_header_that_is_no_mapping_is_refused(file: Path) -> None:
    rewrite(file, header_text="[]")
    assert "damaged" in refused(file)


def test_a_tree_that_runs_in_a_circle_is_refused(surrogate: Surrogate, file: Path) -> None:
    left = surrogate.throughput.left.copy()
    left[surrogate.throughput.feature >= 0] = 0
    rewrite(file, throughput_left=left)
    assert "damaged" in refused(file)


def test_an_object_array_is_not_loaded(file: Path) -> None:
    rewrite(file, low=np.array([{"a": 1}], dtype=object))
    assert "damaged" in refused(file)


def test_the_digest_is_of_everything_the_twin_reads() -> None:
    assert profile_digest(profile()) == profile_digest(profile())
    assert profile_digest(profile()) != profile_digest(profile(load_ms=1.0))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(errors.InputError, match="forest"):
        load_surrogate("h100-64g/llama-3.1-8b/vllm-0.8.5", kind="oracle")
