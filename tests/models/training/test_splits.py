import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.models.training._evaluation import grouped_folds


@st.composite
def labelled_groups(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Rows in groups of up to six near-duplicates, both classes in many groups, in any order."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=20, max_size=60))
    groups = np.repeat(draw(st.permutations(range(len(sizes)))), sizes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    classes = np.repeat(np.arange(len(sizes)) % 2 == 0, sizes)
    order = rng.permutation(groups.size)
    return groups[order], classes[order]


@given(labelled_groups(), st.integers(2, 6), st.integers(0, 9), st.booleans())
def test_a_group_is_never_on_both_sides_and_every_row_is_tested_once(
    rows: tuple[np.ndarray, np.ndarray], folds: int, seed: int, stratified: bool
) -> None:
    groups, classes = rows
    splits = grouped_folds(groups, folds=folds, seed=seed, classes=classes if stratified else None)
    assert len(splits) == folds
    for split in splits:
        assert not set(groups[split.train]) & set(groups[split.test])
        assert sorted(np.concatenate(split)) == list(range(groups.size))
    assert sorted(np.concatenate([split.test for split in splits])) == list(range(groups.size))


@given(labelled_groups(), st.integers(0, 9))
def test_both_sides_of_a_stratified_split_have_both_classes(
    rows: tuple[np.ndarray, np.ndarray], seed: int
) -> None:
    groups, classes = rows
    for split in grouped_folds(groups, seed=seed, classes=classes):
        assert np.unique(classes[split.train]).size == np.unique(classes[split.test]).size == 2


def test_a_seed_names_the_split() -> None:
    groups = np.arange(200) // 2

    def tested(seed: int) -> list[int]:
        return list(grouped_folds(groups, seed=seed)[0].test)

    assert tested(3) == tested(3)
    assert tested(3) != tested(4)


def test_what_cannot_be_split_is_refused_in_one_line() -> None:
    groups = np.arange(40) // 10
    few = np.arange(40) < 3
    together = np.arange(40) < 10
    for bad in (
        lambda: grouped_folds(groups, folds=5),
        lambda: grouped_folds(groups, folds=1),
        lambda: grouped_folds(groups, folds=4, classes=few),
        lambda: grouped_folds(groups, folds=4, classes=together),
    ):
        with pytest.raises(InputError) as refused:
            bad()
        assert "\n" not in str(refused.value)
