"""Each rule has an input that breaks it, and no other rule."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from capplan import InputError
from capplan.deploy.lint import RULES, Finding, lint
from capplan.spec import Verification
from tests.cli.examples import MODEL, small_plan, verdict
from tests.deploy.lint.inputs import (
    adapter,
    chart,
    crd,
    documents,
    dynamo,
    kserve,
    lora_adapter,
    one_group,
    pod,
    ray,
    running,
    serve,
    sglang,
    workload,
    write,
)
from tests.deploy.lint.reference import KINDS, PAGE, page


class Bad(NamedTuple):
    """An input that breaks a rule, and words of the reason and the line."""

    rule: str
    make: Callable[[Path], Any]
    words: str
    line: int | None = None
    plan: Callable[[Path], Any] = lambda _: None
    schemas: Any = None


DEFINITION = yaml.safe_load("""
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: inferencepools.inference.networking.k8s.io}
spec:
  group: inference.networking.k8s.io
  names: {kind: InferencePool}
  versions:
    - name: v1
      served: true
      schema:
        openAPIV3Schema:
          type: object
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec:
              type: object
              required: [targetPorts]
              properties:
                selector: {type: object, nullable: true}
                targetPorts:
                  type: array
                  items: {type: object, properties: {number: {type: integer, maximum: 65535}}}
                any: {type: object, x-kubernetes-preserve-unknown-fields: true}
