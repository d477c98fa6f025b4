"""`compose.yaml` for one host: a service per server on its own GPUs, behind the gateway."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan.deploy import _kubernetes as k8s
from capplan.deploy._gateway import COMMAND, FOLDER, GATEWAY_IMAGE, gateway_files, gateway_losses
from capplan.deploy._servers import require_servable, source_kind, unused_name
from capplan.deploy._target import PLAN, Exporter, Setting
from capplan.spec import Group, Plan, PlanAdapter

ADAPTERS_FOLDER: Final = Setting(
    "adapters-folder", "./adapters", "folder of the host with a folder per adapter, by its name"
)

COMPOSE: Final = "compose.yaml"
GATEWAY: Final = "gateway"
FETCH: Final = "fetch-adapters"

_DOCKER_DNS: Final = "resolver 127.0.0.11 valid=5s;"
_HUB: Final = "/huggingface"
"""Folder of what vLLM downloads, so that servers share it and a new container has it."""
_AWS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION")


@dataclass(frozen=True)
class Server:
    """One server of the host."""

    name: str
    """Name of the service, and of its host in the network of the services."""
    group: Group
    replica: int
    """Number among the replicas of the group, from 1."""
    gpus: tuple[int, ...]


def servers_of(plan: Plan) -> tuple[Server, ...]:
    """Return the servers of a plan, on the GPUs of one host in order."""
    taken = {GATEWAY, FETCH}
    result = []
    next_gpu = 0
    for group in plan.groups:
        for replica in range(1, group.replicas + 1):
            stem = k8s.dns_label(group.id) + (f"-{replica}" if group.replicas > 1 else "")
            gpus = tuple(range(next_gpu, next_gpu + group.tp))
            result.append(Server(unused_name(stem, taken, "-"), group, replica, gpus))
            next_gpu += group.tp
    return tuple(result)


def compose_files(plan: Plan, *, port: int, settings: Mapping[str, str]) -> dict[str, str]:
    """Return ``compose.yaml``, the files of the gateway on a port of the host, and the plan."""
    require_servable(plan)
    servers = servers_of(plan)
    addresses: dict[str, list[str]] = {}
    for server in servers:
        addresses.setdefault(server.group.id, []).append(f"{server.name}:{k8s.PORT}")
    gateway = gateway_files(plan, addresses, port, _DOCKER_DNS)
    return {
        COMPOSE: _compose(plan, servers, port, settings),
        **{f"{GATEWAY}/{name}": text for name, text in gateway.items()},
        PLAN: plan.to_json(),
    }


def compose_notes(plan: Plan) -> tuple[str, ...]:
    """Return lines on the GPUs of the host, and on the adapters that its folder must hold."""
    gpus = sum(group.replicas * group.tp for group in plan.groups)
    kinds = ", ".join(dict.fromkeys(group.gpu for group in plan.groups))
    note = f"note: the host must have {gpus} GPU(s) ({kinds}), in the order of the services"
    return (note, *k8s.folder_notes(plan, ADAPTERS_FOLDER.name))


def _compose(plan: Plan, servers: Iterable[Server], port: int, settings: Mapping[str, str]) -> str:
    services = [(_comment(plan, each), {each.name: _server(plan, each, settings)}) for each in servers]
    fetched = [each for each in plan.adapters.values() if source_kind(each) == "s3"]
    if fetched:
        services.append((["Copies adapters from S3, then ends."], {FETCH: _fetch(fetched, settings)}))
    names = [server.name for server in servers]
    services.append((["The entry of all requests."], {GATEWAY: _gateway(names, port, settings)}))
    volumes: dict[str, dict[str, str]] = {
        name: {} for name in ("huggingface", *(["fetched-adapters"] if fetched else []))
    }
    top = k8s.yaml_documents([(k8s.top_comment(plan, gateway_losses(plan)), {"volumes": volumes})])
    texts = (k8s.yaml_documents([(comment, _escaped(service))]) for comment, service in services)
    return top + "services:\n" + textwrap.indent("".join(texts), "  ")


def _comment(plan: Plan, server: Server) -> list[str]:
    if server.replica == 1:
        return k8s.header_of(plan, server.group)
    return [f"Server {server.replica} of group {server.group.id}."]


def _escaped(value: Any) -> Any:
    """Return a value of YAML in which ``$``, by which Compose inserts variables, stands for itself."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {key: _escaped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    return value


def _server(plan: Plan, server: Server, settings: Mapping[str, str]) -> dict[str, Any]:
    kinds = {source_kind(adapter) for adapter in server.group.adapters}
    volumes: list[dict[str, Any]] = [{"type": "volume", "source": "huggingface", "target": _HUB}]
    if kinds & k8s.FOLDERS:
        volumes.append(_bind(settings[ADAPTERS_FOLDER.name], k8s.FOLDER))
    if "s3" in kinds:
        volumes.append(
            {"type": "volume", "source": "fetched-adapters", "target": k8s.FETCHED, "read_only": True}
        )
    depends = {"depends_on": {FETCH: {"condition": "service_completed_successfully"}}}
    device = {
        "driver": "nvidia",
        "device_ids": [str(gpu) for gpu in server.gpus],
        "capabilities": ["gpu"],
    }
    return {
        "image": k8s.image_of(plan, server.group, settings),
        "entrypoint": ["vllm", "serve"],
        "command": k8s.serve_arguments(plan, server.group),
        "environment": ["HF_TOKEN", f"HF_HOME={_HUB}"],
        **(depends if "s3" in kinds else {}),
        "volumes": volumes,
        "shm_size": "8gb",
        "deploy": {"resources": {"reservations": {"devices": [device]}}},
        # Loading weights and capturing graphs takes minutes.
        "healthcheck": {
            "test": ["CMD", "curl", "-fsS", f"http://127.0.0.1:{k8s.PORT}/health"],
            "interval": "10s",
            "timeout": "5s",
            "retries": 6,
            "start_period": "30m",
        },
        "restart": "unless-stopped",
    }


def _fetch(adapters: Iterable[PlanAdapter], settings: Mapping[str, str]) -> dict[str, Any]:
    commands = (
        shlex.join(["aws", "s3", "cp", "--recursive", adapter.path or "", k8s.adapter_path(adapter)])
        for adapter in adapters
    )
    return {
        "image": settings[k8s.FETCH_IMAGE.name],
        "entrypoint": ["sh", "-ec"],
        "command": ["\n".join(commands)],
        "environment": list(_AWS),
        "volumes": [{"type": "volume", "source": "fetched-adapters", "target": k8s.FETCHED}],
    }


def _gateway(servers: Iterable[str], port: int, settings: Mapping[str, str]) -> dict[str, Any]:
    return {
        "image": settings[GATEWAY_IMAGE.name],
        "command": list(COMMAND),
        "depends_on": {name: {"condition": "service_healthy"} for name in servers},
        "volumes": [_bind(f"./{GATEWAY}", FOLDER)],
        "ports": [f"{port}:{port}"],
        "restart": "unless-stopped",
    }


def _bind(source: str, target: str) -> dict[str, Any]:
    """Return a folder of the host as a volume; one that does not exist is an error."""
    bind = {"create_host_path": False}
    return {"type": "bind", "source": source, "target": target, "read_only": True, "bind": bind}


EXPORTER: Final = Exporter(
    compose_files,
    frozenset({COMPOSE, GATEWAY, PLAN}),
    serves=True,
    options=("port",),
    settings=(k8s.IMAGE, ADAPTERS_FOLDER, k8s.FETCH_IMAGE, GATEWAY_IMAGE),
    losses=gateway_losses,
    notes=compose_notes,
)
