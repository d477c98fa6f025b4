"""What workloads, plans and callers say of scheduler and adapter cache."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from capplan import InputError, Workload, load_workload
from capplan.spec import Cache, Predictor, QueueConfig, Scheduler, WorkloadFile
from capplan.spec.scheduling import cache_of, completed, scheduler_of

FILE = """\
base_model: m
profile: some/profile
requests: {prompt_tokens: {mean: 100}, output_tokens: {mean: 10}}
adapters: [{name: a, rank: 8, rate_rps: 0.5}]
"""


def loaded(folder: Path, section: str = "") -> Workload:
    path = folder / "workload.yaml"
    path.write_text(FILE + section)
    return load_workload(path)


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ("", None),
        ("scheduler: sjf", (Scheduler(policy="sjf"), Cache(policy="none"))),
        ("cache: gdsf", (Scheduler(policy="fifo"), Cache(policy="gdsf"))),
        ("queues: {max_queues: 2}", (Scheduler(policy="chameleon", queues=QueueConfig(max_queues=2)), None)),
        ("queues: {}\ncache: lru", (Scheduler(policy="chameleon"), Cache(policy="lru"))),
        ("scheduler: slora-every-step", (Scheduler(policy="slora", admit_every=1), None)),
        (
            "scheduler: {policy: sjf, ageing_s: 3, predictor: {kind: classes, accuracy: 0.8}}\n"
            "cache: {policy: chameleon, weights: {size: 0.1}, prefetch: histogram}",
            (
                Scheduler(policy="sjf", ageing_s=3.0, predictor=Predictor(kind="classes", accuracy=0.8)),
                Cache(policy="chameleon", weights={"size": 0.1}, prefetch="histogram"),
            ),
        ),
    ],
)
def test_a_name_stands_for_its_defaults_and_one_key_completes_the_other(
    tmp_path: Path, section: str, wanted: tuple[Scheduler, Cache | None] | None
) -> None:
    expected = wanted and (wanted[0], wanted[1] or Cache(policy="none"))
    assert loaded(tmp_path, section).scheduling == expected


def test_slora_admits_every_ten_steps_unless_told_otherwise() -> None:
    assert Scheduler(policy="slora").admit_every == 10
    assert Scheduler(policy="slora", admit_every=3).admit_every == 3
    assert scheduler_of("slora-every-step") == Scheduler(policy="slora", admit_every=1)


def test_weights_are_the_papers_where_not_given_and_equal_for_fairshare() -> None:
    assert Cache(policy="chameleon").score_weights == (0.45, 0.10, 0.45)
    assert Cache(policy="chameleon", weights={"recency": 0.0}).score_weights == (0.45, 0.0, 0.45)
    assert Cache(policy="fairshare").score_weights == pytest.approx((1 / 3,) * 3)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("scheduler: chamelion", "scheduler.policy: must be one of chameleon, fifo, sjf, static, slora"),
        ("scheduler: chamelion", "did you mean 'chameleon'? (got 'chamelion')"),
        (
            "scheduler: {policy: fifo, agieng_s: 3}",
            "scheduler.agieng_s: unknown key; did you mean 'ageing_s'",
        ),
        ("scheduler: {policy: fifo, ageing_s: 3}", "scheduler.ageing_s: goes with policy sjf (got 3.0)"),
        ("scheduler: {policy: slora, chunked: true}", "scheduler.chunked: must be false for policy slora"),
        ("scheduler: {policy: sjf, admit_every: 0}", "scheduler.admit_every: must be a whole number >= 1"),
        ("scheduler: {policy: sjf, predictor: orakle}", "scheduler.predictor.kind: must be one of oracle"),
        ("scheduler: {policy: sjf, predictor: learned}", "scheduler.predictor.file: is required for kind"),
        (
            "scheduler: {policy: sjf, predictor: {accuracy: 0.6}}",
            "scheduler.predictor.accuracy: goes with kind classes (got 0.6)",
        ),
        ("scheduler: [fifo]", "scheduler: must be a mapping"),
        ("scheduler: fifo\nqueues: {}", "queues: does not go with scheduler: give scheduler.queues"),
        (
            "cache: lrv",
            "cache.policy: must be one of none, lru, fairshare, gdsf, chameleon; did you mean",
        ),
        ("cache: {policy: lru, weights: {size: 1}}", "cache.weights: go with policy chameleon"),
        (
            "cache: {policy: chameleon, weights: {age: 1}}",
            "cache.weights.age: must be the weight of",
        ),
        (
            "cache: {policy: chameleon, weights: {size: -1}}",
            "cache.weights.size: must be a finite number",
        ),
        (
            "cache: {policy: chameleon, weights: {frequency: 0, recency: 0, size: 0}}",
            "cache.weights: must not all be 0",
        ),
        ("cache: {policy: lru, prefetch: all}", "cache.prefetch: must be one of none, queue, histogram"),
        ("scheduler: slora\ncache: lru", "cache: must be none beside scheduler slora"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(tmp_path: Path, section: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        loaded(tmp_path, section)
    assert message in str(error.value)
    assert "workload.yaml:" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_caller_gives_a_name_a_mapping_or_the_setting() -> None:
    fifo = Scheduler(policy="fifo")
    assert scheduler_of(None) is None
    assert scheduler_of(fifo) is fifo
    assert scheduler_of("fifo") == scheduler_of({"policy": "fifo"}) == fifo
    with pytest.raises(InputError, match=r"^cache: must be one of none, .*did you mean 'gdsf'"):
        cache_of("gdfs")
    with pytest.raises(InputError, match=r"^scheduler\.refresh_s: must be a number of seconds from 1"):
        scheduler_of({"policy": "chameleon", "refresh_s": 0.5})
    with pytest.raises(InputError, match=r"^cache: must be none beside scheduler slora"):
        completed(Scheduler(policy="slora"), Cache(policy="lru"))


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": "slora-every-step"},
        {"scheduler": {"policy": "sjf", "predictor": "oracle"}, "cache": "fairshare"},
        {"scheduler": "chameleon", "cache": {"policy": "chameleon", "weights": {"frequency": 1.0}}},
    ],
)
def test_names_and_mappings_fit_the_schema_and_survive_a_round_trip(settings: dict[str, Any]) -> None:
    file = WorkloadFile(
        base_model="m",
        profile="p",
        requests={"prompt_tokens": {"mean": 9}, "output_tokens": {"mean": 9}},
        adapters=[{"name": "a", "rank": 8, "rate_rps": 1.0}],
        **settings,
    )
    assert WorkloadFile(**file.model_dump(mode="json")) == file
    schema = WorkloadFile.model_json_schema()
    jsonschema.validate({"base_model": "m", **settings}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"base_model": "m", "scheduler": "chamelion"}, schema)


def test_a_learned_predictor_is_beside_the_workload_file_and_its_folder_not_in_the_digest(
    tmp_path: Path,
) -> None:
    section = "scheduler: {policy: sjf, predictor: {kind: learned, file: p.json}}"
    (tmp_path / "other").mkdir()
    one, other = loaded(tmp_path, section), loaded(tmp_path / "other", section)
    assert one.scheduler is not None
    assert one.scheduler.predictor.file == str(tmp_path / "p.json")
    assert one.digest() == other.digest() != loaded(tmp_path).digest()
