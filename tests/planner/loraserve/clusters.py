"""Clusters to place adapters on."""

from __future__ import annotations

from hypothesis import strategies as st

from capplan.planner.solvers.loraserve_placement import AdapterDemand

RANKS = (8, 16, 32, 64, 128)
POINTS = {8: 5000.0, 16: 4800.0, 32: 4400.0, 64: 3500.0, 128: 2200.0}
"""Tokens per second that a server sustains, by rank."""


def loads(*adapters: tuple[int, float]) -> list[AdapterDemand]:
    """Return adapters of these ranks and demands; rank 8 takes 8 bytes."""
    return [AdapterDemand(f"a{i}", rank, tok_s, bytes=rank) for i, (rank, tok_s) in enumerate(adapters)]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[AdapterDemand], dict[int, float], int]:
    """Return adapters, idle ones among them, operating points that fall with the rank, and servers."""
    demand = st.one_of(st.just(0.0), st.floats(0.1, 20_000.0))
    adapters = draw(st.lists(st.tuples(st.sampled_from(RANKS), demand), min_size=1, max_size=30))
    shrink = draw(st.floats(0.5, 1.0))
    points = {rank: 4000.0 * shrink**i for i, rank in enumerate(RANKS)}
    return loads(*adapters), points, draw(st.integers(1, 9))
