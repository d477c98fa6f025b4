"""Manifests of Kubernetes controllers: every object is valid by the schema of its kind."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from capplan import InputError, Plan
from capplan.deploy import EXPORTERS, export
from capplan.deploy.lint._schemas import Schemas, read_schemas
from capplan.serving.routers import ROUTERS
from capplan.spec import Group, PlanAdapter, PlanBase, QueueClass, Queues, Wrs
from tests.cli.examples import MODEL, group, plan_of, small_plan

TARGETS = ("kthena", "kserve", "aibrix", "production-stack", "llm-d", "dynamo")
ANY_NAME = ("kthena", "production-stack", "llm-d", "dynamo")
"""Targets that take any name of an adapter."""

OTHER_GPU = "NVIDIA A100-SXM4-80GB"
HOSTILE = (
    "1e3",
    "0o17",
    "no",
    "Team/Support:v1",
    "team-support-v1",
    "A",
    "a",
    "x$(HF_TOKEN)",
    'q"uote',
    "a'b",
    "a#b",
    "模型",
    "n" * 250,
)


@pytest.fixture(scope="session")
def schemas(reference_dir: Path) -> Path:
    """Public schemas, in a folder beside the checkout."""
    folder = reference_dir / "deploy_schemas"
    if not folder.is_dir():
        pytest.skip("no ../shared/reference/deploy_schemas beside the checkout with the public schemas")
    return folder


# Schemas ------------------------------------------------------------------------------------------


@cache
def read(folder: Path) -> Schemas:
    """Return the schemas of the folder."""
    return read_schemas([folder])


def crd_schema(folder: Path, kind: str, api_version: str) -> dict[str, Any]:
    """Return the schema of a kind in a version, which its CRD must serve."""
    return read(folder).kinds[api_version, kind]  # type: ignore[no-any-return]


def part_of_kserve(folder: Path, *keys: str) -> dict[str, Any]:
    """Return a part of KServe's schema, which has those of pods and of HTTPRoutes in it."""
    schema = crd_schema(folder, "LLMInferenceService", "serving.kserve.io/v1alpha2")
    for key in ("spec", *keys):
        schema = schema["properties"][key]
    return schema


def fields(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties alone."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "minLength": 1}
WHOLE = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
LABEL = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}


