"""Every preset is a workload file that loads, and requests that can be drawn."""

from pathlib import Path

import numpy as np
import pytest

from capplan import InputError, Workload, load_workload
from capplan.workload import draw_requests, length_table, preset, presets
from capplan.workload._presets import read_presets

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
    duration_s = 400 / w.total_rate_rps + 1  # gaps of cv 12 leave shorter times empty now and then
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
        ("loraserve-scaleout-8", 50, 64.0),
        ("loraserve-scaleout-12", 75, 96.0),
        ("chameleon-up-burst", 100, 9.5),
        ("slora-table-1000", 1000, 10.0),
        ("real-tenants-bursty-mid", 109, 3.0),
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


@pytest.mark.parametrize("adapters", [8, 16, 32, 64, 128, 192, 256, 320, 384])
@pytest.mark.parametrize(("rates", "allowed"), [("high", {1.6, 0.8, 0.4}), ("low", {0.1, 0.05, 0.025})])
def test_predictable_workloads_of_every_size_draw_from_the_published_sets(adapters, rates, allowed, tmp_path):
    w = loaded(f"dt-predictable-{rates}-r8-16-n{adapters}", tmp_path)
    assert len(w.adapters) == adapters
    assert {a.rate_rps for a in w.adapters} <= allowed
    assert {a.rank for a in w.adapters} <= {8, 16}


@pytest.mark.parametrize("name", ["dt-predictable-low-r8-16-32-n64", "dt-unpredictable-low-64"])
def test_original_differs_from_mean_in_lengths_alone(name, tmp_path):
    mean, original = loaded(name, tmp_path), loaded(f"{name}-original", tmp_path)
    assert original.adapters == mean.adapters
    assert original.arrivals == mean.arrivals
    prompts, outputs = (length_table(x, 16_384) for x in (original.prompt_tokens, original.output_tokens))
    assert (prompts.mean_tokens, prompts.std_tokens) == pytest.approx((223, 245), rel=0.01)
    assert (outputs.mean_tokens, outputs.std_tokens) == pytest.approx((194, 206), rel=0.01)
    assert length_table(mean.prompt_tokens, 16_384).std_tokens < 1


def test_the_burst_comes_at_five_minutes(tmp_path):
    w = loaded("chameleon-up-burst", tmp_path)
    arrival_s = np.concatenate([draw_requests(w, 600.0, seed, 8192).arrival_ns / 1e9 for seed in range(10)])
    burst = np.count_nonzero((arrival_s >= 300) & (arrival_s < 330)) / 30
    rest = np.count_nonzero((arrival_s < 300) | (arrival_s >= 330)) / 570
    assert burst / rest == pytest.approx(2, rel=0.1)


def test_a_preset_of_one_gpu_stands_beside_that_of_four(tmp_path):
    for rates in ("high", "low", "mixed"):
        four, one = (loaded(f"dt-caching-{rates}-mixed{end}", tmp_path) for end in ("", "-1gpu"))
        assert (four.gpus.count, one.gpus.count) == (4, 1)
        assert len(four.adapters) == 4 * len(one.adapters)


def test_a_missing_trace_and_an_unknown_name_are_refused(tmp_path):
    with pytest.raises(
        InputError, match="--traces: is required: preset chameleon-up needs azure_llm_2023_conv"
    ):
        preset("chameleon-up").yaml()
    with pytest.raises(InputError, match=r"must hold azure_llm_2023_conv\.parquet, which preset"):
        preset("chameleon-up").yaml(traces=str(tmp_path))
    with pytest.raises(InputError, match="did you mean 'chameleon-up'"):
        preset("chamelion-up")


FAMILY = """
order: 1
source: A paper
licence: none
defaults: {source: A paper, base_model: m, requests: {prompt_tokens: {mean: 5}, output_tokens: {mean: 5}}}
presets:
  - name: p-$n-$level
    summary: $n adapters, $rps RPS
    for:
      - n: [1, 2]
      - {level: [low, high], rps: [0.5, 8]}
    adapters: [{name: "a-{i}", count: $n, rank: 8, rate_rps: $rps}]
    assumed: [always, $level]
"""


def test_a_family_combines_its_parameters_and_keeps_their_types():
    _, found = read_presets(FAMILY, "paper.yaml")
    assert [each.name for each in found] == ["p-1-low", "p-1-high", "p-2-low", "p-2-high"]
    assert found[3].summary == "2 adapters, 8 RPS"
    assert found[3].adapters == ({"name": "a-{i}", "count": 2, "rank": 8, "rate_rps": 8},)
    assert found[0].assumed == ("always", "low")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("$rps RPS", "$rsp RPS"), r"paper.yaml:7: presets\[0\].*unknown parameter; did you mean 'rps'"),
        (("[0.5, 8]", "[0.5]"), "equally long lists"),
        (("summary:", "sumary:"), "sumary: unknown key; did you mean 'summary'"),
        (("licence: none", ""), "licence: is required"),
    ],
)
def test_a_broken_preset_file_is_located(change, message):
    with pytest.raises(InputError, match=message):
        read_presets(FAMILY.replace(*change), "paper.yaml")


@pytest.mark.parametrize(
    "name",
    ["toppings-s4", "real-mooncake-conversations", "real-mooncake-synthetic", "real-servegen-reasoning"],
)
def test_presets_of_long_prompts_leave_their_recorded_lengths_room(name, tmp_path):
    w = loaded(name, tmp_path)
    lengths = w.length_pairs or w.trace
    tokens = lengths.prompt_tokens.astype(int) + lengths.output_tokens
    assert tokens[lengths.prompt_tokens < w.engine.max_model_len].sum() > 0.9 * tokens.sum()


def test_chats_have_the_means_of_lmsys_and_outputs_in_the_ratio_of_the_slos(tmp_path):
    lmsys, wildchat = (loaded(f"chameleon-{name}", tmp_path) for name in ("lmsys", "wildchat"))
    outputs = [length_table(w.output_tokens, 8192).mean_tokens for w in (lmsys, wildchat)]
    assert length_table(lmsys.prompt_tokens, 8192).mean_tokens == pytest.approx(69.5, rel=0.01)
    assert outputs[0] == pytest.approx(214.5, rel=0.01)
    assert outputs[1] / outputs[0] == pytest.approx(3.3 / 3.5, rel=1e-3)
    assert [w.slo.latency_bounds()["ttft_p99_s"] for w in (lmsys, wildchat)] == [3.5, 3.3]
