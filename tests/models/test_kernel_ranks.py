"""Ranks that each kernel pays for, and facts of the papers (PAPER_NOTES sections 1 and 4)."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.models import (
    ADDITIVE,
    StepFeatures,
    StepRanks,
    coefficient_array,
    latency_code,
    rank_ms,
    step_ms,
    uses_decode_ranks,
    uses_ranks,
)
from capplan.models._step_latency import DIGITAL_TWIN, FORMS, TOPPINGS_BGMV, TOPPINGS_MBGMV
from capplan.spec import Kernel
from tests.twin.examples import part

S_MAX = 64.0
STEP = StepFeatures(
    tokens=600.0,
    requests=100.0,
    kv_tokens=30_000.0,
    adapters=10.0,
    a_max=32.0,
    s_max=S_MAX,
    waiting=2000.0,
    slots_per_adapter=0.25,
    adapters_served=128.0,
)


def batch(decode: Sequence[int] = (), prefill: Sequence[tuple[int, int]] = (), base: int = 0) -> StepRanks:
    """Return the ranks of a step: a rank for each decoding request, (rank, tokens) for each in prefill."""
    prefill_ranks = [rank for rank, _ in prefill]
    return StepRanks(
        decodes=float(len(decode) + base),
        prefills=float(len(prefill)),
        lora_decodes=float(len(decode)),
        lora_prefills=float(len(prefill)),
        lora_prefill_tokens=float(sum(tokens for _, tokens in prefill)),
        max_rank=float(max([*decode, *prefill_ranks], default=0)),
        decode_rank_sum=float(sum(decode)),
        prefill_rank_sum=float(sum(prefill_ranks)),
        prefill_rank_tokens=float(sum(rank * tokens for rank, tokens in prefill)),
        prefill_mpairs=float(sum(tokens * (tokens + 1) / 2e6 for _, tokens in prefill)),
    )


def toppings(form: str, alpha: float, beta: float, ranks: Sequence[int]) -> float:
    """Return the milliseconds of a decode iteration by one of Toppings' forms."""
    k = np.array([alpha, beta, 0.0, 0.0])
    return rank_ms(latency_code(form), k, S_MAX, batch(decode=ranks))


def additive(
    kernel: Kernel, ranks: StepRanks, per_decode: float = 1000.0, per_prefill: float = 1000.0
) -> float:
    """Return the rank part of the additive form, by default in units of rank x tokens."""
    k = np.zeros(len(ADDITIVE.names))
    at = len(ADDITIVE.coefficients)
    k[at : at + 2] = per_decode, per_prefill
    return rank_ms(latency_code(ADDITIVE.name, kernel), k, S_MAX, ranks)


def test_the_toy_of_toppings_goes_where_the_paper_sends_it() -> None:
    instances = ([32] * 24, [64] * 16)
    slo_ms = 36.0
    padded = [toppings("toppings-bgmv", 0.0035, 32.166, ranks) for ranks in instances]
    assert padded == pytest.approx([34.854, 35.75])
    padded_with = [toppings("toppings-bgmv", 0.0035, 32.166, [*ranks, 64]) for ranks in instances]
    assert padded_with == pytest.approx([37.766, 35.974])  # instance 2: 24 small ones would all be padded
    assert [ms <= slo_ms for ms in padded_with] == [False, True]
    summed_with = [toppings("toppings-mbgmv", 0.00234375, 33.5, [*ranks, 64]) for ranks in instances]
    assert summed_with == pytest.approx([35.45, 36.05])  # instance 1: only the true ranks count
    assert [ms <= slo_ms for ms in summed_with] == [True, False]


def test_toppings_charges_prefill_and_decode_as_two_iterations() -> None:
    k = np.array([0.01, 30.0, 0.1, 50.0])
    decode, prefill = batch(decode=[8, 16]), batch(prefill=[(8, 100), (32, 900)])
    both = batch(decode=[8, 16], prefill=[(8, 100), (32, 900)])
    for form, of_decode, of_prefill in (("toppings-bgmv", 2 * 16, 2 * 32), ("toppings-mbgmv", 24, 40)):
        code = latency_code(form)
        assert rank_ms(code, k, S_MAX, decode) == pytest.approx(0.01 * of_decode + 30.0)
        assert rank_ms(code, k, S_MAX, prefill) == pytest.approx(0.1 * of_prefill + 50.0)
        assert step_ms(code, k, STEP) == 0.0
    assert rank_ms(latency_code("toppings-mbgmv"), k, S_MAX, both) == pytest.approx(
        0.01 * 24 + 30.0 + 0.1 * 40 + 50.0
    )
    assert rank_ms(latency_code("toppings-bgmv"), k, S_MAX, both) == pytest.approx(
        0.01 * 2 * 32 + 30.0 + 0.1 * 2 * 32 + 50.0
    )