def many(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def own_schemas(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the expected specs of kinds without a schema in the folder, by API and kind."""
    pod = part_of_kserve(folder, "template")
    template = fields("metadata", "spec", metadata=fields(labels=TEXTS), spec=pod)
    ports = many(fields("name", "port", name=TEXT, port=WHOLE, targetPort=TEXT))
    component = fields(
        "name",
        "type",
        "replicas",
        "podTemplate",
        name=TEXT,
        type={"enum": ["frontend", "decode"]},
        replicas=WHOLE,
        modelRef=fields("name", name=TEXT),
        podTemplate=fields("spec", spec=pod),
    )
    return {
        ("apps/v1", "Deployment"): fields(
            "replicas",
            "strategy",
            "selector",
            "template",
            replicas=WHOLE,
            strategy=fields(
                "type",
                "rollingUpdate",
                type={"const": "RollingUpdate"},
                rollingUpdate=fields(maxSurge=WHOLE, maxUnavailable=WHOLE),
            ),
            selector=fields("matchLabels", matchLabels=TEXTS),
            template=template,
        ),
        ("v1", "Service"): fields("selector", "ports", selector=TEXTS, ports=ports),
        ("networking.serving.volcano.sh/v1alpha1", "ModelServer"): fields(
            "inferenceEngine",
            "workloadSelector",
            "workloadPort",
            inferenceEngine={"enum": ["vLLM", "SGLang"]},
            workloadSelector=fields("matchLabels", matchLabels=TEXTS),
            workloadPort=fields("port", port=WHOLE),
        ),
        ("gateway.networking.k8s.io/v1", "HTTPRoute"): part_of_kserve(
            folder, "router", "route", "http", "spec"
        ),
        ("nvidia.com/v1beta1", "DynamoGraphDeployment"): fields(
            "components", components={**many(component), "maxItems": 25}
        ),
        ("nvidia.com/v1alpha1", "DynamoModel"): fields(
            "modelName",
            "baseModelName",
            "modelType",
            "source",
            modelName=TEXT,
            baseModelName=TEXT,
            modelType={"enum": ["base", "lora", "adapter"]},
            source=fields("uri", uri={"type": "string", "pattern": "^(s3|hf|file)://"}),
        ),
    }


PICKER = fields(
    "apiVersion",
    "kind",
    "plugins",
    "schedulingProfiles",
    apiVersion={"const": "llm-d.ai/v1alpha1"},
    kind={"const": "EndpointPickerConfig"},
    featureGates=many(TEXT),
    plugins=many(fields("type", type=TEXT)),
    schedulingProfiles=many(
        fields(
            "name",
            "plugins",
            name=TEXT,
            plugins=many(fields("pluginRef", pluginRef=TEXT, weight={"type": "number"})),
        )
    ),
    flowControl=fields("priorityBands", priorityBands=many(fields("priority", priority={"type": "integer"}))),
)

METADATA = fields("name", "namespace", name=LABEL, namespace=LABEL, labels=TEXTS)


def require_valid(document: Any, schema: Mapping[str, Any]) -> None:
    errors = [
        f"{each.json_path}: {each.message[:300]}"
        for each in Draft202012Validator(schema).iter_errors(document)
    ]
    assert errors == []


def documents_of(files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the objects of all manifests."""
    return [
        document
        for path, text in files.items()
        if path.endswith(".yaml") and path != "values.yaml" and not path.startswith("endpoint-picker/")
        for document in yaml.safe_load_all(text)
    ]


def require_valid_files(files: Mapping[str, str], folder: Path) -> None:
    """Check every object of an export, the values of Helm, and the configurations of endpoint pickers."""
    own = own_schemas(folder)
    names = set()
    for document in documents_of(files):
        api, kind = document["apiVersion"], document["kind"]
        require_valid(document["metadata"], METADATA)
        names.add((kind, document["metadata"]["name"]))
        if (api, kind) in own:
            require_valid(document["spec"], own[api, kind])
        else:
            require_valid(document, crd_schema(folder, kind, api))
    assert len(names) == len(documents_of(files))
    if "values.yaml" in files:
        require_valid(yaml.safe_load(files["values.yaml"]), read(folder).values)
    for path, text in files.items():
        if path.startswith("endpoint-picker/"):
            require_valid(yaml.safe_load(text), PICKER)


# Plans --------------------------------------------------------------------------------------------


def base_only(name: str, share: float = 1.0) -> Group:
    """Return a group that serves the base model alone."""
    placed = group(name, (("x", 8, 1.0, None),))
    arguments = placed.engine_args.replace(max_loras=0, max_lora_rank=0)
    base = PlanBase(rate_rps=1.0, share=share)
    return placed.replace(base=base, adapters=(), engine_args=arguments)


def queued(name: str) -> Group:
    """Return a group with two queues."""
    wrs = Wrs(a=0.4, b=0.6, max_prompt_tokens=100, max_output_tokens=100, max_adapter_bytes=100)
    classes = (QueueClass(upper_wrs=0.5, quota_tokens=100), QueueClass(upper_wrs=None, quota_tokens=200))
    return group(name, (("x", 8, 1.0, None),)).replace(queues=Queues(wrs=wrs, classes=classes))


def named(*names: str, path: str | None = "org/adapter") -> Plan:
    """Return a plan of one group with adapters of these names."""
    adapters = tuple((name, 8, 1.0, path) for name in names)
    return plan_of(group("g0", adapters, max_cpu_loras=len(names)))


def split(*shares: float) -> Plan:
    """Return a plan of a group per share of one adapter."""
    adapter = PlanAdapter(name="shared", rank=8, rate_rps=0.4, share=1.0)
    one = group("g", (("shared", 8, 1.0, None),))
    groups = (
        one.replace(id=f"g{index}", adapters=(adapter.replace(share=share),))
        for index, share in enumerate(shares)
    )
    return plan_of(*groups)


PLANS = {
    "shared": small_plan(),
    "hub": plan_of(group("g0", (("a", 8, 1.0, "org/a"), ("b", 8, 1.0, "org/b")), replicas=2)),
    "folder": named("legal", path="/models/legal"),
    "many": named(*(f"adapter-{index}" for index in range(150))),
    "tensor-parallel": plan_of(group("g0", (("a", 8, 1.0, None),)).replace(tp=2)),
    "base": plan_of(group("g0", (("a", 8, 1.0, None),)), base_only("g1")),
    "base-shared": plan_of(base_only("g0", 0.25), base_only("g1", 0.75)),
    "groups": plan_of(
        *(group(f"Pool-{index}/GPU", ((f"a{index}", 8, 1.0, None),), replicas=2) for index in range(3))
    ),
    "words-of-yaml": plan_of(
        group("on", (("a-on", 8, 1.0, None),)), group("Frontend", (("a-frontend", 8, 1.0, None),))
    ),
    "two-kinds-of-gpu": plan_of(
        group("g0", (("x", 8, 1.0, None),)), group("g1", (("y", 8, 1.0, None),)).replace(gpu=OTHER_GPU)
    ),
    "long-names": plan_of(*(group(f"{'n' * 60}-{i}", ((f"a{i}", 8, 1.0, None),)) for i in range(2))),
    "same-labels": plan_of(group("a/b", (("x", 8, 1.0, None),)), group("a.b", (("y", 8, 1.0, None),))),
}


# Tests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_object_is_valid(target: str, plan: Plan, schemas: Path) -> None:
    """The API server rejects unknown fields, or drops them without a word."""
    files = export(plan, target)
    require_valid_files(files, schemas)
    assert Plan.model_validate_json(files["plan.json"]) == plan


def test_the_check_refuses_what_a_schema_does_not_list(schemas: Path) -> None:
    files = export(small_plan(), "aibrix")
    wrong = {"aibrix.yaml": files["aibrix.yaml"].replace("artifactURL:", "unknown: 1\n  artifactURL:")}
    with pytest.raises(AssertionError, match="'unknown' was unexpected"):
        require_valid_files(wrong, schemas)


@pytest.mark.parametrize("target", ANY_NAME)
def test_names_of_adapters_stay_those_of_the_plan(target: str, schemas: Path) -> None:
    """Requests name an adapter as the plan does, whatever the objects are called."""
    plan = named(*HOSTILE)
    files = export(plan, target)
    require_valid_files(files, schemas)
    assert set(requested_names(target, files)) == set(HOSTILE)


def requested_names(target: str, files: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of models that an export routes or loads."""
    for document in documents_of(files):
        match document["kind"]:
            case "ModelRoute":
                yield from document["spec"]["loraAdapters"]
            case "LoraAdapter":
                yield document["spec"]["adapterSource"]["adapterName"]
            case "HTTPRoute":
                for rule in document["spec"]["rules"]:
                    yield from (each["headers"][0]["value"] for each in rule["matches"])
            case "DynamoModel":
                yield document["spec"]["modelName"]


def test_kubernetes_expands_no_variable_in_a_name() -> None:
    (deployed,) = of_kind("Deployment", export(named("x$(HF_TOKEN)"), "kthena"))
    (container,) = deployed["template"]["spec"]["containers"]
    assert "x$$(HF_TOKEN)=org/adapter" in container["args"]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("aibrix", "Team"),
        ("aibrix", "team/a"),
        ("aibrix", "1e3"),
        ("aibrix", "n" * 64),
        ("kserve", "a'b"),
        ("kserve", "x$(HF_TOKEN)"),
        ("kserve", MODEL),
    ],
)
def test_a_name_that_the_target_does_not_allow_is_one_line(target: str, name: str) -> None:
    with pytest.raises(InputError, match=r"^plan: adapter .*: name: must [^\n]*$"):
        export(named(name), target)


def test_kserve_refuses_names_with_the_same_folder() -> None:
    with pytest.raises(InputError, match="mounts two adapters as a-b"):
        export(named("a/b", "a-b"), "kserve")


def test_kserve_refuses_a_folder_whose_name_is_no_name_of_a_volume() -> None:
    with pytest.raises(InputError, match="names the volume"):
        export(named("Team_A", path=None), "kserve")


@pytest.mark.parametrize("target", [*TARGETS, "compose", "kubernetes"])
def test_an_address_that_no_pod_fetches_is_one_line(target: str) -> None:
    with pytest.raises(InputError, match=r"^plan: adapter a: path: must be a folder[^\n]*$"):
        export(named("a", path="https://example.com/a"), target)


SOURCES = {
    "kserve": ("hf://org/adapter", "s3://bucket/a", "pvc://adapters/a"),
    "aibrix": ("huggingface://org/adapter", "/fetched-adapters/a", "/adapters/a"),
    "dynamo": ("hf://org/adapter", "s3://bucket/a", "file:///adapters/a"),
}


@pytest.mark.parametrize("target", SOURCES)
@pytest.mark.parametrize("number", range(3))
def test_adapters_come_from_where_the_target_fetches_them(target: str, number: int) -> None:
    path = ("org/adapter", "s3://bucket/a", "/models/a")[number]
    (found,) = (
        uri
        for document in documents_of(export(named("a", path=path), target))
        for uri in sources_of(document)
    )
    assert found == SOURCES[target][number]


def sources_of(document: Mapping[str, Any]) -> Iterator[str]:
    spec = document["spec"]
    match document["kind"]:
        case "LLMInferenceService":
            yield from (each["uri"] for each in spec["model"]["lora"]["adapters"])
        case "ModelAdapter":
            yield spec["artifactURL"]
        case "DynamoModel":
            yield spec["source"]["uri"]


@pytest.mark.parametrize("target", ["kthena", "llm-d", "aibrix"])
def test_pods_fetch_adapters_from_s3_before_they_serve(target: str, schemas: Path) -> None:
    files = export(named("a", path="s3://bucket/a"), target)
    require_valid_files(files, schemas)
    pod = next(each for each in documents_of(files) if each["kind"] == "Deployment")["spec"]["template"][
        "spec"
    ]
    assert pod["initContainers"][0]["args"][-2:] == ["s3://bucket/a", "/fetched-adapters/a"]


def test_the_production_stack_does_not_fetch_from_s3() -> None:
    """Its controller has no download from there yet."""
    with pytest.raises(InputError, match="must be a folder or an id of the Hugging Face Hub"):
        export(named("a", path="s3://bucket/a"), "production-stack")


@pytest.mark.parametrize("target", TARGETS)
def test_gpus_are_resources(target: str) -> None:
    text = "".join(export(PLANS["tensor-parallel"], target).values())
    assert re.search(r"nvidia\.com/gpu: '?2'?$|requestGPU: 2$", text, re.MULTILINE)
    assert "--tensor-parallel-size=2" in text


@pytest.mark.parametrize("target", TARGETS)
def test_losses_stand_on_top_of_the_files_and_name_routers(target: str) -> None:
    plan = small_plan()
    losses = EXPORTERS[target].losses(plan)
    assert losses
    text = "".join(export(plan, target).values())
    for loss in losses:
        assert f"# Differs from the plan: {loss.text}.\n" in text
        assert loss.router is None or loss.router in ROUTERS


@pytest.mark.parametrize("target", TARGETS)
def test_one_server_loses_nothing(target: str) -> None:
    assert EXPORTERS[target].losses(named("a")) == ()


def test_a_router_that_is_the_plans_is_no_loss() -> None:
    replica_only, *_ = EXPORTERS["kthena"].losses(small_plan(router="plan-shares"))
    assert replica_only.router == "least-loaded"


@pytest.mark.parametrize("target", TARGETS)
def test_a_namespace_that_is_no_label_is_one_line(target: str) -> None:
    with pytest.raises(InputError, match=r"^set: namespace: must be a DNS label[^\n]*$"):
        export(small_plan(), target, settings={"namespace": "Not a label"})


@pytest.mark.parametrize("target", TARGETS)
def test_the_namespace_is_a_setting(target: str, schemas: Path) -> None:
    files = export(small_plan(), target, settings={"namespace": "serving"})
    require_valid_files(files, schemas)
    assert {each["metadata"]["namespace"] for each in documents_of(files)} <= {"serving"}


def of_kind(kind: str, files: Mapping[str, str]) -> list[dict[str, Any]]:
    return [document["spec"] for document in documents_of(files) if document["kind"] == kind]


def test_kthena_splits_shared_adapters_by_weights() -> None:
    routes = of_kind("ModelRoute", export(small_plan(), "kthena"))
    (shared,) = (each for each in routes if each["loraAdapters"] == ["shared"])
    targets = [{"modelServerName": "g0", "weight": 25}, {"modelServerName": "g1", "weight": 75}]
    assert shared["rules"][0]["targetModels"] == targets


def test_kthena_leaves_the_model_of_requests_alone() -> None:
    """A ModelServer with a model replaces the adapter's name by it."""
    assert all("model" not in server for server in of_kind("ModelServer", export(small_plan(), "kthena")))


def test_kthena_routes_the_base_model_where_the_plan_does() -> None:
    routes = of_kind("ModelRoute", export(PLANS["base-shared"], "kthena"))
    assert [route["modelName"] for route in routes] == [MODEL]
    assert [each["weight"] for each in routes[0]["rules"][0]["targetModels"]] == [25, 75]


def test_kthena_refuses_an_adapter_on_more_groups_than_a_route_has_targets() -> None:
    with pytest.raises(InputError, match="at most 16 groups"):
        export(split(*[1 / 17] * 17), "kthena")


def test_small_shares_keep_a_weight() -> None:
    (route,) = of_kind("ModelRoute", export(split(0.001, 0.999), "kthena"))
    assert [each["weight"] for each in route["rules"][0]["targetModels"]] == [1, 100]


def test_kserve_sets_all_three_maxima() -> None:
    """KServe passes those alone that are set, and vLLM's default is a single slot."""
    first, _ = of_kind("LLMInferenceService", export(small_plan(), "kserve"))
    maxima = {name: value for name, value in first["model"]["lora"].items() if name != "adapters"}
    assert maxima == {"maxRank": 16, "maxAdapters": 2, "maxCpuAdapters": 2}
    (variable,) = first["template"]["containers"][0]["env"]
    assert "lora" not in variable["value"]


def test_kserve_has_one_service_per_group_with_its_replicas() -> None:
    services = of_kind("LLMInferenceService", export(PLANS["groups"], "kserve"))
    assert [each["replicas"] for each in services] == [2, 2, 2]


def test_aibrix_leaves_replicas_unset() -> None:
    """With 1, the only value, a single pod of the group gets the adapter."""
    files = export(small_plan(), "aibrix")
    assert all("replicas" not in adapter for adapter in of_kind("ModelAdapter", files))


def test_aibrix_selects_the_pods_of_an_adapters_groups() -> None:
    adapters = {
        each["metadata"]["name"]: each["spec"]["podSelector"]
        for each in documents_of(export(small_plan(), "aibrix"))
        if each["kind"] == "ModelAdapter"
    }
    assert adapters["a"] == {"matchLabels": {"capplan.io/group": "g0"}}
    expression = {"key": "capplan.io/group", "operator": "In", "values": ["g0", "g1"]}
    assert adapters["shared"] == {"matchExpressions": [expression]}


def test_aibrix_pods_have_the_labels_and_load_adapters_later() -> None:
    deployed = of_kind("Deployment", export(small_plan(), "aibrix"))[0]["template"]
    labels = deployed["metadata"]["labels"]
    assert labels["adapter.model.aibrix.ai/enabled"] == "true"
    assert (labels["model.aibrix.ai/name"], labels["model.aibrix.ai/port"]) == (
        "llama-3-1-8b-instruct",
        "8000",
    )
    (container,) = deployed["spec"]["containers"]
    assert "--lora-modules" not in container["args"]
    assert {"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"} in container["env"]


def test_aibrix_names_the_base_model_as_no_adapter() -> None:
    """Both are names of Services."""
    files = export(named("llama-3-1-8b-instruct"), "aibrix")
    services = [each["metadata"]["name"] for each in documents_of(files) if each["kind"] == "Service"]
    assert services == ["llama-3-1-8b-instruct-2"]


def values_of(plan: Plan, **settings: str) -> dict[str, Any]:
    files = export(plan, "production-stack", settings=settings)
    return yaml.safe_load(files["values.yaml"])  # type: ignore[no-any-return]


def test_the_production_stack_finds_the_pods_of_a_group_by_its_model() -> None:
    """A LoraAdapter is loaded on all pods whose label `model`, the name of a modelSpec, is its base model."""
    files = export(small_plan(), "production-stack")
    models = yaml.safe_load(files["values.yaml"])["servingEngineSpec"]["modelSpec"]
    assert [(each["name"], each["replicaCount"]) for each in models] == [("g0", 2), ("g1", 1)]
    adapters = {
        each["adapterSource"]["adapterName"]: each["baseModel"] for each in of_kind("LoraAdapter", files)
    }
    assert adapters == {"a": "g0", "b": "g1"}


def test_the_production_stack_starts_with_shared_adapters() -> None:
    """Two LoraAdapters of one name unload it from each other's pods."""
    models = values_of(small_plan())["servingEngineSpec"]["modelSpec"]
    assert all(
        each["vllmConfig"]["extraArgs"][-2:] == ["--lora-modules", "shared=/adapters/shared"]
        for each in models
    )


def test_the_chart_does_not_turn_prefix_caching_off() -> None:
    """Its template passes --no-enable-prefix-caching if the value is absent."""
    for asked, passed in ((None, True), (True, True), (False, False)):
        one = group("g0", (("a", 8, 1.0, None),), enable_prefix_caching=asked)
        (model,) = values_of(plan_of(one))["servingEngineSpec"]["modelSpec"]
        assert model["vllmConfig"]["enablePrefixCaching"] is passed


def test_settings_of_the_chart(schemas: Path) -> None:
    chosen = {"storage-class": "fast", "storage": "1Gi", "cpu": "8", "image": "registry:5000/vllm"}
    (model,) = values_of(PLANS["hub"], **chosen)["servingEngineSpec"]["modelSpec"]
    assert (model["repository"], model["tag"]) == ("registry:5000/vllm", "latest")
    assert (model["storageClass"], model["pvcStorage"], model["requestCPU"]) == ("fast", "1Gi", 8)
    assert model["pvcAccessMode"] == ["ReadWriteMany"]
    with pytest.raises(InputError, match="set: cpu: must be a whole number"):
        values_of(PLANS["hub"], cpu="many")


def test_llm_d_splits_shared_adapters_between_pools() -> None:
    routes = of_kind("HTTPRoute", export(small_plan(), "llm-d"))
    weights = {
        rule["matches"][0]["headers"][0]["value"]: [each["weight"] for each in rule["backendRefs"]]
        for route in routes
        for rule in route["rules"]
    }
    assert weights == {"a": [1_000_000], "shared": [250_000, 750_000], "b": [1_000_000]}


def test_llm_d_names_the_group_of_the_pool_and_a_priority_per_queue(schemas: Path) -> None:
    """The default of poolRef.group differs between revisions."""
    files = export(plan_of(queued("g0")), "llm-d")
    require_valid_files(files, schemas)
    objectives = of_kind("InferenceObjective", files)
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "g0"}
    assert [each["poolRef"] for each in objectives] == [pool, pool]
    assert [each["priority"] for each in objectives] == [1, 0]
    config = yaml.safe_load(files["endpoint-picker/g0.yaml"])
    assert config["featureGates"] == ["flowControl"]
    assert config["flowControl"] == {"priorityBands": [{"priority": 1}, {"priority": 0}]}
    assert "x-llm-d-inference-objective" in files["llm-d.yaml"]


def test_llm_d_references_only_plugins_that_it_declares() -> None:
    for plan in (small_plan(), PLANS["base"]):
        for path, text in export(plan, "llm-d").items():
            if path.startswith("endpoint-picker/"):
                config = yaml.safe_load(text)
                (profile,) = config["schedulingProfiles"]
                used = [each["pluginRef"] for each in profile["plugins"]]
                assert used == [each["type"] for each in config["plugins"]]


def test_dynamo_loads_every_adapter_everywhere_and_says_so() -> None:
    files = export(small_plan(), "dynamo")
    assert [loss.everywhere for loss in EXPORTERS["dynamo"].losses(small_plan())] == [True]
    assert {each["baseModelName"] for each in of_kind("DynamoModel", files)} == {MODEL}
    (graph,) = of_kind("DynamoGraphDeployment", files)
    for component in graph["components"][1:]:
        (container,) = component["podTemplate"]["spec"]["containers"]
        assert {"--max-lora-rank=32", "--max-cpu-loras=3"} <= set(container["args"])
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["DYN_LORA_ENABLED"] == variables["DYN_SYSTEM_ENABLED"] == "true"


def test_dynamo_loads_no_adapter_on_servers_without_slots() -> None:
    (graph,) = of_kind("DynamoGraphDeployment", export(PLANS["base"], "dynamo"))
    references = {each["name"]: "modelRef" in each for each in graph["components"]}
    assert references == {"Frontend": False, "g0": True, "g1": False}


def test_names_of_groups_are_different_labels() -> None:
    deployed = [
        each["metadata"]["name"]
        for each in documents_of(export(PLANS["same-labels"], "kthena"))
        if each["kind"] == "Deployment"
    ]
    assert deployed == ["a-b", "a-b-2"]


def test_numbers_of_yaml_1_2_are_quoted() -> None:
    """Kubernetes reads 1e3 as a number, PyYAML as text."""
    text = export(named("1e3", "0o17"), "kthena")["kthena.yaml"]
    assert {"  - '1e3'", "  - '0o17'"} <= set(text.splitlines())


def node_labels_of(document: Any) -> Iterator[dict[str, str]]:
    """Yield the node labels that pods require, wherever a document has them."""
    if isinstance(document, Mapping):
        if "nodeSelector" in document:
            yield document["nodeSelector"]
        for term in document.get("nodeSelectorTerms", ()):
            yield {each["key"]: each["values"][0] for each in term["matchExpressions"]}
        document = list(document.values())
    if isinstance(document, list):
        for each in document:
            yield from node_labels_of(each)


def node_labels(target: str, plan: Plan, **settings: str) -> list[dict[str, str]]:
    texts = export(plan, target, settings=settings).items()
    loaded = (
        yaml.safe_load_all(text) for path, text in texts if path.endswith(".yaml") and "picker" not in path
    )
    return [each for documents in loaded for document in documents for each in node_labels_of(document)]


@pytest.mark.parametrize("target", [*TARGETS, "kubernetes"])
def test_pods_choose_nodes_by_their_gpu_where_there_are_several_kinds(target: str) -> None:
    """The label is that of NVIDIA's GPU feature discovery."""
    plan = PLANS["two-kinds-of-gpu"]
    gpus = [each.gpu.replace(" ", "-") for each in plan.groups]
    assert node_labels(target, plan) == [{"nvidia.com/gpu.product": gpu} for gpu in gpus]
    assert node_labels(target, PLANS["hub"]) == []
    assert node_labels(target, PLANS["hub"], **{"gpu-label": "example.com/gpu"}) == [
        {"example.com/gpu": gpus[0]}
    ]


@pytest.mark.parametrize("target", ["kthena", "llm-d", "aibrix", "kubernetes"])
def test_updates_need_no_further_gpu(target: str) -> None:
    plan = PLANS["hub"]
    name = {"kubernetes": "manifests"}.get(target, target)
    documents = yaml.safe_load_all(export(plan, target)[f"{name}.yaml"])
    updates = [
        each["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
        for each in documents
        if each["kind"] == "Deployment" and "strategy" in each["spec"]
    ]
    assert updates == [0] * len(plan.groups)
    assert values_of(plan)["servingEngineSpec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_kserve_runs_an_image_whose_user_is_root() -> None:
    (spec,) = of_kind("LLMInferenceService", export(named("a"), "kserve"))
    assert spec["template"]["containers"][0]["securityContext"] == {"runAsNonRoot": False}


def test_no_name_is_a_word_that_yaml_does_not_read_as_text() -> None:
    """The template of the chart writes the name of a model without quotes."""
    names = [each["name"] for each in values_of(PLANS["words-of-yaml"])["servingEngineSpec"]["modelSpec"]]
    assert names == ["g-on", "frontend"]


def test_names_of_dynamo_are_short_and_differ_without_case() -> None:
    (graph,) = (
        each
        for each in documents_of(export(PLANS["words-of-yaml"], "dynamo"))
        if each["kind"] == "DynamoGraphDeployment"
    )
    names = [each["name"] for each in graph["spec"]["components"]]
    assert names == ["Frontend", "g-on", "frontend-2"]
    long = export(PLANS["long-names"].replace(base_model="org/" + "m" * 70), "dynamo", settings={})
    (graph,) = (each for each in documents_of(long) if each["kind"] == "DynamoGraphDeployment")
    longest = max(len(each["name"]) for each in graph["spec"]["components"])
    assert len(graph["metadata"]["name"]) + longest <= 45


def test_dynamo_refuses_more_groups_than_a_graph_has_components() -> None:
    many = plan_of(*(group(f"g{i}", ((f"a{i}", 8, 1.0, None),)) for i in range(25)))
    with pytest.raises(InputError, match="must be at most 24"):
        export(many, "dynamo")


def test_the_picker_of_a_long_group_is_the_one_that_the_chart_names() -> None:
    pools = of_kind("InferencePool", export(PLANS["long-names"], "llm-d"))
    names = [each["endpointPickerRef"]["name"].removesuffix("-epp") for each in pools]
    assert len(set(names)) == 2
    assert all(len(each) <= 40 and each[-1].isalnum() for each in names)


def test_a_target_writes_only_below_its_names() -> None:
    for target in TARGETS:
        tops = {path.split("/")[0] for path in export(small_plan(), target)}
        assert tops == EXPORTERS[target].top_names
