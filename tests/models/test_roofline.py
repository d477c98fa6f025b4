"""Analytic profiles: physics that must hold, sanity against models that were measured, and their mark."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import InputError, Profile, load_profile
from capplan.datasets import gpu_sheet, model_arch
from capplan.datasets._catalog import gpu_sheets, model_archs
from capplan.models import (
    Assumptions,
    Efficiencies,
    EngineChoice,
    StepFeatures,
    StepRanks,
    coefficient_array,
    efficiencies_of,
    latency_code,
    rank_ms,
    roofline_profile,
    step_ms,
)
from capplan.models._roofline import VllmLora
from capplan.models._step_latency import GRAPH_TOKENS
from capplan.serving import weight_bytes
from capplan.spec import Kernel, ProvenanceKind
from tests.models.memory import kv_tokens

LLAMA = model_arch("llama-3.1-8b")
H100 = gpu_sheet("h100-80g")
BARE = EngineChoice(lora=False)
SHARES = st.floats(0.1, 1.0)


def milliseconds(profile: Profile, tokens: float, kv_tokens: float = 0.0, adapters: int = 0) -> float:
    k = coefficient_array(profile.step_latency)
    code = latency_code(profile.step_latency.form, profile.engine.kernel)
    features = StepFeatures(
        tokens=tokens,
        requests=tokens,
        kv_tokens=kv_tokens,
        adapters=float(adapters),
        a_max=float(adapters),
        s_max=16.0,
        waiting=0.0,
        slots_per_adapter=1.0,
        adapters_served=float(adapters),
    )
    ranks = StepRanks(tokens, 0.0, tokens, 0.0, 0.0, 16.0, 16.0 * tokens, 0.0, 0.0)
    return float(step_ms(code, k, features) + rank_ms(code, k, 16.0, ranks))


@pytest.mark.parametrize("arch", model_archs()[:2], ids=lambda arch: arch.name)
@pytest.mark.parametrize("sheet", gpu_sheets(), ids=lambda sheet: sheet.key)
def test_no_step_is_faster_than_the_hardware(sheet, arch) -> None:
    """Reading the weights but for the embedding, and two operations per weight and token, at the peaks."""
    tp = 1 if weight_bytes(arch) < 0.9 * sheet.memory_bytes else 2
    profile = roofline_profile(sheet, arch, BARE, tp)
    embedding = arch.vocab_size * arch.hidden_size * arch.dtype_bytes / tp
    read_ms = 1e3 * (weight_bytes(arch, tp) - embedding) / sheet.bytes_per_s
    # A weight is two bytes and two operations.
    compute_ms = 1e3 * (weight_bytes(arch, tp) - 2 * embedding) / sheet.flop_per_s
    for tokens in (1, 64, 256, GRAPH_TOKENS, 2048, 8192):
        assert milliseconds(profile, tokens) >= max(read_ms, tokens * compute_ms)


@settings(max_examples=20)
@given(SHARES, SHARES, st.sampled_from(gpu_sheets()))
def test_better_efficiency_is_never_slower(share: float, factor: float, sheet) -> None:
    if weight_bytes(LLAMA) >= sheet.memory_bytes:
        return
    for name in ("bandwidth", "compute", "host_link"):
        low = Assumptions(physics=replace(Efficiencies(), **{name: share * factor}))
        high = Assumptions(physics=replace(Efficiencies(), **{name: share}))
        slow, fast = (roofline_profile(sheet, LLAMA, BARE, assumptions=each) for each in (low, high))
        for tokens in (1, 100, GRAPH_TOKENS, 4000):
            assert milliseconds(fast, tokens, 5000.0) <= milliseconds(slow, tokens, 5000.0) * (1 + 1e-9)


def test_shares_fitted_on_a_gpu_hold_unless_others_are_given() -> None:
    sheet = gpu_sheet("mi300x")
    assert sheet.shares is not None
    fitted, own = roofline_profile(sheet, LLAMA, BARE), efficiencies_of(sheet, compute=0.5)
    given = roofline_profile(sheet, LLAMA, BARE, assumptions=Assumptions(physics=own))
    assert own.bandwidth == sheet.shares.bandwidth
    assert milliseconds(given, 8000) > 1.2 * milliseconds(fitted, 8000)
    assert sheet.shares.source in fitted.provenance.notes
    assert "Nothing here was measured" in given.provenance.notes


def test_many_tokens_are_computed_and_few_only_read() -> None:
    profile = roofline_profile(H100, LLAMA, BARE)
    physics = Efficiencies()
    per_token_ms = (milliseconds(profile, 8000) - milliseconds(profile, 4000)) / 4000
    embedding = LLAMA.vocab_size * LLAMA.hidden_size * LLAMA.dtype_bytes
    flop = weight_bytes(LLAMA) - 2 * embedding
    assert per_token_ms == pytest.approx(1e3 * flop / (physics.compute * H100.flop_per_s))
    launches_ms = LLAMA.layers * physics.kernels_per_layer * physics.kernel_us / 1e3
    read_ms = 1e3 * (weight_bytes(LLAMA) - embedding) / (physics.bandwidth * H100.bytes_per_s)
    assert milliseconds(profile, 0) == pytest.approx(launches_ms + read_ms)


def test_keys_and_values_are_read_once_per_step() -> None:
    profile = roofline_profile(H100, LLAMA, BARE)
    grown = milliseconds(profile, 10, 20_000.0) - milliseconds(profile, 10, 10_000.0)
    assert grown == pytest.approx(1e3 * 10_000 * 131_072 / (Efficiencies().bandwidth * H100.bytes_per_s))


def test_tensor_parallelism_saves_less_than_its_share() -> None:
    one, two = (milliseconds(roofline_profile(H100, LLAMA, BARE, tp), 64) for tp in (1, 2))
    assert one / 2 < two < one


@pytest.mark.parametrize("kernel", Kernel)
def test_adapters_cost_time_and_their_ranks_as_the_kernel_has_it(kernel: Kernel) -> None:
    profile = roofline_profile(H100, LLAMA, EngineChoice(kernel=kernel))
    bare = roofline_profile(H100, LLAMA, BARE)
    assert milliseconds(profile, 32, adapters=1) > milliseconds(bare, 32)
    more, few = (milliseconds(profile, 32, adapters=number) for number in (32, 1))
    assert more > few if kernel is Kernel.VLLM else more == few
    assert profile.engine.kernel is kernel
    has_rank_terms = "ms_per_decode_krank" in profile.step_latency.coefficients
    assert has_rank_terms == (kernel is not Kernel.VLLM)


def test_gathered_matrices_cost_the_l2_cache_in_prefills_where_a_source_states_it() -> None:
    sheet, engine = (
        gpu_sheet("a100-40g"),
        EngineChoice(rules="slora", kernel=Kernel.BGMV, target_modules=("q_proj",)),
    )
    assert sheet.l2_bytes_per_s is not None
    ms_per_krank = roofline_profile(sheet, LLAMA, engine).step_latency.value("ms_per_prefill_krank")
    gathered_bytes = 2 * LLAMA.layers * 2 * LLAMA.hidden_size  # A and B of q, square here
    assert ms_per_krank == pytest.approx(1e3 * 1e3 * gathered_bytes / sheet.l2_bytes_per_s)


@pytest.mark.parametrize("name", ["h100-64g/llama-3.1-8b/vllm-0.8.5", "h100-64g/qwen2.5-7b/vllm-0.8.5"])
def test_what_is_carried_over_is_near_both_measured_profiles(name: str) -> None:
    shipped = load_profile(name)
    carried = VllmLora().coefficients(shipped.model.layers)
    ratios = [value / shipped.step_latency.value(each) for each, value in carried.items()]
    assert min(ratios) > 0.75
    assert max(ratios) < 1.3
    assert len(ratios) == 8


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b"])
def test_kv_tokens_are_near_those_of_the_measured_profile(name: str) -> None:
    shipped = load_profile(f"h100-64g/{name}/vllm-0.8.5")
    analytic = roofline_profile(gpu_sheet("h100-64g"), model_arch(name), EngineChoice(version="0.8.5"))
    for a_max, s_max in ((8, 8), (64, 16), (32, 32)):
        tokens = [kv_tokens(each, a_max, s_max, 0.9, 256) for each in (analytic, shipped)]
        assert tokens[0] == pytest.approx(tokens[1], rel=0.05)


def test_models_are_those_of_the_shipped_profiles() -> None:
    for name in ("h100-64g/llama-3.1-8b/vllm-0.8.5", "h100-64g/qwen2.5-7b/vllm-0.8.5"):
        shipped = load_profile(name).model
        assert model_arch(shipped.name) == shipped
        assert model_arch(shipped.hf_ids[0]) == shipped


def test_models_are_those_of_the_engine() -> None:
    pytest.importorskip("torch", reason="the engine needs torch (extra `engine`)")
    from capplan.engine.models import builtin_models

    for arch in model_archs():
        if arch.hf_ids[0] in builtin_models():
            there = builtin_models()[arch.hf_ids[0]].arch(2)
            same = {"name": arch.name, "hf_ids": arch.hf_ids, "lora_on_embeddings": arch.lora_on_embeddings}
            assert there.replace(**same) == arch


@pytest.mark.parametrize(
    ("choice", "engine"),
    [
        (EngineChoice(), ("vllm", "0.32.0", "vllm-0.32-async", 0)),
        (EngineChoice(version="0.8.5"), ("vllm", "0.8.5", "vllm-0.8", 256)),
        (EngineChoice(rules="vllm-0.11"), ("vllm", "0.11.2", "vllm-0.11", 256)),
        (EngineChoice(rules="slora"), ("s-lora", "c1ddf48", "slora", 0)),
    ],
)
def test_names_hold_the_engine_of_the_rules_and_its_version(choice: EngineChoice, engine: tuple) -> None:
    profile = roofline_profile(H100, LLAMA, choice)
    found = profile.engine
    assert (found.name, found.version, found.rules, found.lora_extra_vocab) == engine
    assert profile.name == f"roofline/h100-80g/llama-3.1-8b/{engine[0]}-{engine[1]}"
    of_slora = (1, ("q_proj", "k_proj", "v_proj", "o_proj"))  # pages of one token, adapters of attention
    assert (found.block_size, found.target_modules) == (of_slora if found.rules == "slora" else (16, None))


def test_sheets_are_distinct_and_name_their_source() -> None:
    assert (
        len({sheet.key for sheet in gpu_sheets()}) == len({s.name for s in gpu_sheets()}) == len(gpu_sheets())
    )
    for key, gib in (
        ("a40", 48),
        ("l40", 48),
        ("rtx-a6000", 48),
        ("rtx-a5000", 24),
        ("rtx-3090", 24),
        ("a30", 24),
    ):
        sheet = gpu_sheet(key)
        assert 0.92 * gib < sheet.memory_bytes / 2**30 <= gib
        assert "datasheet" in sheet.source or "whitepaper" in sheet.source


def test_the_profile_is_marked_as_not_measured() -> None:
    profile = roofline_profile(H100, LLAMA)
    assert profile.provenance.kind is ProvenanceKind.ROOFLINE
    assert "not measured" in profile.provenance.source
    assert "carried over" in profile.provenance.notes
    for part in (profile.step_latency, profile.memory, profile.loading, profile.host):
        assert part.fit.samples == 0
        assert all(coefficient.std_error is None for coefficient in part.coefficients.values())


def test_computing_overtakes_reading_within_the_chord_on_every_gpu() -> None:
    for sheet in gpu_sheets():
        tokens = sheet.flop_per_s * Efficiencies().compute / (sheet.bytes_per_s * Efficiencies().bandwidth)
        assert tokens < 1.01 * GRAPH_TOKENS  # the 64 GB H100: 517
        assert np.isfinite(tokens)


def test_what_cannot_be_reckoned_is_refused() -> None:
    with pytest.raises(InputError, match="a100-80g"):
        gpu_sheet("v100")
    with pytest.raises(InputError, match=r"llama-3\.1-8b"):
        model_arch("gpt-2")
    with pytest.raises(InputError, match="do not fit"):
        roofline_profile(H100, model_arch("llama-3.1-70b"))
    with pytest.raises(InputError, match="divide the 32 heads"):
        roofline_profile(H100, LLAMA, tp=3)
    with pytest.raises(InputError, match="must be 2"):
        roofline_profile(H100, LLAMA.replace(dtype_bytes=4))
    with pytest.raises(InputError, match="share above 0"):
        Efficiencies(bandwidth=1.2)
