"""Plan documents survive the way to a file and back, and contradictions are refused."""

import copy
import json
import os

import jsonschema
import pytest

from capplan import InputError, Plan, Slo
from capplan.spec import Cache, Percentiles, Scheduler, write_text_atomic
from capplan.spec._plan import not_simulated

DOCUMENT = {
    "schema_version": 1,
    "created_by": "capplan 0.1.0",
    "base_model": "m",
    "engine": {"name": "vllm", "version": "0.8.5", "rules": "vllm-0.8"},
    "objective": "min_gpus",
    "slo": {"ttft_p99_s": 5.0},
    "workload_digest": "0" * 64,
    "groups": [
        {
            "id": f"g{i}",
            "replicas": 1,
            "pool": None,
            "gpu": "H100-64G",
            "tp": 1,
            "profile": "h100-64g/llama-3.1-8b/vllm-0.8.5",
            "engine_args": {
                "max_loras": 8,
                "max_lora_rank": 16,
                "max_cpu_loras": None,
                "max_num_seqs": 256,
                "max_num_batched_tokens": 2048,
                "gpu_memory_utilization": 0.9,
                "max_model_len": 8192,
            },
            "adapters": [{"name": "a", "rank": 16, "rate_rps": 0.5, "path": None, "share": share}],
            "queues": {
                "wrs": {
                    "a": 0.4,
                    "b": 0.6,
                    "max_prompt_tokens": 4096,
                    "max_output_tokens": 1024,
                    "max_adapter_bytes": 10**8,
                },
                "classes": [
                    {"upper_wrs": 0.25, "quota_tokens": 1000},
                    {"upper_wrs": None, "quota_tokens": 5000},
                ],
            },
            "cache": {"policy": "chameleon", "weights": {"size": 0.1}},
            "predicted": {
                "throughput_tok_s": 100.0,
                "low_tok_s": 90.0,
                "high_tok_s": 110.0,
                "ttft_s": {"mean": 0.1, "p50": 0.1, "p95": 0.2, "p99": 0.3},
                "tpot_ms": {"mean": None},
                "served_fraction": 1.0,
                "kv_tokens": 100_000,
                "load_over_capacity": 0.8,
                "source": "twin",
            },
            "binds": {"resource": "kv", "value": 100_000, "note": "KV cache holds 100000 tokens"},
        }
        for i, share in enumerate((0.25, 0.75))
    ],
    "totals": {"gpus": 2, "lower_bound_gpus": 1, "usd_per_hour": None},
    "moves": [{"adapter": "a", "from_group": None, "to_group": "g0", "share": 0.25}],
    "provenance": {"seed": 0, "notes": ["x", None, 1.5]},
    "verification": {
        "ok": True,
        "seeds": [1, 2],
        "duration_s": 3600.0,
        "min_served_fraction": 0.99,
        "groups": [{"id": "g0", "ok": True, "served_fraction": 0.99, "throughput_tok_s": 99.0}],
    },
}


def write(folder, document):
    path = folder / "plan.json"
    path.write_text(
        document if isinstance(document, str) else json.dumps(document, indent=1), encoding="utf-8"
    )
    return path


