"""Search of scheduler and cache settings against held-out windows."""

import numpy as np
import pytest

from capplan import Adapter, InputError, Workload
from capplan.datasets import load_profile
from capplan.planner import Settings, TuneOptions, fragment, tune
from capplan.spec import Cache, CpuLora, FittedModel, Lengths, Scheduler, cache_of, scheduler_of
from capplan.twin.instance import run

PROFILE = "h100-64g/llama-2-7b/s-lora-c1ddf48"


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(
        base_model="meta-llama/Llama-2-7b-hf",
        profile=PROFILE,
        adapters=[Adapter(name=f"a{i}", rank=(8, 128)[i % 2], rate_rps=1.0) for i in range(12)],
        prompt_tokens=Lengths(mean=200, std=200),
        output_tokens=Lengths(mean=60, std=60),
    )


OPTIONS = TuneOptions(duration_s=80.0, trials=4)


def test_found_settings_are_no_worse_on_the_search_windows_and_the_same_for_a_seed(workload):
    profile = load_profile(PROFILE)
    progress = []
    tuned = tune(workload, profile, OPTIONS, lambda *done: progress.append(done))
    assert progress == [(trial, 4) for trial in (1, 2, 3, 4)]
    assert tuned.trials == 4
    assert tuned.window_s == 20.0
    assert tuned.found.search_p99_s <= tuned.before.search_p99_s
    assert tuned.before.scheduler == Scheduler(policy="chameleon")
    assert np.isfinite([tuned.found.held_out_p99_s, tuned.before.held_out_p99_s]).all()
    assert tune(workload, profile, OPTIONS) == tuned


def test_a_fragment_of_a_workload_file_holds_the_settings(workload):
    tuned = tune(workload, load_profile(PROFILE), OPTIONS)
    document = fragment(tuned.found)
    assert scheduler_of(document["scheduler"]) == tuned.found.scheduler
    assert cache_of(document["cache"]) == tuned.found.cache


def test_a_fragment_names_the_predictor_as_the_workload_file_does(workload):
    settings = Settings(
        Scheduler(policy="chameleon", predictor={"kind": "learned", "file": "some/folder/p.json"}),
        Cache(policy="chameleon"),
        0.0,
        0.0,
    )
    for folder, name in (
        ("some", "folder/p.json"),
        ("some/folder", "p.json"),
        ("other", "some/folder/p.json"),
    ):
        assert fragment(settings, folder)["scheduler"]["predictor"]["file"] == name


def test_windows_begin_with_the_queues_of_the_first(workload, monkeypatch):
    begun = []

    def observed(scenario):
        begun.append(None if scenario.pool is None or scenario.pool.queues is None else scenario.pool.queues)
        return run(scenario)

    monkeypatch.setattr("capplan.planner._tuning.run", observed)
    tune(workload, load_profile(PROFILE), TuneOptions(duration_s=400.0, trials=1))
    first, *others = begun[:3]  # the design, and the two windows of the search
    assert first is None
    assert others[0] is not None
    assert others[0] == others[1]


def test_assisted_loads_are_tried_where_the_profile_knows_the_cores(workload):
    """Assistance is found where loads are slow; a cache that says how it loads keeps that."""
    profile = load_profile(PROFILE).replace(
        cpu_lora=CpuLora(
            workers=16,
            tokens_per_task=16,
            task_base_ms=0.0,
            ms_per_mmac=1e-4,
            signal_ms=0.0,
            provenance=load_profile(PROFILE).provenance,
        )
    )
    slow = profile.replace(loading=_slower(profile.loading, 20.0))
    options = TuneOptions(duration_s=80.0, trials=8)
    tuned = tune(workload, slow, options)
    assert tuned.found.cache.loading == "assisted"
    assert tuned.found.held_out_p99_s < tuned.before.held_out_p99_s
    given = workload.model_copy(
        update={
            "scheduler": Scheduler(policy="chameleon"),
            "cache": Cache(policy="chameleon", loading="on-demand"),
        }
    )
    assert tune(given, slow, options).found.cache.loading == "on-demand"


def _slower(loading: FittedModel, factor: float) -> FittedModel:
    coefficients = {
        name: each.replace(value=factor * each.value) if "gpu" in name else each
        for name, each in loading.coefficients.items()
    }
    return loading.replace(coefficients=coefficients)


def test_what_cannot_be_tuned_is_refused(workload):
    profile = load_profile(PROFILE)
    fifo = workload.model_copy(update={"scheduler": Scheduler(policy="fifo")})
    with pytest.raises(InputError, match="scheduler: must be chameleon"):
        tune(fifo, profile, OPTIONS)
    lru = workload.model_copy(
        update={"scheduler": Scheduler(policy="chameleon"), "cache": Cache(policy="lru")}
    )
    with pytest.raises(InputError, match="cache: must be chameleon"):
        tune(lru, profile, OPTIONS)
    with pytest.raises(InputError, match="--windows: must be at least 2"):
        TuneOptions(windows=1)
    with pytest.raises(InputError, match="--duration: must give every one"):
        tune(workload, profile, TuneOptions(duration_s=0.01))
