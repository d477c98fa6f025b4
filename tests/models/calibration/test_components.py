"""Memory, loading and length fits, and the assumed profile."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from capplan import InputError, Lengths, Profile
from capplan.datasets import read_arch
from capplan.models import disk_load_ms, gpu_load_ms
from capplan.models.calibration import (
    Hardware,
    assumed_profile,
    fit_length_correlation,
    fit_loading,
    fit_memory,
)
from capplan.models.calibration._components import held_kv_tokens
from capplan.serving import kv_bytes_per_token, weight_bytes
from tests.models.memory import kv_tokens
from tests.twin.examples import part, profile

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


@pytest.fixture
def engine() -> Profile:
    """A profile whose memory model has every coefficient."""
    return profile().replace(
        memory=part(
            "slots-and-reserve",
            reserved_bytes=3e7,
            slot_factor=1.1,
            slot_overhead_bytes=2e5,
            bytes_per_seq=4e4,
            seqs_in_reserve=256,
        )
    )


def start_ups(engine: Profile, max_num_seqs: tuple[int, ...]) -> pd.DataFrame:
    rows = [(a, s, n) for a in (1, 8, 32, 64) for s in (8, 16, 32) for n in max_num_seqs]
    return pd.DataFrame(
        [
            {
                "a_max": a,
                "s_max": s,
                "max_num_seqs": n,
                "gpu_memory_utilization": 0.9,
                "kv_tokens": kv_tokens(engine, a, s, 0.9, n),
            }
            for a, s, n in rows
        ]
    )


def test_the_memory_model_of_start_ups_is_recovered(engine: Profile, tmp_path: Path) -> None:
    start_ups(engine, (64, 256, 512, 1024, 2048)).to_csv(tmp_path / "memory.csv", index=False)
    fitted = fit_memory(tmp_path / "memory.csv", profile())
    again = engine.replace(memory=fitted)
    for a_max, s_max, seqs in ((4, 64, 300), (48, 16, 700), (16, 16, 100)):
        expected = kv_tokens(engine, a_max, s_max, 0.9, seqs)
        assert kv_tokens(again, a_max, s_max, 0.9, seqs) == pytest.approx(expected, rel=0.01)
    assert fitted.fit.error < 0.5


def test_the_cost_of_sequences_stays_if_the_table_does_not_determine_it(
    engine: Profile, tmp_path: Path
) -> None:
    start_ups(engine, (1024,)).to_csv(tmp_path / "memory.csv", index=False)
    fitted = fit_memory(tmp_path / "memory.csv", engine)
    for name in ("bytes_per_seq", "seqs_in_reserve"):
        assert fitted.value(name) == engine.memory.value(name)
    assert fitted.value("slot_factor") == pytest.approx(1.1, rel=0.05)
    assert fitted.value("reserved_bytes") == pytest.approx(3e7, rel=0.05)
    assert fitted.fit.error < 0.5


def test_an_engine_without_slots_has_all_memory_beside_the_weights(engine: Profile, tmp_path: Path) -> None:
    room_bytes = 0.9 * engine.gpu.memory_bytes - weight_bytes(engine.model)
    frame = start_ups(engine, (64,))
    frame["kv_tokens"] = int(room_bytes // kv_bytes_per_token(engine.model))
    frame.to_csv(tmp_path / "memory.csv", index=False)
    assert fit_memory(tmp_path / "memory.csv", engine).fit.error < 0.1


def test_more_kv_than_the_gpu_holds_is_refused(engine: Profile, tmp_path: Path) -> None:
    frame = start_ups(engine, (64,))
    frame.loc[3, "kv_tokens"] = 10_000_000
    frame.to_csv(tmp_path / "memory.csv", index=False)
    with pytest.raises(
        InputError, match=r"kv_tokens, row 4: must be at most \d+, all that a Test GPU has left"
    ):
        fit_memory(tmp_path / "memory.csv", engine)


@pytest.mark.parametrize("kinds", [("gpu",), ("disk",), ("gpu", "disk")])
def test_the_loading_model_of_loads_is_recovered(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    truth = part(
        "copies-and-bytes",
        serving_factor=1.0,
        gpu_base_ms=6.0,
        gpu_ms_per_rank=0.05,
        gpu_padding_ms=1.5,
        disk_base_ms=40.0,
        disk_ms_per_rank=2.0,
    )
    rows = [
        {
            "rank": r,
            "s_max": s,
            "kind": kind,
            "ms": gpu_load_ms(truth, r, s) if kind == "gpu" else disk_load_ms(truth, r),
        }
        for kind in kinds
        for r in (8, 16, 32)
        for s in (8, 16, 32)
        if r <= s
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "loading.csv", index=False)
    base = profile(load_ms=99.0, disk_ms=77.0)
    fitted = fit_loading(tmp_path / "loading.csv", base)
    assert set(fitted.coefficients) == set(base.loading.coefficients)
    for name, expected in truth.coefficients.items():
        known = name.startswith(kinds)
        wanted = expected.value if known else base.loading.value(name)
        assert fitted.value(name) == pytest.approx(wanted, rel=1e-6, abs=1e-9), name


def test_a_load_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame({"rank": [8, 8], "s_max": [8, 8], "ms": [1.0, 2.0], "kind": ["gpu", "tape"]})
    frame.to_csv(tmp_path / "loading.csv", index=False)
    with pytest.raises(InputError, match="kind, row 2: must be gpu or disk"):
        fit_loading(tmp_path / "loading.csv", profile())


def config(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in (CONFIG | changes).items() if v is not None}))
    return path


def test_the_architecture_is_read_from_the_config(tmp_path: Path) -> None:
    arch = read_arch(config(tmp_path), "org/Tiny-1B")
    assert (arch.name, arch.hf_ids) == ("Tiny-1B", ("org/Tiny-1B",))
    assert (arch.layers, arch.heads, arch.kv_heads, arch.head_dim) == (16, 32, 8, 64)
    assert arch.tied_embeddings
    assert arch.lora_on_embeddings
    other = read_arch(config(tmp_path, architectures=["Qwen2ForCausalLM"], num_key_value_heads=None), "q")
    assert not other.lora_on_embeddings
    assert other.kv_heads == other.heads


@pytest.mark.parametrize("value", [None, 0, -4, 1.5, "many", True])
def test_a_config_without_a_size_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InputError, match=r"config\.json: hidden_size: must be a whole number above 0"):
        read_arch(config(tmp_path, hidden_size=value), "org/x")


def test_an_assumed_profile_is_marked_and_grows_with_the_model(tmp_path: Path) -> None:
    hardware = Hardware(gpu="Test GPU", gpu_memory_bytes=24 * 2**30)
    small = assumed_profile(read_arch(config(tmp_path), "org/small"), hardware)
    large = assumed_profile(read_arch(config(tmp_path, num_hidden_layers=32), "org/large"), hardware)
    for name in ("step_latency", "memory", "loading", "host"):
        assert getattr(small, name).fit.samples == 0
        assert "assumed" in getattr(small, name).fit.source
    assert small.provenance.kind == "roofline"
    for name in ("base_ms", "ms_per_ktoken", "ms_per_kv_ktoken"):
        assert 0.0 < small.step_latency.value(name) < large.step_latency.value(name)
    assert kv_tokens(small, 8, 16, 0.9, 256) > kv_tokens(large, 8, 16, 0.9, 256) > 0
    assert np.isfinite([each.value for each in small.step_latency.coefficients.values()]).all()


LENGTHS = (Lengths(mean=223, std=245), Lengths(mean=194, std=206))


def test_correlated_lengths_hold_more_kv() -> None:
    scores = np.random.default_rng(0).standard_normal((20_000, 2))
    held = [held_kv_tokens(*LENGTHS, correlation, scores, 16) for correlation in (-0.8, -0.4, 0.0, 0.4)]
    assert held == sorted(held)
    independent = 223 + (194 + 206**2 / 194) / 2 + 8  # a decoding request is length-biased in its output
    assert held[2] == pytest.approx(independent, rel=0.02)


def test_the_length_correlation_is_recovered() -> None:
    scores = np.random.default_rng(1).standard_normal((200_000, 2))
    other = (Lengths(mean=100, std=80), Lengths(mean=400, std=300))
    held = [held_kv_tokens(*lengths, -0.4, scores, 16) for lengths in (LENGTHS, other)]
    assert fit_length_correlation([LENGTHS, other], held, 16) == pytest.approx(-0.4, abs=0.03)
    assert fit_length_correlation([LENGTHS], [1.0], 16) == -0.95
    assert fit_length_correlation([LENGTHS], [1e6], 16) == 0.95
