"""Every preset is a workload file that loads, and requests that can be drawn."""

from pathlib import Path

import numpy as np
import pytest

from capplan.errors import InputError
from capplan.spec import Workload, load_workload
from capplan.workload import draw_requests, length_table
from capplan.workload.presets import preset, presets

TRACES = Path(__file__).parents[3] / "shared" / "traces"


def loaded(name: str, folder: Path) -> Workload:
    chosen = preset(name)
    if chosen.file and not (TRACES / chosen.file).is_file():
        pytest.skip(f"no ../shared/traces/{chosen.file} beside the checkout: public traces are not at hand")
    path = folder / "workload.yaml"
    path.write_text(chosen.yaml(traces=str(TRACES)), encoding="utf-8")
    return load_workload(path)


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads_and_draws(name, tmp_path):
    w = loaded(name, tmp_path)
    assert w.gpus.count == preset(name).gpus
    duration_s = 40 / w.total_rate_rps + 1
    r = draw_requests(w, duration_s, 0, 16_384)
    assert len(r.adapter) > 0
    assert np.all(r.prompt_tokens >= 1)


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_says_where_it_is_from_and_what_is_assumed(name):
    chosen = preset(name)
    assert chosen.name == name
    assert chosen.source
    assert chosen.summary
    assert "\n" not in chosen.summary + chosen.source
    if not chosen.file:
        text = chosen.yaml()
        assert all(f"# - {each}\n" in text for each in chosen.assumed)
        assert f"# Source: {chosen.source}\n" in text


@pytest.mark.parametrize(
    ("name", "adapters", "rate_rps"),
    [
        ("chameleon-up", 100, 8.0),
        ("chameleon-pp-200", 200, 9.5),
        ("chameleon-a100-30b", 10, 8.0),
        ("loraserve-poisson-shifting", 25, 32.0),
        ("loraserve-rankskew-3", 100, 36.0),
        ("loraserve-micro-64", 1, 4.0),
        ("toppings-maf-256", 256, 3.6),
        ("toppings-s4", 50, 3.0),
        ("toppings-simulation", 40_000, 340.0),
        ("dt-figure1", 128, 6.4),
        ("slora-n-50", 50, 2.0),
        ("dlora-6", 128, 6.0),
        ("vllm-hot-adapter", 32, 8.0),
        ("real-azure-code", 100, 2.566),
    ],
)
def test_a_preset_has_the_published_size_and_rate(name, adapters, rate_rps, tmp_path):
    w = loaded(name, tmp_path)
    assert len(w.adapters) == adapters
    assert w.total_rate_rps == pytest.approx(rate_rps, rel=2e-3)


def test_popularity_of_ranks_is_the_published_one(tmp_path):
    w = loaded("loraserve-rankskew-1", tmp_path)
    by_rank = {rank: sum(a.rate_rps for a in w.adapters if a.rank == rank) for rank in (8, 16, 32, 64, 128)}
    shares = np.array(list(by_rank.values())) / w.total_rate_rps
    assert shares == pytest.approx([0.438, 0.219, 0.146, 0.110, 0.088], abs=1e-3)


def test_loraserve_s_fact_about_the_five_most_popular_adapters_holds(tmp_path):
    rates = np.array([a.rate_rps for a in loaded("loraserve-facts-popularity", tmp_path).adapters])
    assert rates[:5].sum() / rates.sum() == pytest.approx(0.724, abs=0.002)


def test_stand_ins_for_lmsys_have_its_published_moments(tmp_path):
    w = loaded("toppings-s1", tmp_path)
    assert length_table(w.prompt_tokens, 8192).mean_tokens == pytest.approx(69.5, rel=0.03)
    assert length_table(w.output_tokens, 2048).mean_tokens == pytest.approx(212, rel=0.03)
    prompts = draw_requests(w, 4000.0, 0, 8192).prompt_tokens
    assert (prompts <= 256).mean() >= 0.9
    assert (prompts <= 1000).mean() >= 0.985


def test_toppings_asks_for_another_adapter_every_time(tmp_path):
    r = draw_requests(loaded("toppings-s3", tmp_path), 600.0, 0, 8192)
    reuse = [np.diff(np.flatnonzero(r.adapter == adapter)) for adapter in range(1, 201)]
    assert min(distances.min() for distances in reuse) >= 199  # rounding may swap two that come together
    gaps = np.diff(r.arrival_ns[:200])
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.25)


def test_traces_are_dealt_to_all_ranks_alike(tmp_path):
    w = loaded("real-azure-conversations", tmp_path)
    shares = [sum(a.rate_rps for a in w.adapters if a.rank == rank) / w.total_rate_rps for rank in (8, 64)]
    assert shares == pytest.approx([0.25, 0.25], abs=0.02)


def test_profile_model_and_gpus_can_be_chosen(tmp_path):
    text = preset("dt-figure1").yaml(profile='a "quoted".json', base_model="other/model", gpus=7)
    path = tmp_path / "workload.yaml"
    path.write_text(text, encoding="utf-8")
    w = load_workload(path)
    assert (w.base_model, w.gpus.count) == ("other/model", 7)
    assert w.profile.endswith('a "quoted".json')
    assert "# the source has meta-llama/Llama-3.1-8B-Instruct" in text


def test_a_missing_trace_and_an_unknown_name_are_refused(tmp_path):
    with pytest.raises(
        InputError, match="--traces: is required: preset chameleon-up needs azure_llm_2023_conv"
    ):
        preset("chameleon-up").yaml()
    with pytest.raises(InputError, match=r"must hold azure_llm_2023_conv\.parquet, which preset"):
        preset("chameleon-up").yaml(traces=str(tmp_path))
    with pytest.raises(InputError, match="did you mean 'chameleon-up'"):
        preset("chamelion-up")
