import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from capplan import list_profiles
from capplan.datasets import _profile_files as profile_files
from capplan.spec import Totals, Verification
from tests.cli.conftest import Run, error_line
from tests.cli.examples import WORKLOAD, group, profile_document, small_plan, verdict


@pytest.mark.parametrize(
    ("document", "example"),
    [
        ("plan", small_plan().model_dump(mode="json")),
        ("workload", yaml.safe_load(WORKLOAD)),
        ("profile", profile_document()),
    ],
)
def test_a_schema_accepts_its_document_and_no_unknown_key(run: Run, document: str, example: Any) -> None:
    schema = json.loads(run("schema", document).stdout)
    jsonschema.validators.validator_for(schema).check_schema(schema)
    jsonschema.validate(example, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(example | {"no_such_key": 1}, schema)


def test_profiles_lists_every_shipped_one(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("gpu-a/model/vllm-0.8.5", "gpu-b/model/vllm-0.8.5")
    for name in names:
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(profile_document() | {"name": name}))
    monkeypatch.setattr(profile_files, "_SHIPPED", tmp_path)
    text = run("profiles").stdout
    for shown in (*names, "Test GPU", "Llama-3.1-8B", "vllm 0.8.5", "roofline", "not fitted"):
        assert shown in text
    listed = json.loads(run("profiles", "--json").stdout)
    assert [each["name"] for each in listed] == list(names)
    assert listed[0]["fit_error"] is None


@pytest.mark.long
def test_a_fitted_profile_shows_its_error_and_an_assumed_one_none(run: Run) -> None:
    """A roofline was listed with an error of 0, as if it were exact."""
    shipped = json.loads(run("profiles", "--json").stdout)
    unfitted = [each for each in shipped if each["fit_error"] is None]
    assert all(each["fit_error"] > 0 for each in shipped if each not in unfitted)
    assert all("Mean TPOT of m" in each["notes"] for each in unfitted)  # the error on measured engines
    assert run("profiles").stdout.count("not fitted") == 2 * len(unfitted)


@pytest.mark.parametrize(
    ("gpu", "shown"),
    [
        ("h100", {"h100-64g", "h100-80g"}),
        ("L40S", {"l40s"}),
        ("NVIDIA H200", {"h200"}),
        ("rtx-4090", {"rtx-4090"}),
    ],
)
def test_a_gpu_is_matched_by_whole_words(run: Run, gpu: str, shown: set[str]) -> None:
    listed = json.loads(run("profiles", "--gpu", gpu, "--json").stdout)
    assert {each["name"].split("/")[0] for each in listed} == shown


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ("--gpu l4", "did you mean l40s? `capplan profile roofline --gpu l4 --model NAME -o profile.json`"),
        ("--gpu l4 --model qwen", "--gpu: must be a GPU of a shipped profile: a100-80g, b200"),
        ("--gpu A100-40G", "`capplan profile roofline --gpu a100-40g"),
        ("--gpu a100-40", "`capplan profile roofline` has data sheets of a100-40g; "),
        ("--gpu tpu-v6e", "`capplan profile server URL -o DIR` measures a running server"),
        ("--model llama-3.3-70b", "`capplan profile compose --gpu NAME --model-config FILE --base-model ID"),
        (
            "--gpu b200 --model llama-2-7b",
            "--model: must be in the name of a model of a shipped profile of b200",
        ),
    ],
)
def test_what_no_profile_ships_of_is_one_line_with_the_next_command(run: Run, words: str, step: str) -> None:
    assert step in error_line(run("profiles", *words.split()))


@pytest.mark.long
def test_profiles_states_the_errors_that_compose_states(run: Run) -> None:
    """GPUs left out of the fit, and adapter terms of another GPU."""
    name = "h200/llama-3.1-8b/vllm-0.15.1"
    errors = (
        "left out in turn: gpu h100-80g 6.5 %",
        "Adapter terms are carried over from the H100-64G profiles",
    )
    texts = run("profiles").stdout, run("profiles", "--gpu", "h200").stdout, run("profiles", name).stdout
    assert all(error in text for error in errors for text in texts)
    listed = json.loads(run("profiles", "--gpu", "h200", "--json").stdout)
    assert all(error in each["notes"] for error in errors for each in listed if each["fit_error"])
    assert "composed: " not in run("profiles", "--gpu", "h100-64g").stdout


def test_profiles_lists_what_the_package_ships(run: Run) -> None:
    assert [each["name"] for each in json.loads(run("profiles", "--json").stdout)] == list(list_profiles())


def test_one_profile_is_shown_with_every_coefficient_its_error_range_and_source(
    run: Run, tmp_path: Path
) -> None:
    document = profile_document()
    (tmp_path / "p.json").write_text(json.dumps(document))
    text = run("profiles", tmp_path / "p.json").stdout
    for part in ("step_latency", "memory", "loading", "host"):
        assert f"{part}: {document[part]['form']}" in text
        for name, coefficient in document[part]["coefficients"].items():
            assert name in text
            assert f"{coefficient['value']:.6g}" in text
    for shown in ("2,048", "an estimate for tests", "0.8", "64.0 GiB"):
        assert shown in text
    whole = json.loads(run("profiles", tmp_path / "p.json", "--json").stdout)
    assert whole["step_latency"]["coefficients"] == document["step_latency"]["coefficients"]