def refusal(path):
    with pytest.raises(InputError) as caught:
        Plan.from_json(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.mark.parametrize("key", [key for key in Slo.model_fields if key.startswith(("ttft_", "tpot_"))])
def test_a_plan_records_the_statistic_of_every_bound_on_ttft_and_tpot(key):
    """Reports compare it with the bound."""
    assert key.split("_")[1] in Percentiles.model_fields


def test_a_plan_survives_the_way_to_a_file_and_back(tmp_path):
    plan = Plan.from_json(write(tmp_path, DOCUMENT))
    text = plan.to_json(tmp_path / "again.json")
    assert Plan.from_json(tmp_path / "again.json") == plan
    assert (tmp_path / "again.json").read_text(encoding="utf-8") == text
    assert plan.groups[0].engine_args.max_loras == 8
    jsonschema.validate(json.loads(text), Plan.model_json_schema(mode="serialization"))
    jsonschema.validate(DOCUMENT, Plan.model_json_schema())


def test_a_group_has_the_scheduler_and_cache_of_its_fields_and_one_of_before_that_of_its_queues(tmp_path):
    old = Plan.from_json(write(tmp_path, DOCUMENT)).groups[0]
    assert old.scheduling == (Scheduler(policy="chameleon"), Cache(policy="chameleon", weights={"size": 0.1}))
    assert old.replace(queues=None, cache=None).scheduling is None
    assert "scheduler" not in old.model_dump()
    settings = {"policy": "sjf", "ageing_s": 2.0}
    group = old.replace(queues=None, scheduler=settings, cache="lru")
    assert group.scheduling == (Scheduler(**settings), Cache(policy="lru"))
    assert type(group)(**group.model_dump(mode="json")) == group


def test_a_cache_without_a_scheduler_was_not_simulated():
    """Verification of before simulated slots."""
    group = Plan.model_validate(DOCUMENT).groups[0].replace(queues=None)
    assert not_simulated([group.replace(cache=None)]) == ()
    assert not_simulated([group.replace(cache="lru")]) == ("cache",)
    assert not_simulated([group.replace(cache="lru", scheduler="fifo")]) == ()


def edited(key, value, document=DOCUMENT):
    """Return a document with another value of a key, such as groups.0.id."""
    result = copy.deepcopy(document)
    *parents, last = (int(part) if part.isdigit() else part for part in key.split("."))
    at = result
    for part in parents:
        at = at[part]
    at[last] = value
    return result


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "groups.0.adapters.0.share",
            0.3,
            "groups: shares of adapter 'a' must sum to 1 over groups (got 1.05)",
        ),
        ("groups.0.adapters.0.share", 0.0, "groups[0].adapters[0].share: must be a number above 0"),
        (
            "groups.0.adapters.0.rank",
            32,
            "groups[0].adapters[0].rank: must not exceed engine_args.max_lora_rank",
        ),
        ("groups.0.adapters.0.rank", 8, "groups[1].adapters[0]: must have the rank and rate of its other"),
        (
            "groups.0.adapters",
            DOCUMENT["groups"][0]["adapters"] * 2,
            "groups[0].adapters[1].name: must be unique",
        ),
        ("groups.0.adapters", [], "groups[0].adapters: must not be empty"),
        ("groups.0.engine_args.max_loras", 0, "groups[0].engine_args.max_loras: must be a whole number >= 1"),
        ("groups.0.engine_args.max_lora_rank", 24, "groups[0].engine_args.max_lora_rank: must be one of"),
        (
            "groups.0.engine_args.max_lora",
            1,
            "groups[0].engine_args.max_lora: unknown key; did you mean 'max_loras'?",
        ),
        ("groups.0.id", "g1", "groups[1].id: must be unique (got 'g1')"),
        ("groups.0.queues.classes.1.upper_wrs", 0.5, "groups[0].queues.classes[1].upper_wrs: must be null"),
        (
            "groups.0.queues.classes.0.upper_wrs",
            None,
            "groups[0].queues.classes[0].upper_wrs: must be a number",
        ),
        ("groups.0.scheduler", "fifo", "groups[0].queues: go with scheduler chameleon or static"),
        ("groups.0.scheduler", "fivo", "groups[0].scheduler: must be one of chameleon, fifo"),
        ("groups.0.predicted.low_tok_s", 200, "groups[0].predicted.high_tok_s: must not be below low_tok_s"),
        (
            "groups.0.binds.resource",
            "luck",
            "groups[0].binds.resource: must be 'kv', 'slots', 'compute' or 'slo'",
        ),
        ("totals.gpus", 3, "totals.gpus: must equal the sum over groups, 2 (got 3)"),
        ("verification.groups.0.id", "g9", "verification.groups[0].id: must be a group (got 'g9')"),
        ("verification.ok", 1, "verification.ok: must be true or false (got 1)"),
        ("workload_digest", "abc", "workload_digest: must be a SHA-256 in hexadecimal (got 'abc')"),
        ("schema_version", 2, "schema_version: must be 1 (got 2)"),
    ],
)
def test_a_contradiction_is_refused_with_its_line_and_key(tmp_path, key, value, message):
    said = refusal(write(tmp_path, edited(key, value)))
    place, _, rest = said.partition(": ")
    assert rest.startswith(message)
    name, line = place.split(":")
    assert name == "plan.json"
    assert int(line) >= 1


