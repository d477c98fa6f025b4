import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from capplan import Plan
from capplan.deploy import EXPORTERS, export, vllm_files
from capplan.deploy._gateway import gateway_files
from tests.cli.examples import group, plan_of, small_plan
from tests.deploy.test_vllm import HOSTILE, options, require_flags_of_script

SOURCES = (
    ("root", 8, 1.0, None),
    ("folder", 8, 1.0, "/srv/there"),
    ("hub", 8, 1.0, "org/name"),
    ("s3", 8, 1.0, "s3://bucket/it's here"),
)


def composed(plan: Plan, **settings: str) -> dict[str, Any]:
    """Return compose.yaml as Compose reads it: two dollars are one."""
    named = {name.replace("_", "-"): value for name, value in settings.items()}
    text = export(plan, "compose", settings=named)["compose.yaml"]
    assert "$" not in text.replace("$$", "")
    document: dict[str, Any] = yaml.safe_load(text.replace("$$", "$"))
    return document


def servers(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the services with GPUs."""
    return {name: each for name, each in document["services"].items() if "deploy" in each}


def device(service: dict[str, Any]) -> dict[str, Any]:
    (found,) = service["deploy"]["resources"]["reservations"]["devices"]
    return dict(found)


def modules(service: dict[str, Any]) -> list[str]:
    return list(options(["serve", *service["command"]])["--lora-modules"])


def test_the_files_are_those_of_compose_and_the_plan() -> None:
    files = export(small_plan(), "compose", port=9000)
    assert set(files) == {"compose.yaml", "gateway/nginx.conf", "gateway/gateway.js", "plan.json"}
    assert {name.split("/")[0] for name in files} == EXPORTERS["compose"].top_names
    assert files["plan.json"] == small_plan().to_json()
    addresses = {"g0": ["g0-1:8000", "g0-2:8000"], "g1": ["g1:8000"]}
    gateway = gateway_files(small_plan(), addresses, 9000, "resolver 127.0.0.11 valid=5s;")
    assert {name: files[f"gateway/{name}"] for name in gateway} == gateway


def test_servers_have_the_flags_of_the_scripts_of_vllm(tmp_path: Path) -> None:
    plan = small_plan()
    made = servers(composed(plan))
    scripts = [text for name, text in vllm_files(plan).items() if name.endswith(".sh")]
    assert list(made) == ["g0-1", "g0-2", "g1"]
    for service, script in zip(made.values(), scripts, strict=True):
        assert service["entrypoint"] == ["vllm", "serve"]
        assert service["image"] == "vllm/vllm-openai:v0.8.5"
        require_flags_of_script(tmp_path, service["command"], script)


def test_gpus_of_the_host_are_taken_in_order_and_once() -> None:
    wide = group("wide", (("a", 8, 1.0, None),), replicas=2).replace(tp=2)
    alone = group("alone", (("b", 8, 1.0, None),))
    plan = plan_of(alone, group("other", (("c", 8, 1.0, None),)))
    plan = plan.replace(groups=(wide, *plan.groups), totals=plan.totals.replace(gpus=6))
    devices = [device(each) for each in servers(composed(plan)).values()]
    assert [each["device_ids"] for each in devices] == [["0", "1"], ["2", "3"], ["4"], ["5"]]
    assert {(each["driver"], *each["capabilities"]) for each in devices} == {("nvidia", "gpu")}
    assert "6 GPU(s)" in EXPORTERS["compose"].notes(plan)[0]


def test_names_of_services_are_labels_and_differ() -> None:
    ids = ("a/b", "a_b", "A-B", "gateway", "fetch-adapters", "é", "7", "x" * 200, "x" * 201, "c-1", "c")
    groups = [group(name, ((f"on-{i}", 8, 1.0, "s3://b/x"),)) for i, name in enumerate(ids)]
    groups[-1] = groups[-1].replace(replicas=2)
    document = composed(plan_of(*groups))
    assert len(servers(document)) == len(ids) + 1
    for name in document["services"]:
        assert name[0].isalpha()
        assert name[-1].isalnum()
        assert len(name) <= 63
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_each_source_of_adapters_has_its_place() -> None:
    document = composed(plan_of(group("g", SOURCES)), adapters_folder="/srv/all")
    (service,) = servers(document).values()
    places = dict(each.split("=", 1) for each in modules(service))
    assert places["hub"] == "org/name"
    volumes = {each["target"]: each for each in service["volumes"]}
    folder, fetched = volumes["/adapters"], volumes["/fetched-adapters"]
    assert (folder["type"], folder["source"], folder["read_only"]) == ("bind", "/srv/all", True)
    assert {name: places[name] for name in ("root", "folder")} == {
        name: f"{folder['target']}/{name}" for name in ("root", "folder")
    }
    assert places["s3"] == f"{fetched['target']}/s3"
    assert fetched["read_only"] is True
    assert service["depends_on"] == {"fetch-adapters": {"condition": "service_completed_successfully"}}
    fetch = document["services"]["fetch-adapters"]
    assert fetch["entrypoint"] == ["sh", "-ec"]
    (script,) = fetch["command"]
    words = ["aws", "s3", "cp", "--recursive", "s3://bucket/it's here", "/fetched-adapters/s3"]
    assert shlex.split(script) == words
    assert [each["target"] for each in fetch["volumes"]] == ["/fetched-adapters"]
    assert set(document["volumes"]) == {"huggingface", "fetched-adapters"}


def test_what_is_not_needed_is_left_out() -> None:
    document = composed(plan_of(group("g", (("a", 8, 1.0, "org/name"),))))
    assert set(document["services"]) == {"g", "gateway"}
    assert set(document["volumes"]) == {"huggingface"}
    assert [each["type"] for each in document["services"]["g"]["volumes"]] == ["volume"]
    assert "depends_on" not in document["services"]["g"]
    assert len(EXPORTERS["compose"].notes(small_plan())) == 2
    assert "must hold 3 adapters" in EXPORTERS["compose"].notes(small_plan())[1]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_plan_stays_text(text: str) -> None:
    name = text.replace(" ", "_")
    part = group("g", ((name, 8, 1.0, f"s3://b/{text}"), (f"{name}2", 8, 1.0, None)))
    document = composed(plan_of(part))
    assert modules(document["services"]["g"]) == [
        f"{name}=/fetched-adapters/{name}",
        f"{name}2=/adapters/{name}2",
    ]
    (script,) = document["services"]["fetch-adapters"]["command"]
    assert shlex.split(script)[-2:] == [f"s3://b/{text}", f"/fetched-adapters/{name}"]


def test_the_gateway_waits_for_every_server_and_is_the_only_entry() -> None:
    text = export(small_plan(), "compose", port=9000)["compose.yaml"]
    services = yaml.safe_load(text)["services"]
    gateway = services["gateway"]
    assert gateway["image"] == "nginx:1.29"
    assert gateway["depends_on"] == {
        name: {"condition": "service_healthy"} for name in services if name != "gateway"
    }
    assert {name: each["ports"] for name, each in services.items() if "ports" in each} == {
        "gateway": ["9000:9000"]
    }
    (folder,) = gateway["volumes"]
    assert (folder["source"], folder["read_only"]) == ("./gateway", True)
    assert f"{folder['target']}/nginx.conf" in gateway["command"]
    for name in ("g0-1", "g0-2", "g1"):
        assert services[name]["healthcheck"]["test"][-1] == "http://127.0.0.1:8000/health"


def test_images_are_those_of_the_settings() -> None:
    images = {"image": "mine:1", "fetch_image": "aws:2", "gateway_image": "nginx:3"}
    document = composed(plan_of(group("g", SOURCES)), **images)
    assert [each["image"] for each in document["services"].values()] == ["mine:1", "aws:2", "nginx:3"]
