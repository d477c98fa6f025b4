"""What workloads, plans and callers say of scheduler, queues and adapter cache."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from capplan import Adapter, InputError, Lengths, Workload, load_workload
from capplan.spec import (
    Cache,
    Predictor,
    QueueConfig,
    Scheduler,
    WorkloadFile,
    cache_of,
    completed,
    scheduler_of,
)

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


UNREAD = [
    ("scheduler: {policy: fifo, bypass: true}", "scheduler.bypass: goes with policy chameleon or static"),
    ("scheduler: {policy: sjf, queues: {}}", "scheduler.queues: goes with policy chameleon or static"),
    (
        "scheduler: {policy: fifo, predictor: oracle}",
        "scheduler.predictor: goes with policy chameleon, static or sjf",
    ),
    ("scheduler: {policy: slora, predictor: oracle}", "scheduler.predictor: goes with policy chameleon"),
    (
        "scheduler: {policy: slora, chunked: false}",
        "scheduler.chunked: goes with policy chameleon, static, fifo or sjf (got False)",
    ),
    (
        "scheduler: {policy: sjf, refresh_s: 300}",
        "scheduler.refresh_s: goes with policy chameleon or static, or cache chameleon, fairshare or gdsf",
    ),
    ("scheduler: {policy: fifo, refresh_s: 60}\ncache: lru", "scheduler.refresh_s: goes with policy"),
    ("scheduler: {policy: slora, refresh_s: 60}", "scheduler.refresh_s: goes with policy chameleon, static"),
    *(
        (
            f"scheduler: {{policy: static, queues: {{{key}: {value}}}}}",
            f"scheduler.queues.{key}: goes with policy chameleon (got ",
        )
        for key, value in {
            "clusters": "elbow",
            "max_queues": 4,
            "quota_size": "max",
            "percentile": 0.9,
            "rest": "load",
        }.items()
    ),
    (
        "queues: {size: output_only, prompt_weight: 0.4}",
        "queues.prompt_weight: goes with size degree2 or degree1 (got 0.4)",
    ),
    ("scheduler: slora\ncache: {policy: none, prefetch: none}", "cache.prefetch: must be queue beside"),
    ("cache: {policy: lru, weights: {size: 1}}", "cache.weights.size: goes with policy chameleon (got 1.0)"),
    ("cache: {policy: gdsf, weights: {}}", "cache.weights: goes with policy chameleon"),
]
"""Keys without effect are refused, whatever their value."""


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("scheduler: chamelion", "scheduler: must be one of chameleon, fifo, sjf, static, slora"),
        ("scheduler: chamelion", "did you mean 'chameleon'? (got 'chamelion')"),
        (
            "scheduler: {policy: fifo, agieng_s: 3}",
            "scheduler.agieng_s: unknown key; did you mean 'ageing_s'",
        ),
        ("scheduler: {policy: fifo, ageing_s: 3}", "scheduler.ageing_s: goes with policy sjf (got 3.0)"),
        ("scheduler: {policy: sjf, merging: {}}", "scheduler.merging: goes with policy fifo"),
        (
            "scheduler: {policy: fifo, merging: {merged_ms: 30}}",
            "scheduler.merging.merged_ms: must be below unmerged_ms, 27 (got 30.0)",
        ),
        ("scheduler: 3", "scheduler: must be a name or a mapping of keys to values (got 3)"),
        ('scheduler: ""', "scheduler: must be one of chameleon, fifo, sjf, static, slora"),
        ("scheduler: {policy: sjf, admit_every: 0}", "scheduler.admit_every: must be a whole number >= 1"),
        ("scheduler: {policy: sjf, predictor: orakle}", "scheduler.predictor: must be one of oracle"),
        ("scheduler: {policy: sjf, predictor: learned}", "scheduler.predictor.file: is required for kind"),
        (
            "scheduler: {policy: sjf, predictor: {accuracy: 0.6}}",
            "scheduler.predictor.accuracy: goes with kind classes (got 0.6)",
        ),
        ("scheduler: [fifo]", "scheduler: must be a name or a mapping"),
        (
            "scheduler: {policy: slora-every-step, admit_every: 3}",
            "scheduler.admit_every: must be 1 for policy slora-every-step (got 3)",
        ),
        ("scheduler: fifo\nqueues: {}", "queues: does not go with scheduler: give scheduler.queues"),
        (
            "cache: lrv",
            "cache: must be one of none, lru, fairshare, gdsf, chameleon; did you mean",
        ),
        ("queues: yes", "queues: must be a mapping"),
        ("queues: {policy: fifo}", "queues.policy: must be 'chameleon'"),
        ("queues: {cluster: elbow}", "queues.cluster: unknown key; did you mean 'clusters'?"),
        ("queues: {max_queues: 0}", "queues.max_queues: must be a whole number from 1 to 4 (got 0)"),
        ("queues: {max_queues: 5}", "queues.max_queues: must be a whole number from 1 to 4 (got 5)"),
        ("queues: {max_queues: 2.5}", "queues.max_queues: must be a whole number from 1 to 4 (got 2.5)"),
        ("queues: {percentile: 1}", "queues.percentile: must be a number above 0 and below 1"),
        ("queues: {quota_size: p9}", "queues.quota_size: must be 'max', 'p99' or 'mean' (got 'p9')"),
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
        *UNREAD,
    ],
)
def test_a_mistake_is_one_line_with_its_key(tmp_path: Path, section: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        loaded(tmp_path, section)
    assert message in str(error.value)
    assert "workload.yaml:" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_cache_that_counts_uses_reads_the_period(tmp_path: Path) -> None:
    pair = loaded(tmp_path, "scheduler: {policy: fifo, refresh_s: 60}\ncache: gdsf").scheduling
    assert pair is not None
    assert pair[0].refresh_s == 60.0


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
        {"scheduler": "slora", "cache": "none"},
        {"scheduler": {"policy": "fifo", "refresh_s": 60.0}, "cache": "chameleon"},
        {"scheduler": {"policy": "static", "queues": {"size": "output_only"}}, "cache": "lru"},
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
    assert file.replace() == file
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


def test_an_absent_section_asks_for_no_queues_and_an_empty_one_for_the_defaults(tmp_path: Path) -> None:
    assert loaded(tmp_path).queues is None
    assert loaded(tmp_path, "queues: {}").queues == QueueConfig()


def test_a_section_is_read_and_fits_the_schema(tmp_path: Path) -> None:
    settings = {
        "size": "output_only",
        "clusters": "wcss",
        "max_queues": 3,
        "quota_size": "p99",
        "percentile": 0.99,
    }
    section = ", ".join(f"{key}: {value}" for key, value in settings.items())
    assert loaded(tmp_path, f"queues: {{{section}}}").queues == QueueConfig(**settings)  # type: ignore[arg-type]
    schema = WorkloadFile.model_json_schema()
    document = {"base_model": "m", "queues": settings}
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "queues": {"size": "degree3"}}, schema)


def small() -> Workload:
    fields = {"base_model": "m", "prompt_tokens": Lengths(mean=9), "output_tokens": Lengths(mean=9)}
    return Workload(adapters=[Adapter(name="a", rank=8, rate_rps=1.0)], **fields)


@pytest.mark.parametrize(
    ("queues", "digest"),
    [
        (QueueConfig(), "e586b1e84fee485c5ec52523596eed640447f654f6ce61aa288a6dbec8108de6"),
        (QueueConfig(max_queues=2), "ee1fa8e562dc1c7c5575147469d6f11c1a754f347259f4a18dfa0514bd97445b"),
    ],
)
def test_the_default_weight_of_the_prompt_is_not_in_the_digest(queues: QueueConfig, digest: str) -> None:
    assert small().replace(queues=queues).digest() == digest
    assert small().replace(queues=queues.replace(prompt_weight=0.5)).digest() != digest


def test_queues_count_in_the_digest_only_when_they_are_asked_for() -> None:
    """Plans of before queues must keep matching their workloads."""
    without = small()
    digests = {without.digest(), *(without.replace(queues=each).digest() for each in (None, QueueConfig()))}
    assert len(digests) == 2
    assert without.replace(queues=QueueConfig(max_queues=2)).digest() not in digests
    assert '"queues"' not in without.model_dump_json(exclude_none=True)
