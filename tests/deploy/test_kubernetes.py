import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from capplan import InputError, Plan
from capplan.deploy import EXPORTERS, export, vllm_files
from capplan.deploy._gateway import gateway_files
from tests.cli.examples import group, plan_of, small_plan
from tests.deploy.test_vllm import HOSTILE, options, require_flags_of_script

LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def objects(plan: Plan, **settings: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the objects of the manifests by kind and name."""
    named = {name.replace("_", "-"): value for name, value in settings.items()}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for document in yaml.safe_load_all(export(plan, "kubernetes", settings=named)["manifests.yaml"]):
        same = found.setdefault(document["kind"], {})
        assert document["metadata"]["name"] not in same
        same[document["metadata"]["name"]] = document
    return found


def pod(deployment: dict[str, Any]) -> dict[str, Any]:
    return dict(deployment["spec"]["template"]["spec"])


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(deployment)["containers"]
    return dict(found)


def test_the_files_are_the_manifests_and_the_plan() -> None:
    files = export(small_plan(), "kubernetes")
    assert set(files) == EXPORTERS["kubernetes"].top_names
    assert files["plan.json"] == small_plan().to_json()


def test_each_group_is_a_deployment_of_its_replicas_behind_a_headless_service() -> None:
    found = objects(small_plan())
    assert set(found["Deployment"]) == set(found["Service"]) == {"g0", "g1", "gateway"}
    for name, replicas in (("g0", 2), ("g1", 1)):
        spec = found["Deployment"][name]["spec"]
        assert spec["replicas"] == replicas
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        service = found["Service"][name]["spec"]
        assert service["clusterIP"] == "None"
        labels = spec["template"]["metadata"]["labels"]
        assert service["selector"].items() <= labels.items()
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert service["ports"][0]["port"] == 8000


def test_servers_have_the_flags_of_the_scripts_of_vllm(tmp_path: Path) -> None:
    plan = small_plan()
    deployments = objects(plan)["Deployment"]
    scripts = vllm_files(plan)
    for name, script in (("g0", "launch/g0-1.sh"), ("g1", "launch/g1.sh")):
        require_flags_of_script(tmp_path, container(deployments[name])["args"], scripts[script])


def test_names_of_objects_are_labels_and_differ() -> None:
    ids = ("a/b", "a_b", "A-B", "gateway", "é", "7", "y", "null", "x" * 200, "x" * 201)
    plan = plan_of(*(group(name, ((f"on-{i}", 8, 1.0, None),)) for i, name in enumerate(ids)))
    found = objects(plan)
    assert len(found["Deployment"]) == len(found["Service"]) == len(ids) + 1
    for name in (*found["Deployment"], *found["Service"]):
        assert LABEL.fullmatch(name)


def test_the_gateway_has_the_addresses_of_the_services() -> None:
    found = objects(small_plan(), namespace="serving")
    hosts = {name: [f"{name}.serving.svc.cluster.local:8000"] for name in ("g0", "g1")}
    files = gateway_files(small_plan(), hosts, 8000, "include /etc/nginx/conf.d/resolver.conf;")
    data = found["ConfigMap"]["gateway"]["data"]
    assert {name: data[name] for name in files} == files
    assert {each["metadata"]["namespace"] for same in found.values() for each in same.values()} == {"serving"}


def test_the_gateway_reads_its_configuration_and_is_the_entry() -> None:
    text = export(small_plan(), "kubernetes", port=9000)["manifests.yaml"]
    named = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}
    deployment, service = named["Deployment", "gateway"], named["Service", "gateway"]
    nginx = container(deployment)
    assert deployment["spec"]["replicas"] == 1
    assert nginx["ports"] == [{"name": "http", "containerPort": 9000}]
    assert service["spec"]["ports"] == [{"name": "http", "port": 9000, "targetPort": "http"}]
    assert "clusterIP" not in service["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    folder, template = nginx["volumeMounts"]
    assert f"{folder['mountPath']}/nginx.conf" in nginx["args"]
    data = named["ConfigMap", "gateway"]["data"]
    assert data[template["subPath"]] == "resolver ${NGINX_LOCAL_RESOLVERS} valid=5s;\n"
    assert "listen 9000;" in data["nginx.conf"]


def test_another_configuration_is_another_pod() -> None:
    def annotations(plan: Plan) -> object:
        return objects(plan)["Deployment"]["gateway"]["spec"]["template"]["metadata"]["annotations"]

    assert annotations(small_plan()) == annotations(small_plan())
    assert annotations(small_plan()) != annotations(small_plan(router="least-loaded"))


def test_each_source_of_adapters_has_its_place() -> None:
    sources = (("r", 8, 1.0, None), ("f", 8, 1.0, "/srv/f"), ("h", 8, 1.0, "o/h"), ("s", 8, 1.0, "s3://b/s"))
    plan = plan_of(group("g", sources))
    images = {"image": "mine:1", "fetch_image": "aws:2", "gateway_image": "nginx:3"}
    found = objects(plan, adapters_claim="mine", **images)["Deployment"]
    vllm = container(found["g"])
    assert (vllm["image"], container(found["gateway"])["image"]) == ("mine:1", "nginx:3")
    (fetch,) = pod(found["g"])["initContainers"]
    assert (fetch["image"], fetch["args"][-2:]) == ("aws:2", ["s3://b/s", "/fetched-adapters/s"])
    places = dict(each.split("=", 1) for each in options(["serve", *vllm["args"]])["--lora-modules"])
    assert places == {"r": "/adapters/r", "f": "/adapters/f", "h": "o/h", "s": "/fetched-adapters/s"}
    claims = [each.get("persistentVolumeClaim") for each in pod(found["g"])["volumes"]]
    assert {"claimName": "mine", "readOnly": True} in claims


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_plan_stays_text(text: str) -> None:
    name = text.replace(" ", "_")
    found = objects(plan_of(group("g", ((name, 8, 1.0, f"s3://b/{text}"),))))
    (module,) = options(["serve", *container(found["Deployment"]["g"])["args"]])["--lora-modules"]
    (fetch,) = pod(found["Deployment"]["g"])["initContainers"]
    # Kubernetes reads $(NAME) as a variable, and $$ before it as $.
    read = [each.replace("$$(", "$(") for each in (module, fetch["args"][-2])]
    assert read == [f"{name}=/fetched-adapters/{name}", f"s3://b/{text}"]


@pytest.mark.parametrize("namespace", ["A", "a b", "a;b", "-a", "a" * 64])
def test_a_namespace_that_is_none_is_refused(namespace: str) -> None:
    with pytest.raises(InputError, match="set: namespace: must be a DNS label"):
        export(small_plan(), "kubernetes", settings={"namespace": namespace})


def test_more_adapters_than_a_config_map_holds_are_refused() -> None:
    many = tuple((f"{number:06}{'x' * 200}", 8, 1.0, None) for number in range(5000))
    with pytest.raises(InputError, match="must need a gateway of at most 1048576 bytes"):
        export(plan_of(group("g", many)), "kubernetes")


def test_a_claim_keeps_the_base_model_between_starts() -> None:
    deployed = objects(small_plan(), model_claim="hub")["Deployment"]["g0"]
    mounts = {each["name"]: each["mountPath"] for each in container(deployed)["volumeMounts"]}
    claims = {
        each["name"]: each["persistentVolumeClaim"]["claimName"]
        for each in pod(deployed)["volumes"]
        if "persistentVolumeClaim" in each
    }
    assert {"name": "HF_HOME", "value": mounts["models"]} in container(deployed)["env"]
    assert claims["models"] == "hub"
    assert "models" not in {
        each["name"] for each in pod(objects(small_plan())["Deployment"]["g0"])["volumes"]
    }