@pytest.mark.parametrize(
    ("kept", "shown"), [(None, "as in the rules"), (True, "on"), (False, "off")], ids=repr
)
def test_one_profile_is_shown_with_what_it_says_of_requests(
    run: Run, tmp_path: Path, kept: bool | None, shown: str
) -> None:
    document = profile_document()
    document["engine"]["prefix_caching"] = kept
    (tmp_path / "p.json").write_text(json.dumps(document | {"length_correlation": -0.25}))
    lines = [line.strip() for line in run("profiles", tmp_path / "p.json").stdout.splitlines()]
    assert f"prefixes    prefix_caching {shown}" in lines
    assert any("length_correlation -0.250" in line for line in lines)


def test_an_unknown_profile_is_one_line(run: Run) -> None:
    assert "must be the path of a profile JSON or the name of a shipped profile" in error_line(
        run("profiles", "h1000/none")
    )


def test_explain_tells_what_binds_and_what_is_verified_for_every_group(run: Run, plan_json: Path) -> None:
    text = run("explain", plan_json).stdout
    assert text.count("82 % of capacity; share of KV blocks in use") == 2
    assert text.count("verified; 97.0 % served, 1,230 tok/s, TTFT p99 0.40 s") == 2
    for shown in (
        "g0: 2 instances",
        "g1: 1 instance",
        "in simulation, 3 × 1 h",
        "1,234 (1,200..1,300)",
        "41.50",
    ):
        assert shown in text
    assert "solver" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "3 GPUs, 1 above the lower bound of 2"),
        ({}, "what fills them: KV-cache memory on g0, g1"),
        ({"totals": Totals(gpus=3, lower_bound_gpus=3)}, "3 GPUs: no plan can use fewer"),
        ({"objective": "min_latency"}, "the objective is min_latency, not the fewest GPUs"),
    ],
)
def test_explain_gives_the_reason_for_the_number_of_gpus(
    run: Run, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    small_plan(**changes).to_json(tmp_path / "plan.json")
    assert reason in " ".join(run("explain", tmp_path / "plan.json").stdout.split())


def test_explain_names_the_group_that_failed(run: Run, tmp_path: Path) -> None:
    verdicts = (verdict("g0"), verdict("g1", ok=False, note="TTFT p99 above 5 s"))
    check = Verification(ok=False, seeds=(1,), duration_s=60.0, min_served_fraction=0.5, groups=verdicts)
    small_plan(verification=check).to_json(tmp_path / "plan.json")
    text = run("explain", tmp_path / "plan.json").stdout
    assert "VERIFICATION DISAGREES in simulation, 1 × 1 min" in text
    assert "failing: g1" in text
    assert "FAILED: TTFT p99 above 5 s" in text


def test_explain_says_what_is_not_known(run: Run, tmp_path: Path) -> None:
    bare = group("g", adapters=(("a", 8, 1.0, None),))
    predicted = bare.predicted.replace(load_over_capacity=None)
    check = Verification(ok=False, seeds=(), duration_s=0.0, min_served_fraction=0.0)
    plan = small_plan(
        groups=(bare.replace(binds=None, predicted=predicted),),
        totals=Totals(gpus=1, lower_bound_gpus=1),
        verification=check,
    )
    plan.to_json(tmp_path / "plan.json")
    text = run("explain", tmp_path / "plan.json").stdout
    assert "nothing binds yet" in text
    assert text.count("not verified") == 2


def test_explain_gives_machines_the_same_facts(run: Run, plan_json: Path) -> None:
    document = json.loads(run("explain", plan_json, "--json").stdout)
    plan = json.loads(plan_json.read_text())
    assert document["totals"] == plan["totals"]
    assert document["verification"] == plan["verification"]
    assert document["provenance"] == plan["provenance"]
    for told, written in zip(document["groups"], plan["groups"], strict=True):
        assert {key: told[key] for key in ("id", "binds", "predicted")} == {
            key: written[key] for key in ("id", "binds", "predicted")
        }
        assert told["verification"]["id"] == told["id"]


@pytest.mark.parametrize("command", ["explain", "export", "report"])
@pytest.mark.parametrize("content", ["", "{", "[1]", '{"groups": []}'])
def test_a_broken_plan_is_one_line_that_names_the_file(
    run: Run, tmp_path: Path, command: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    more = {"export": ("--target", "vllm", "-o", "out"), "report": ("-o", "out")}.get(command, ())
    monkeypatch.chdir(tmp_path)
    assert str(path) in error_line(run(command, path, *more))
    assert sorted(tmp_path.iterdir()) == [path]
