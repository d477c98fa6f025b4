"""Surrogate files: round trip, and refusal of files of other profiles or kinds."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capplan import errors, load_profile
from capplan.datasets import surrogate_path
from capplan.datasets._profile_files import profiles_with_surrogates
from capplan.models import Surrogate
from capplan.models.surrogates import FEATURES, KINDS, profile_digest, surrogate_bytes
from capplan.models.surrogates._files import SURROGATE_VERSION, read_surrogate
from capplan.spec import Experts
from tests.models.surrogates.making import made, profile, surrogates
from tests.models.surrogates.written import contents, kind_of, refused, write


def test_a_file_gives_back_the_surrogate(surrogate: Surrogate, file: Path) -> None:
    again = read_surrogate(file, profile(), surrogate.kind)
    rows = made().features
    ours, theirs = surrogate.predict_many(rows), again.predict_many(rows)
    for name in ("throughput_tok_s", "low_tok_s", "high_tok_s", "starvation_probability"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name))
    assert np.allclose(ours.novelty, theirs.novelty, rtol=1e-3)
    assert (again.report, again.kind, again.profile) == (surrogate.report, surrogate.kind, profile())
    for tree in ("throughput_tree", "starvation_tree"):
        assert (getattr(again, tree) is None) == (getattr(surrogate, tree) is None) == (again.kind != "tree")
    assert surrogate_bytes(again) == file.read_bytes()


def test_small_trees_are_texts_of_which_both_are_kept() -> None:
    document = json.loads(surrogate_bytes(surrogates()["tree"]))
    assert set(document["trees"]) == {"throughput", "starvation"}
    assert document["features"] == list(FEATURES)


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    assert "no surrogate" in refused(tmp_path / "s.best.npz")
    assert "no surrogate" in refused(tmp_path / "s.tree.json")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.best.npz").mkdir()
    refused(tmp_path / "s.best.npz")


def test_a_truncated_file_is_refused(file: Path) -> None:
    data = file.read_bytes()
    for keep in {0, 1, 4, 100, len(data) - 2, *np.linspace(0, len(data) - 2, 80).astype(int)}:
        file.write_bytes(data[:keep])
        assert "damaged" in refused(file)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_are_refused_or_change_nothing(surrogate: Surrogate, file: Path, seed: int) -> None:
    """A date in an archive, or white space in a text, is not content."""
    data, rng = file.read_bytes(), random.Random(seed)
    refusals = 0
    for _ in range(80):
        garbled = bytearray(data)
        start = 0 if rng.random() < 0.6 else max(0, len(data) - 2500)  # the archive's table of contents
        for at in [rng.randrange(start, len(data)) for _ in range(rng.choice((1, 1, 3)))]:
            garbled[at] ^= rng.randrange(1, 256)
        file.write_bytes(garbled)
        try:
            again = read_surrogate(file, profile(), surrogate.kind)
        except errors.InputError:
            refused(file)
            refusals += 1
        else:
            assert surrogate_bytes(again) == data
    assert refusals > 60


def test_another_profile_is_refused_and_another_provenance_is_not(file: Path) -> None:
    owner = profile()
    read_surrogate(
        file, owner.replace(provenance=owner.provenance.replace(notes="checked again")), kind_of(file)
    )
    slower = owner.step_latency.model_copy(
        update={
            "coefficients": {
                name: c.replace(value=c.value * 1.01) for name, c in owner.step_latency.coefficients.items()
            }
        }
    )
    for other, key in (
        (owner.replace(name="test/other/vllm-0.8.5"), "profile"),
        (owner.replace(step_latency=slower), "profile_digest"),
        (owner.replace(length_correlation=0.3), "profile_digest"),
        (owner.replace(tp=2), "profile_digest"),
    ):
        assert f"{key} does not match" in refused(file, owner=other)
        assert profile_digest(other) != profile_digest(owner) or key == "profile"


def test_another_kind_is_refused(file: Path) -> None:
    for kind in set(KINDS) - {kind_of(file)}:
        assert "kind does not match" in refused(file, kind=kind)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", SURROGATE_VERSION + 1),
        ("version", "three"),
        ("version", None),
        ("features", [*FEATURES[:-1], "phase_of_the_moon"]),
        ("features", [*FEATURES[1:], FEATURES[0]]),
        ("features", None),
        ("profile_digest", "0" * 64),
    ],
)
def test_another_identity_is_refused_by_the_name_of_what_differs(file: Path, key: str, value: Any) -> None:
    document, columns = contents(file)
    write(file, document | {key: value}, columns)
    assert f"{key} does not match" in refused(file)
    del document[key]
    write(file, document, columns)
    assert f"{key} does not match" in refused(file)


def test_the_digest_covers_what_simulations_depend_on_and_no_limits() -> None:
    base = profile()
    known = profile_digest(base)
    irrelevant = {"max_positions": 77, "qk_norm": True, "sliding_window": 512}
    assert profile_digest(base.replace(model=base.model.replace(**irrelevant))) == known
    assert profile_digest(base.replace(engine=base.engine.replace(sgmv_from_tokens=8))) == known
    others = {"experts": Experts(number=8, per_token=2, intermediate_size=64)}
    for field, value in base.model:
        if field not in irrelevant:
            other = not value if isinstance(value, bool) else value * 2 if value else others.get(field, 1)
            assert profile_digest(base.replace(model=base.model.replace(**{field: other}))) != known, field


def test_the_digest_covers_layers_and_shards_of_slots_once_they_are_set() -> None:
    base = profile()
    for field, value in (("target_modules", ("q_proj",)), ("fully_sharded_loras", True)):
        assert profile_digest(base.replace(engine=base.engine.replace(**{field: value}))) != (
            profile_digest(base)
        )


@pytest.mark.parametrize("name", profiles_with_surrogates())
def test_shipped_surrogates_are_those_of_the_shipped_profiles(name: str) -> None:
    document = json.loads(surrogate_path(name, "tree").read_text())
    assert document["profile_digest"] == profile_digest(load_profile(name))