def test_requests_of_the_base_model_cost_an_iteration_and_no_rank() -> None:
    k = np.array([0.01, 30.0, 0.1, 50.0])
    for form in ("toppings-bgmv", "toppings-mbgmv"):
        assert rank_ms(latency_code(form), k, S_MAX, batch(base=3)) == 30.0
    for kernel in Kernel:
        assert additive(kernel, batch(base=3)) == 0.0
        assert additive(kernel, batch(decode=[8], base=3)) == additive(kernel, batch(decode=[8]))


@pytest.mark.parametrize("kernel", Kernel)
def test_a_kernel_pays_for_its_own_rank_in_decode_and_prefill(kernel: Kernel) -> None:
    mixed = batch(decode=[8, 8, 32], prefill=[(16, 100)])
    paid = {Kernel.BGMV: (3 * 32, 100 * 32), Kernel.MBGMV: (48, 1600), Kernel.VLLM: (3 * 64, 100 * 64)}
    decode, prefill = paid[kernel]
    assert additive(kernel, mixed, per_prefill=0.0) == pytest.approx(decode)
    assert additive(kernel, mixed, per_decode=0.0) == pytest.approx(prefill)
    assert additive(kernel, mixed) == pytest.approx(decode + prefill)


@given(
    decode=st.lists(st.sampled_from([8, 16, 32, 64]), max_size=12),
    prefill=st.lists(st.tuples(st.sampled_from([8, 16, 32, 64]), st.integers(1, 512)), max_size=6),
)
def test_no_kernel_pays_less_than_the_true_ranks_or_more_than_the_slots(
    decode: list[int], prefill: list[tuple[int, int]]
) -> None:
    step = batch(decode, prefill)
    true, padded, slots = (additive(kernel, step) for kernel in (Kernel.MBGMV, Kernel.BGMV, Kernel.VLLM))
    assert true <= padded + 1e-9 <= slots + 2e-9
    if len({*decode, *(rank for rank, _ in prefill)}) == 1:
        assert true == pytest.approx(padded)  # padding costs only where ranks differ


