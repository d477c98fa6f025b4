"""Timed calls compute low-rank products, each with its own weights."""

from itertools import accumulate, pairwise

import pytest
import torch

from capplan.profiling.kernels._measure import Case, MakeCalls, WeightPool, grouped_calls, padded_calls

WIDTH = 24

CASE = Case("tiny", "prefill", "mixed", 0, (2, 5, 3), tokens_each=2)


def random_pool(numbers: int = 1 << 15) -> WeightPool:
    pool = WeightPool(numbers, torch.float32, torch.device("cpu"))
    pool.numbers.copy_(torch.randn(pool.numbers.shape))
    return pool


def triton_calls(kind: str) -> MakeCalls:
    pytest.importorskip("triton", reason="the kernels need triton (extra `engine`)")
    from capplan.profiling.kernels._measure import MAKERS

    return MAKERS[kind]


def maker(kernel: str) -> MakeCalls:
    return {"grouped": grouped_calls, "padded": padded_calls}.get(kernel) or triton_calls(kernel)


def low_rank_parts(case: Case, pool: WeightPool, x: torch.Tensor, padded_to: int | None) -> torch.Tensor:
    """Return the outputs of the first layer's adapters, with weights in the order of PyTorch's calls."""
    ranks = [padded_to or rank for rank in case.ranks]
    numbers, out = pool.numbers.double(), torch.zeros(case.tokens, WIDTH, dtype=torch.float64)
    each = case.requests_each * case.tokens_each
    matrices = numbers[: 2 * sum(ranks) * WIDTH].view(2, sum(ranks), WIDTH)  # all A, then all B
    for number, (rank, end) in enumerate(zip(ranks, accumulate(ranks), strict=True)):
        a, b = matrices[:, end - rank : end]
        rows = slice(number * each, (number + 1) * each)
        out[rows] = x[rows].double() @ a.t() @ b
    return out


@pytest.mark.parametrize(("kernel", "padded_to"), [("grouped", None), ("padded", 5)])
def test_both_halves_together_are_the_low_rank_product(kernel: str, padded_to: int | None) -> None:
    pool = random_pool()
    calls = maker(kernel)(CASE, WIDTH, pool, 1)
    x = calls.shrink[0].args[-1]  # type: ignore[attr-defined]
    out = calls.expand[0].args[-1]  # type: ignore[attr-defined]
    out.zero_()
    calls.shrink[0]()
    calls.expand[0]()
    right = low_rank_parts(CASE, pool, x, padded_to)
    assert torch.allclose(out.double(), right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


@pytest.mark.parametrize("kernel", ["grouped", "padded", "bgmv", "mbgmv", "sgmv"])
def test_calls_read_different_weights(kernel: str) -> None:
    pool = random_pool()
    taken: list[tuple[int, int]] = []
    take = pool.take

    def noted(rows: int, width: int) -> int:
        at = take(rows, width)
        taken.append((at, at + rows * width))
        return at

    pool.take = noted  # type: ignore[method-assign]
    calls = maker(kernel)(CASE, WIDTH, pool, 3)
    assert len(calls.shrink) == len(calls.expand) == 3
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))
    assert len(taken) == 3 * 2 * len(CASE.ranks)
    rows = sum(end - start for start, end in taken) // WIDTH // 6
    assert rows == (len(CASE.ranks) * max(CASE.ranks) if kernel in ("padded", "bgmv") else sum(CASE.ranks))


@pytest.mark.parametrize("kernel", ["bgmv", "mbgmv", "sgmv"])
def test_triton_kernels_add_to_every_token(kernel: str) -> None:
    calls = maker(kernel)(CASE, WIDTH, random_pool(), 2)
    for layer in range(2):
        out = calls.expand[layer].args[-1]  # type: ignore[attr-defined]
        out.zero_()
        calls.shrink[layer]()
        calls.expand[layer]()
        assert bool(torch.isfinite(out).all())
        assert bool((out != 0).any(dim=1).all())


def test_the_weight_pool_is_circular() -> None:
    pool = WeightPool(1 << 12, torch.float32, torch.device("cpu"))
    starts = [pool.take(1, 1 << 10) for _ in range(6)]
    assert starts == [0, 1024, 2048, 3072, 0, 1024]
    with pytest.raises(ValueError, match="from a pool of"):
        pool.take(5, 1 << 10)
