"""Labels of the drift benchmark."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rebalance_drift import ARBITRARY, SYSTEMS, arbitrary_labels
from capplan.serving.rebalancing import AdapterDemand, Rebalancer, ReplanRequest, place
from capplan.spec import RebalanceSettings

POINTS = {8: 4800.0, 32: 4400.0, 128: 2200.0}
RANKS = tuple(POINTS)
SERVERS = 4
NAMES = [f"a{i}" for i in range(12)]


def adapters(tok_s: list[float]) -> list[AdapterDemand]:
    return [
        AdapterDemand(name, RANKS[i % 3], demand, 1000 * RANKS[i % 3])
        for i, (name, demand) in enumerate(zip(NAMES, tok_s, strict=True))
    ]


@given(st.lists(st.floats(1.0, 2000.0), min_size=12, max_size=12), st.integers(0, 100))
def test_arbitrary_labels_permute_the_servers_of_algorithm_1(tok_s: list[float], seed: int) -> None:
    request = ReplanRequest(adapters(tok_s), POINTS, [()] * SERVERS, [{}] * SERVERS, 0.0)
    expected = place(request.adapters, POINTS, SERVERS).shares

    def sorted_servers(shares: object) -> list[str]:
        assert isinstance(shares, (list, tuple))
        return sorted(str(sorted(own.items())) for own in shares)

    one, other = arbitrary_labels(seed), arbitrary_labels(seed)
    rounds = [one(request) for _ in range(8)]
    assert rounds == [other(request) for _ in range(8)], "same seed, same labels"
    assert all(sorted_servers(shares) == sorted_servers(expected) for shares in rounds)
    assert any(list(shares) != list(expected) for shares in rounds)


def test_arbitrary_labels_copy_more_than_those_that_fit_what_is_stored() -> None:
    """A demand that does not change moves nothing with the permutation, and almost everything without."""
    settings = SYSTEMS[ARBITRARY]
    assert settings is not None

    def moved(of: RebalanceSettings, seed: int | None) -> int:
        replan = None if seed is None else arbitrary_labels(seed)
        rebalancer = Rebalancer(adapters([100.0] * 12), SERVERS, POINTS, of, replan)
        stored: list[set[str]] = [set() for _ in range(SERVERS)]
        shares: list[Mapping[str, float]] = [{} for _ in range(SERVERS)]
        total = 0
        for number in range(6):
            made = rebalancer.step(dict.fromkeys(NAMES, 100.0), stored, shares)
            stored, shares = [set(own) for own in made.shares], list(made.shares)
            total += made.moved_bytes if number else 0
        return total

    assert moved(RebalanceSettings(), None) == 0
    assert all(moved(settings, seed) > 0 for seed in range(5))
