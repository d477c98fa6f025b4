"""What a workload says of queues."""

from pathlib import Path

import jsonschema
import pytest

from capplan import Adapter, InputError, Lengths, Workload, load_workload
from capplan.spec import QueueConfig, WorkloadFile

FILE = """\
base_model: m
profile: some/profile
requests: {prompt_tokens: {mean: 100}, output_tokens: {mean: 10}}
adapters: [{name: a, rank: 8, rate_rps: 0.5}]
"""


def loaded(folder: Path, queues: str = "") -> Workload:
    path = folder / "workload.yaml"
    path.write_text(FILE + queues)
    return load_workload(path)


def test_an_absent_section_asks_for_no_queues_and_an_empty_one_for_the_defaults(tmp_path: Path) -> None:
    assert loaded(tmp_path).queues is None
    assert loaded(tmp_path, "queues: {}\n").queues == QueueConfig()


def test_a_section_is_read_and_fits_the_schema(tmp_path: Path) -> None:
    settings = {
        "size": "output_only",
        "clusters": "wcss",
        "max_queues": 3,
        "quota_size": "p99",
        "percentile": 0.99,
    }
    section = ", ".join(f"{key}: {value}" for key, value in settings.items())
    assert loaded(tmp_path, f"queues: {{{section}}}\n").queues == QueueConfig(**settings)  # type: ignore[arg-type]
    schema = WorkloadFile.model_json_schema()
    document = {"base_model": "m", "queues": settings}
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "queues": {"size": "degree3"}}, schema)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{policy: fifo}", "queues.policy: must be 'chameleon'"),
        ("{cluster: elbow}", "queues.cluster: unknown key; did you mean 'clusters'?"),
        ("{max_queues: 0}", "queues.max_queues: must be a whole number from 1 to 16 (got 0)"),
        ("{max_queues: 2.5}", "queues.max_queues: must be a whole number from 1 to 16 (got 2.5)"),
        ("{percentile: 1}", "queues.percentile: must be a number above 0 and below 1"),
        ("{quota_size: p9}", "queues.quota_size: must be 'max', 'p99' or 'mean' (got 'p9')"),
        ("yes", "queues: must be a mapping"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(tmp_path: Path, section: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        loaded(tmp_path, f"queues: {section}\n")
    assert f"workload.yaml:5: {message}" in str(error.value)


def small() -> Workload:
    fields = {"base_model": "m", "prompt_tokens": Lengths(mean=9), "output_tokens": Lengths(mean=9)}
    return Workload(adapters=[Adapter(name="a", rank=8, rate_rps=1.0)], **fields)


@pytest.mark.parametrize(
    ("queues", "digest"),
    [
        (QueueConfig(), "a7b6e8b27dc6902c5d5cb09863b43a13cfd4780dce1f6f2c0a99314343fc7bce"),
        (QueueConfig(max_queues=2), "65f3abda19f0bf7348023f2821d3260510295e6701c8a2002fd30a196140a51f"),
    ],
)
def test_queues_of_before_the_weight_of_the_prompt_keep_their_digest(
    queues: QueueConfig, digest: str
) -> None:
    assert small().replace(queues=queues).digest() == digest
    assert small().replace(queues=queues.replace(prompt_weight=0.5)).digest() != digest


def test_queues_count_in_the_digest_only_when_they_are_asked_for() -> None:
    """Plans of before queues must keep matching their workloads."""
    without = small()
    digests = {without.digest(), *(without.replace(queues=each).digest() for each in (None, QueueConfig()))}
    assert len(digests) == 2
    assert without.replace(queues=QueueConfig(max_queues=2)).digest() not in digests
    assert '"queues"' not in without.model_dump_json(exclude_none=True)
