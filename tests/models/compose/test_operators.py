"""Operators of a forward pass: measured values are kept, memory is cold, and what was not measured is
refused.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import InputError
from capplan.models.compose import SYSTEMS, operator_tables
from capplan.models.compose._operators import (
    Heads,
    decode_attention,
    gemm_times,
    prefill_ms_per_mpair,
    system_of,
)

GPUS = [each.sheet_key for each in SYSTEMS]
GROUPED = Heads(32, 8, 128)


def products(gpu: str, dtype: str = "bfloat16"):
    tables = operator_tables(gpu)
    return tables, gemm_times(tables.gemm, tables.system.sheet, dtype)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_product_has_the_least_measured_time_of_its_rows_or_more_unless_weights_were_cached(
    gpu: str,
) -> None:
    tables, times = products(gpu)
    table = tables.gemm[(tables.gemm["gemm_dtype"] == "bfloat16") & (tables.gemm["m"] >= 64)]
    shapes = table[table["n"].between(1024, 16384) & table["k"].between(1024, 16384)].groupby(["n", "k"])
    for (n, k), rows in list(shapes)[::7]:
        expected_ms = max(rows["latency"].min(), 2.0 * n * k / times.streaming_bytes_per_ms)
        assert times.ms(np.array([64.0]), n, k)[0] == pytest.approx(expected_ms, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8192), st.integers(256, 200_000), st.integers(256, 60_000), st.sampled_from(GPUS))
def test_no_product_beats_memory_or_twice_the_sheet(rows: int, n: int, k: int, gpu: str) -> None:
    tables, times = products(gpu)
    ms = float(times.ms(np.array([float(rows)]), n, k)[0])
    assert ms >= 2.0 * n * k / times.streaming_bytes_per_ms * (1 - 1e-9)
    assert ms >= 0.5e3 * 2.0 * rows * n * k / tables.system.sheet.flop_per_s


def test_sizes_beyond_the_measured_ones_are_said_with_the_distance() -> None:
    _, times = products("h100-80g")
    assert times.beyond(64, 4096, 4096) == ""
    assert times.beyond(1, 151936, 5120) == "151936 outputs, 2.32 times the largest measured"


def test_quantized_products_are_those_of_their_dtype() -> None:
    rows = np.array([8.0])
    half, whole = (
        products("h100-80g", "fp8")[1].ms(rows, 8192, 8192),
        products("h100-80g")[1].ms(rows, 8192, 8192),
    )
    assert 0.4 < float(half[0] / whole[0]) < 0.8
    with pytest.raises(InputError, match="must be a dtype with measured products on this GPU: bfloat16"):
        products("a100-80g", "fp8")


@pytest.mark.parametrize("gpu", GPUS)
def test_decode_attention_grows_with_context_and_reads_it_from_memory(gpu: str) -> None:
    tables = operator_tables(gpu)
    attention = decode_attention(tables.decode, GROUPED)
    contexts = np.geomspace(1, 100_000, 60)
    for requests in (1.0, 7.0, 64.0, 900.0):
        ms = attention.ms(np.full(60, requests), requests * contexts)
        assert np.all(np.diff(ms) >= -1e-12)
        bytes_per_ms = 2 * 2 * 8 * 128 * requests * contexts / ms
        assert np.all(bytes_per_ms < 1.02 * tables.system.sheet.bytes_per_s / 1e3)


def test_more_kv_heads_than_measured_count_as_more_requests() -> None:
    tables = operator_tables("h100-80g")
    many, few = (
        decode_attention(tables.decode, Heads(64, 16, 128)),
        decode_attention(tables.decode, Heads(32, 8, 128)),
    )
    assert many.batch_scale == 2.0
    requests, kv_tokens = np.array([10.0]), np.array([20_000.0])
    assert many.ms(requests, kv_tokens) == pytest.approx(few.ms(2 * requests, 2 * kv_tokens))


def test_prefill_attention_is_within_the_arithmetic_of_the_sheet() -> None:
    for gpu in GPUS:
        tables = operator_tables(gpu)
        flop_per_ms = tables.system.sheet.flop_per_s / 1e3
        least_ms = 1e6 * 4 * GROUPED.query * GROUPED.head_dim / flop_per_ms
        assert least_ms < prefill_ms_per_mpair(tables.prefill, GROUPED) < 6 * least_ms


def test_a_gpu_without_operators_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(InputError, match=r"measured operators: a100-80g \(a100_sxm\), h100-80g"):
        system_of("v100")