""")
VALUES = {"type": "object", "properties": {"servingEngineSpec": {"type": "object", "properties": {}}}}


def pool(**spec: Any) -> dict[str, Any]:
    return crd("inference.networking.k8s.io/v1", "InferencePool", **spec)


def plan_file(folder: Path, **changes: Any) -> Path:
    plan = small_plan(**changes)
    return write(folder, plan.to_json())


def changed_plan(folder: Path) -> Path:
    text = small_plan().to_json()
    return write(folder, text.replace('"max_loras": 2', '"max_loras": 3'))


def unverified() -> Verification:
    return Verification(ok=False, seeds=(), duration_s=0.0, min_served_fraction=0.0)


def failed() -> Verification:
    groups = (verdict("g0", ok=False, note="ttft_p99_s"), verdict("g1"))
    return Verification(ok=False, seeds=(1,), duration_s=60.0, min_served_fraction=0.5, groups=groups)


def old_plan(folder: Path) -> Path:
    plan = small_plan()
    engine = plan.engine.replace(target_modules=("q_proj",))
    return write(folder, plan.replace(engine=engine).with_digest().to_json())


def served(*words: str) -> Callable[[Path], Path]:
    return lambda folder: write(folder, serve("--enable-lora", *words))


def sgl(*words: str) -> Callable[[Path], Path]:
    return lambda folder: write(folder, sglang(*words))


def yaml_of(*objects: Any) -> Callable[[Path], Path]:
    return lambda folder: documents(folder, *objects)


def trace(folder: Path) -> Path:
    rows = "".join(f"{1000 * i},a,10,5\n" for i in range(200))
    write(folder, f"arrival,adapter,prompt_tokens,output_tokens\n{rows}", "trace.csv")
    columns = "{arrival_s: arrival}"
    return write(
        folder, workload(rest=f"trace: {{file: trace.csv, columns: {columns}}}").replace("requests:", "#")
    )


POOL = {"kind": "InferencePool", "name": "p"}
AIBRIX_API = "model.aibrix.ai/v1alpha1"
LLM_D = "llm-d.ai/v1alpha2"
OLD = "inference.networking.x-k8s.io/v1alpha2"
AIBRIX = {"adapter.model.aibrix.ai/enabled": "true"}
TOKEN = "hf_" + "aB3dE5gH7j" * 4

BAD = (
    Bad("CAP000", lambda d: write(d, workload(rest="gpus: many")), "gpus", 4),
    Bad("CAP000", lambda d: write(d, "apiVersion: v1\nkind: [\n"), "must be YAML", 3),
    Bad("CAP000", lambda d: write(d, '{"workload_digest": 1}'), "created_by"),
    Bad("CAP000", lambda d: adapter(d, use_dora=True), "use_dora"),
    Bad("CAP000", lambda d: adapter(d, use_dora=True) / "adapter_config.json", "use_dora"),
    Bad("CAP001", lambda d: write(d, f"export HF_TOKEN={TOKEN}\n" + serve()), "Hugging Face", 1),
    Bad("CAP001", lambda d: write(d, "# AKIAIOSFODNN7EXAMPLE\n" + serve()), "AWS access", 1),
    Bad("CAP001", lambda d: write(d, f"AWS_SECRET_ACCESS_KEY={'aB3/' * 10}\n" + serve()), "AWS secret", 1),
    Bad("CAP101", lambda d: plan_file(d, verification=unverified()), "planned without verification"),
    Bad("CAP102", changed_plan, "changed after its verification"),
    Bad("CAP103", lambda d: plan_file(d, verification=failed()), "group g0 failed"),
    Bad(
        "CAP104",
        lambda d: write(d, one_group(("a", 8, str(adapter(d)))).to_json()),
        "must be 4",
    ),
    Bad("CAP105", old_plan, "--lora-target-modules"),
    Bad("CAP201", served("--max-loras 4 --max-cpu-loras 2"), "--max-cpu-loras 2 is below --max-loras 4", 2),
    Bad(
        "CAP202", served("--max-loras 2 --lora-modules a=/a b=/b c=/c"), "3 adapters, and host memory holds 2"
    ),
    Bad("CAP203", served("--max-lora-rank 12"), "--max-lora-rank 12"),
    Bad(
        "CAP203", yaml_of(pod("--enable-lora", "--max-lora-rank=1", image="vllm/vllm-openai:v0.8.5")), "0.8.5"
    ),
    Bad(
        "CAP204",
        served("--max-lora-rank 8 --lora-modules a=/a"),
        "a has rank 16",
        plan=lambda _: one_group(("a", 16, None)),
    ),
    Bad("CAP204", lambda d: served(f"--lora-modules a={adapter(d, rank=32)}")(d), "a has rank 32"),
    Bad(
        "CAP205",
        yaml_of(pod("--enable-lora", "--async-scheduling", image="vllm/vllm-openai:v0.9.2")),
        "vLLM 0.9.2 lacks --async-scheduling, which vLLM has since 0.10.0",
        14,
    ),
    Bad("CAP205", served("--async-scheduling"), "0.8.5 lacks", 2, plan=lambda _: one_group(("a", 16, None))),
    Bad("CAP206", served("--lora-modules a=s3://bucket/a"), "s3://bucket/a"),
    Bad("CAP206", sgl("--lora-paths a=https://host/a"), "https://host/a"),
    Bad("CAP207", yaml_of(pod("--tensor-parallel-size=4", gpus=2)), "2 GPUs", 9),
    Bad(
        "CAP208",
        lambda d: served(f"--lora-modules a={adapter(d)}")(d),
        "must be 4",
        plan=lambda _: one_group(("a", 8, None)),
    ),
    Bad("CAP208", lambda d: served(f"--lora-modules a={adapter(d, use_dora=True)}")(d), "use_dora"),
    Bad("CAP301", sgl("--max-lora-rank 16"), "--lora-target-modules missing", 1),
    Bad(
        "CAP302",
        sgl("--max-loaded-loras 1 --max-loras-per-batch 1 --lora-paths a=/a b=/b"),
        "--max-loaded-loras 1 is below the 2",
    ),
    Bad("CAP303", sgl("--max-loaded-loras 4 --lora-paths a=/a"), "--max-loras-per-batch 8"),
    Bad("CAP401", yaml_of(kserve(maxAdapters=2, maxRank=16)), "maxCpuAdapters unset beside 2 adapters", 8),
    Bad("CAP201", yaml_of(kserve(maxAdapters=2, maxRank=16, maxCpuAdapters=1)), "below", 16),
    Bad("CAP202", yaml_of(kserve(maxAdapters=1, maxRank=16, maxCpuAdapters=1)), "2 adapters"),
    Bad("CAP203", yaml_of(kserve(maxAdapters=2, maxRank=20, maxCpuAdapters=2)), "20"),
    Bad(
        "CAP204",
        yaml_of(kserve(maxAdapters=2, maxRank=8, maxCpuAdapters=2)),
        "a has rank 16",
        plan=lambda _: one_group(("a", 16, None)),
    ),
    Bad(
        "CAP402",
        yaml_of(pool(targetPorts=[{"number": 65536}])),
        "InferencePool: spec.targetPorts[0].number: 65536 is greater",
        7,
        schemas=DEFINITION,
    ),
    Bad("CAP402", yaml_of(pool(targetPorts=[], extra=1)), "'extra' was unexpected", schemas=DEFINITION),
    Bad(
        "CAP402",
        yaml_of(pool()),
        "'targetPorts' is a required",
        schemas={"kind": "List", "items": [DEFINITION]},
    ),
    Bad("CAP402", yaml_of(chart()), "values: servingEngineSpec: ", schemas=VALUES),
    Bad("CAP403", yaml_of(crd(AIBRIX_API, "ModelAdapter")), "is not checked", schemas=DEFINITION),
    Bad("CAP411", yaml_of(crd(AIBRIX_API, "ModelAdapter", replicas=2)), "replicas is 2", 6),
    Bad("CAP412", yaml_of(pod("--enable-lora", **AIBRIX)), "is unset"),
    Bad("CAP421", yaml_of(lora_adapter("x"), lora_adapter("y")), "adapter a is also on x, beside y", 20),
    Bad("CAP422", yaml_of(chart(enableLoRA=False)), "--max-loras is set"),
    Bad("CAP423", yaml_of(chart(vllmConfig={"maxLoras": 2})), "of base is unset"),
    Bad("CAP424", yaml_of(chart(env=[])), "of base is unset"),
    Bad("CAP424", yaml_of(chart(env=[]), lora_adapter("base")), "of base is unset"),
    Bad("CAP431", yaml_of(*dynamo("--max-loras", "2")), "3 adapters"),
    Bad("CAP441", yaml_of(crd(LLM_D, "InferenceObjective", poolRef=POOL)), "pool p has no group", 6),
    Bad(
        "CAP442",
        yaml_of(crd(OLD, "InferenceObjective", poolRef={"group": "inference.networking.k8s.io", **POOL})),
        OLD,
        1,
    ),
    Bad("CAP501", yaml_of(ray(dynamic_lora_loading_path="/adapters")), "/adapters", 13),
    Bad(
        "CAP502",
        yaml_of(ray(max_num_adapters_per_replica=1)),
        "is 1, and the plan has 2",
        plan=lambda _: one_group(("a", 16, None), ("b", 16, None)),
    ),
    Bad(
        "CAP601",
        lambda d: write(d, workload(adapters="  - {name: b, rank: 8, rate_rps: 0}\n")),
        "1 of 2 adapters have rate_rps 0: b",
    ),
    Bad("CAP602", lambda d: write(d, workload(slo="")), "slo is absent"),
    Bad("CAP603", trace, "trace.time_unit"),
    Bad("CAP701", adapter, "must be 4", plan=lambda _: one_group(("a", 8, None))),
    Bad(
        "CAP701",
        lambda d: adapter(d, base_model_name_or_path="google/gemma-2-9b"),
        "gemma",
        plan=lambda _: one_group(("b", 8, None)),
    ),
)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.rule}-{bad.words}")
def test_a_bad_input_breaks_its_rule_and_no_other(bad: Bad, tmp_path: Path) -> None:
    schemas = [write(tmp_path, json.dumps(bad.schemas), "schemas.json")] if bad.schemas else []
    found = lint(bad.make(tmp_path), plan=bad.plan(tmp_path), schemas=schemas)
    assert {each.id for each in found} == {bad.rule}
    assert bad.words in found[0].reason
    if bad.line is not None:
        assert found[0].line == bad.line


def test_a_valid_object_has_no_finding(tmp_path: Path) -> None:
    definitions = write(tmp_path, json.dumps(DEFINITION), "schemas.yaml")
    objects = yaml_of(pool(targetPorts=[{"number": 1}], selector=None, any={"x": 1}), pod())(tmp_path)
    assert lint(objects, schemas=[definitions]) == ()
    assert lint(objects, schemas=[tmp_path]) == ()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        '{"kind": "List", "items": [1]}',
        '{"kind": "List", "items": 1}',
        '{"kind": "CustomResourceDefinition", "spec": {"versions": [1, {"served": true}]}}',
    ],
)
def test_a_file_without_schemas_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*schemas.json: must hold CustomResourceDefinitions"):
        lint(write(tmp_path, serve()), schemas=[write(tmp_path, text, "schemas.json")])


def test_a_schema_that_is_none_is_one_line_and_nothing_is_fetched(tmp_path: Path) -> None:
    wrong = {"type": "object", "properties": {"servingEngineSpec": {"type": 5}}}
    inputs = yaml_of(chart())(tmp_path)
    with pytest.raises(InputError, match=r"schemas\.json: must hold JSON Schemas"):
        lint(inputs, schemas=[write(tmp_path, json.dumps(wrong), "schemas.json")])
    away = {"type": "object", "properties": {"servingEngineSpec": {"$ref": "http://192.0.2.1/x.json"}}}
    (found,) = lint(inputs, schemas=[write(tmp_path, json.dumps(away), "schemas.json")])
    assert (found.id, "http://192.0.2.1/x.json" in found.reason) == ("CAP402", True)


TWO = one_group(("a", 16, None), ("b", 16, None))


@pytest.mark.parametrize(
    ("rule", "words", "options"),
    [
        ("CAP801", "1 adapters of group g are not served: b", {"adapters": ("a",), "max_loras": 2}),
        ("CAP802", "max_loras is 4, and 2", {"adapters": ("a", "b"), "max_loras": 4}),
        ("CAP803", "gemma", {"adapters": ("a", "b"), "base_model": "google/gemma-2-9b"}),
    ],
)
def test_a_running_server_is_compared_with_the_plan(rule: str, words: str, options: dict[str, Any]) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(running(*options.pop("adapters"), **options))
        found = lint(url, plan=TWO)
    assert [each.id for each in found] == [rule]
    assert words in found[0].reason


@pytest.mark.parametrize("base_model", [MODEL, f"/models/{MODEL}"])
def test_a_running_server_as_planned_has_no_finding(base_model: str) -> None:
    with running("a", "b", "other", base_model=base_model, max_loras=2) as url:
        assert lint(url, f"{url}/v1/", plan=TWO) == ()


def test_every_rule_has_a_bad_input() -> None:
    assert {each.rule for each in BAD} | {"CAP801", "CAP802", "CAP803"} == {rule.id for rule in RULES}


def test_ids_are_unique_in_order_and_of_a_known_kind() -> None:
    ids = [rule.id for rule in RULES]
    assert ids == sorted(set(ids))
    assert {each[3] for each in ids} == set(KINDS)


def test_the_page_of_the_rules_is_that_of_their_table() -> None:
    """`python -m tests.deploy.lint.reference` writes the page."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_a_secret_is_not_shown(tmp_path: Path) -> None:
    (found,) = lint(write(tmp_path, f"HF_TOKEN={TOKEN} vllm serve {MODEL}\n"))
    assert TOKEN not in str(found)