def test_a_large_rank_beside_small_ones_costs_padded_kernels_their_rank() -> None:
    """LoRAServe III-A: prefill of rank 128 takes 2.7 times that of rank 8, and rank 8 beside it as long."""
    tokens, small, large = 2000, 8, 128
    backbone_ms = 100.0
    per_krank = 1.7 * backbone_ms / ((large - 2.7 * small) * tokens / 1000)

    def prefill_ms(kernel: Kernel, *ranks: int) -> float:
        step = batch(prefill=[(rank, tokens // len(ranks)) for rank in ranks])
        return backbone_ms + additive(kernel, step, per_prefill=per_krank)

    for kernel in (Kernel.BGMV, Kernel.MBGMV):
        assert prefill_ms(kernel, large) / prefill_ms(kernel, small) == pytest.approx(2.7)
    assert prefill_ms(Kernel.BGMV, small, large) == pytest.approx(prefill_ms(Kernel.BGMV, large))
    halfway = (prefill_ms(Kernel.MBGMV, small) + prefill_ms(Kernel.MBGMV, large)) / 2
    assert prefill_ms(Kernel.MBGMV, small, large) == pytest.approx(halfway)
    # The slot's rank, whoever sits there.
    assert prefill_ms(Kernel.VLLM, small) == prefill_ms(Kernel.VLLM, large)


def test_only_forms_that_count_tokens_separate_long_prompts_from_short_ones() -> None:
    short, long = batch(prefill=[(32, 100)]), batch(prefill=[(32, 2000)])
    for kernel in Kernel:
        assert additive(kernel, long) == pytest.approx(20 * additive(kernel, short))
    k = np.array([0.01, 30.0, 0.1, 50.0])
    for form in ("toppings-bgmv", "toppings-mbgmv"):
        assert rank_ms(latency_code(form), k, S_MAX, long) == rank_ms(latency_code(form), k, S_MAX, short)


@pytest.mark.parametrize("kernel", Kernel)
def test_a_profile_without_rank_terms_pays_for_none_whatever_its_kernel(kernel: Kernel) -> None:
    model = part("additive", **{name: i + 1.0 for i, name in enumerate(ADDITIVE.coefficients)})
    k, code = coefficient_array(model), latency_code(model.form, kernel)
    assert k.size == len(ADDITIVE.coefficients)
    assert not uses_ranks(code, k)
    assert rank_ms(code, k, S_MAX, batch(decode=[8, 64])) == 0.0
    assert step_ms(code, k, STEP) == step_ms(ADDITIVE.code, k, STEP)


def test_one_rank_term_leaves_the_rest_of_the_step_as_it_was() -> None:
    plain = part("additive", **dict.fromkeys(ADDITIVE.coefficients, 1.0))
    ranked = part("additive", **dict.fromkeys(ADDITIVE.coefficients, 1.0), ms_per_prefill_krank=2.0)
    k = coefficient_array(ranked)
    assert uses_ranks(0, k)
    assert step_ms(0, k, STEP) == step_ms(0, coefficient_array(plain), STEP)
    assert rank_ms(0, k, S_MAX, batch(decode=[8], prefill=[(8, 500)])) == pytest.approx(2.0 * 0.5 * S_MAX)


def test_requests_cost_by_their_number_and_more_from_the_second_on() -> None:
    plain = coefficient_array(part("additive", **dict.fromkeys(ADDITIVE.coefficients, 1.0)))
    counted = part(
        "additive", **dict.fromkeys(ADDITIVE.coefficients, 1.0), ms_per_request=0.25, ms_for_several=4.0
    )
    k = coefficient_array(counted)
    assert not uses_ranks(0, k)  # nobody needs to walk over the requests for these two
    more = {
        requests: step_ms(0, k, STEP._replace(requests=requests))
        - step_ms(0, plain, STEP._replace(requests=requests))
        for requests in (0.0, 1.0, 1.5, 2.0, 100.0)
    }
    assert more == pytest.approx({0.0: 0.0, 1.0: 0.25, 1.5: 2.375, 2.0: 4.5, 100.0: 29.0})


@pytest.mark.parametrize("kernel", Kernel)
def test_each_request_in_prefill_costs_the_same_whatever_its_length_and_rank(kernel: Kernel) -> None:
    k = coefficient_array(part("additive", **dict.fromkeys(ADDITIVE.coefficients, 0.0), ms_per_prefill=0.5))
    code = latency_code(ADDITIVE.name, kernel)
    assert uses_ranks(code, k)
    assert rank_ms(code, k, S_MAX, batch(decode=[8, 64], prefill=[(8, 10), (64, 900)])) == pytest.approx(1.0)
    assert rank_ms(code, k, S_MAX, batch(decode=[8, 64], base=3)) == 0.0


@pytest.mark.parametrize("kernel", Kernel)
def test_the_attention_of_a_prompt_costs_its_pairs_of_tokens_whatever_the_kernel(kernel: Kernel) -> None:
    terms = dict.fromkeys(ADDITIVE.coefficients, 0.0) | {"ms_per_prefill_mpair": 4.0}
    k, code = coefficient_array(part("additive", **terms)), latency_code(ADDITIVE.name, kernel)
    assert uses_ranks(code, k)
    assert not uses_decode_ranks(code, k)
    pairs = 10 * 11 / 2 + 900 * 901 / 2
    alone = batch(decode=[8, 64], prefill=[(8, 10), (64, 900)])
    assert rank_ms(code, k, S_MAX, alone) == pytest.approx(4.0 * pairs / 1e6)


def test_the_digital_twin_form_has_no_ranks_and_a_constant_of_its_own_without_adapters() -> None:
    values = {"k1": 0.01, "k2": 0.02, "k3": -0.003, "k4": 0.4, "k5": 5.0, "k6": 0.06, "k7": 1.1}
    plain = coefficient_array(part("digital-twin", **values))
    jump = coefficient_array(part("digital-twin", **values, k7_base=0.9))
    code = DIGITAL_TWIN.code
    alone = STEP._replace(adapters=0.0)
    assert step_ms(code, jump, STEP) == step_ms(code, plain, STEP)
    assert step_ms(code, plain, alone) - step_ms(code, jump, alone) == pytest.approx(0.2 * (0.4 * 100 + 5))
    assert not uses_ranks(code, jump)
    assert rank_ms(code, jump, S_MAX, batch(decode=[8])) == 0.0


def test_every_form_and_kernel_has_a_number_of_its_own_where_it_differs() -> None:
    numbers = {(form.name, kernel): latency_code(form.name, kernel) for form in FORMS for kernel in Kernel}
    assert len(set(numbers.values())) == len(FORMS) + 4
    for form in (DIGITAL_TWIN, TOPPINGS_BGMV, TOPPINGS_MBGMV):
        assert {numbers[form.name, kernel] for kernel in Kernel} == {form.code}