def test_a_key_is_found_on_its_line(tmp_path):
    path = write(tmp_path, edited("totals.gpus", 3))
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if '"gpus"' in text)
    assert refusal(path).startswith(f"plan.json:{line}: totals.gpus: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan.json:1: must be JSON: "),
        ('{"a": 1,\n}', "plan.json:"),
        ('{"a": 1, "a": 2}', "plan.json: duplicate key (got 'a')"),
        ('{"a": NaN}', "plan.json: a: must hold finite numbers only (got 'NaN')"),
        ("[]", "plan.json:1: must be a mapping"),
        ("[" * 100_000, "plan.json: must be JSON without deep nesting"),
        ('{"a": ' + "9" * 10_000 + "}", "plan.json"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_on_one_line(tmp_path, text, message):
    assert refusal(write(tmp_path, text)).startswith(message)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(InputError, match="cannot be written"):
        write_text_atomic(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_output_is_an_input_error(tmp_path):
    plan = Plan.from_json(write(tmp_path, DOCUMENT))
    for target in (tmp_path, tmp_path / "missing" / "plan.json", tmp_path / "plan.json" / "below"):
        with pytest.raises(InputError, match="cannot be written: "):
            plan.to_json(target)


def test_writing_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "link").symlink_to("target")
    write_text_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_pipe_is_written_to_directly(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text_atomic(tmp_path / "pipe", "new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)


SIMULATED = DOCUMENT | {"groups": [group | {"scheduler": "chameleon"} for group in DOCUMENT["groups"]]}
"""The document with a verification of all its settings."""

CHANGES = (
    ("base_model", "other/model"),
    ("engine.rules", "vllm-0.11"),
    ("slo", {"ttft_p99_s": 3.0}),
    ("workload_digest", "1" * 64),
    ("groups.0.profile", "./other.json"),
    ("groups.0.engine_args.max_loras", 4),
    ("groups.0.engine_args.enable_prefix_caching", False),
    ("groups.0.scheduler", {"policy": "chameleon", "chunked": True}),
    ("groups.0.cache", {"policy": "lru"}),
    ("groups.0.predicted.waiting_max", 3),
    ("groups.0.binds.value", 99_999),
    ("router", "toppings"),
    ("rebalance", {"every_s": 60.0}),
    ("provenance.seed", 1),
    ("provenance.gpus_per_link", 2),
    ("verification.seeds", [1, 3]),
    ("verification.duration_s", 60.0),
    ("verification.groups.0.served_fraction", 1.0),
)


def test_a_change_of_the_shares_changes_the_digest():
    shares = edited("groups.0.adapters.0.share", 0.5, SIMULATED)
    shares = edited("groups.1.adapters.0.share", 0.5, shares)
    assert Plan(**shares).digest() != Plan(**SIMULATED).digest()


@pytest.mark.parametrize(("key", "value"), CHANGES)
def test_a_change_of_what_is_verified_changes_the_digest(key, value):
    plan, other = Plan(**SIMULATED).with_digest(), Plan(**edited(key, value, SIMULATED))
    other = other.replace(verification=other.verification.replace(digest=plan.verification.digest))
    assert plan.is_verified
    assert not other.is_verified
    assert other.changed_after_verification() == "the plan was changed after its verification"
    with pytest.raises(InputError, match=r"^verification.digest: must be that of the plan to use it"):
        other.require_verified()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("groups.0.adapters.0.path", "/elsewhere/a"),
        ("groups.0.binds.value", 100_000.0),
        ("totals.usd_per_hour", 3.0),
        ("moves", []),
        ("provenance.ticket", "OPS-1"),
    ],
)
def test_a_digest_is_independent_of_where_adapters_are_and_how_numbers_are_written(key, value):
    assert Plan(**edited(key, value, SIMULATED)).digest() == Plan(**SIMULATED).digest()


def test_a_plan_written_in_another_order_and_layout_keeps_its_digest(tmp_path):
    plan = Plan(**SIMULATED).with_digest()
    document = json.loads(plan.to_json())
    path = write(tmp_path, json.dumps(dict(reversed(document.items())), separators=(",", ":")))
    assert Plan.from_json(path) == plan
    assert Plan.from_json(path).is_verified


def test_a_plan_without_a_digest_is_not_verified():
    plan = Plan(**SIMULATED)
    assert "digest" not in plan.model_dump(mode="json")["verification"]
    assert not plan.is_verified
    assert plan.changed_after_verification() == "the plan has no digest of its verification"
    assert plan.with_digest().is_verified


@pytest.mark.parametrize(("ok", "verdict"), [(True, "failed"), (True, "undecided"), (False, "verified")])
def test_a_verdict_agrees_with_ok(ok, verdict):
    with pytest.raises(InputError, match=r"verification\.ok: must be (true|false) if the verdict is"):
        Plan(**edited("verification.ok", ok, edited("verification.verdict", verdict, SIMULATED)))


def test_a_verdict_without_simulations_is_no_verification():
    plan = Plan(**edited("verification.ok", False, edited("verification.seeds", [], SIMULATED)))
    assert not plan.is_verified
    assert plan.changed_after_verification() == ""