def test_a_number_of_adapters_in_memory_that_is_planned_is_no_finding(tmp_path: Path) -> None:
    """The verification had the loads from disk."""
    path = write(tmp_path, serve("--enable-lora --max-loras 1 --max-cpu-loras 1 --lora-modules a=/a b=/b"))
    adapters = (("a", 16, None), ("b", 16, None))
    assert [each.id for each in lint(path)] == ["CAP202"]
    assert lint(path, plan=one_group(*adapters, max_loras=1, max_cpu_loras=1)) == ()


def test_rules_are_selected_and_ignored_by_id(tmp_path: Path) -> None:
    path = write(tmp_path, serve("--enable-lora --max-lora-rank 12 --lora-modules a=s3://b/a"))

    def ids(**options: Any) -> list[str]:
        return [each.id for each in lint(path, **options)]

    assert ids() == ["CAP203", "CAP206"]
    assert ids(select=["CAP206"]) == ["CAP206"]
    assert ids(ignore=["CAP206"]) == ["CAP203"]
    with pytest.raises(InputError, match="CAP999"):
        ids(ignore=["CAP999"])


def test_a_finding_has_the_fix_and_the_section_of_its_rule(tmp_path: Path) -> None:
    (found,) = lint(write(tmp_path, workload(slo="")))
    assert isinstance(found, Finding)
    assert (found.level, found.fix) == ("warning", "add slo with a bound, such as ttft_p99_s")
    assert found.anchor == "docs/reference/lint.md#cap602"
