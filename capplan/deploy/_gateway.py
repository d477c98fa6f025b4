"""Gateway of a plan: nginx, which reads the model of a request and sends it to a server by the plan's shares.

nginx balances by smooth weighted round robin, the router ``smooth-shares``. A script of njs, its JavaScript,
reads the model. Names of models are in a table of JSON in the script, never in the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from capplan.deploy._servers import LAST_PORT, shares_of
from capplan.deploy._target import Loss, Setting
from capplan.errors import InputError
from capplan.spec import PLAN_ROUTER, Plan

CONFIG: Final = "nginx.conf"
SCRIPT: Final = "gateway.js"

FOLDER: Final = "/etc/nginx/gateway"
"""Folder of these files in a container."""
COMMAND: Final = ("nginx", "-c", f"{FOLDER}/{CONFIG}", "-g", "daemon off;")

GATEWAY_IMAGE: Final = Setting(
    "gateway-image", "nginx:1.29", "image of nginx since 1.27.3 with ngx_http_js_module"
)

_TOLERANCE: Final = 0.001
"""Largest difference between a share and that of its weight."""
_LARGEST_TOTAL: Final = 10_000


@dataclass(frozen=True)
class Upstream:
    """Servers that take turns."""

    name: str
    servers: tuple[tuple[str, int], ...]
    """Address and weight of each; a name with several addresses stands for as many servers of the weight."""
    replicas: int
    """Servers in all."""


def gateway_files(
    plan: Plan, addresses: Mapping[str, Sequence[str]], port: int, resolver: str | None = None
) -> dict[str, str]:
    """Return the files of the gateway, text by name.

    `addresses` has ``host:port`` of the servers of each group: one for every replica, or one name for all of
    them. `resolver` is the directive of nginx with the DNS server that follows the addresses of names; None:
    addresses stay as they are when nginx starts.
    """
    if not 1 <= port <= LAST_PORT:
        raise InputError(f"must be from 1 to {LAST_PORT}", port, "port")
    upstreams, models = _routes(plan, addresses)
    comment = "".join(f"# Differs from the plan: {loss.text}.\n" for loss in gateway_losses(plan))
    blocks = "\n".join(_upstream(each, resolves=resolver is not None) for each in upstreams)
    directive = "" if resolver is None else f"\n    {resolver}"
    return {
        CONFIG: comment + _CONFIG.format(port=port, upstreams=blocks, resolver=directive, **_ERRORS),
        SCRIPT: f"const MODELS = {json.dumps(models, indent=4)};\n{_SCRIPT}",
    }


def gateway_losses(plan: Plan) -> tuple[Loss, ...]:
    """Return what the gateway does not do as the plan says: routers by the state of servers."""
    router = plan.router or PLAN_ROUTER
    if router == PLAN_ROUTER:
        return ()
    text = f"router {router}: the gateway follows the plan's shares, by smooth weighted round robin"
    return (Loss(text, router=PLAN_ROUTER),)


def _routes(
    plan: Plan, addresses: Mapping[str, Sequence[str]]
) -> tuple[tuple[Upstream, ...], dict[str, str]]:
    """Return the upstreams, and the name of the upstream of each model.

    Models of one server alone have its upstream; each other model has its own, because its turns are its own.
    """
    replicas = {group.id: group.replicas for group in plan.groups}
    upstreams: dict[tuple[str, ...], Upstream] = {}
    models: dict[str, str] = {}
    for model, shares in _shares(plan).items():
        alone = len(shares) == 1 and replicas[next(iter(shares))] == 1
        key = ("group", *shares) if alone else ("model", model)
        if key not in upstreams:
            weights = weights_of([(share, replicas[group]) for group, share in shares.items()])
            servers = [
                (address, weight)
                for group, weight in zip(shares, weights, strict=True)
                for address in addresses[group]
            ]
            # Otherwise the first requests of all models would go to the same server.
            first = len(upstreams) % len(servers)
            turns = tuple(servers[first:] + servers[:first])
            count = sum(replicas[group] for group in shares)
            upstreams[key] = Upstream(f"u{len(upstreams)}", turns, count)
        models[model] = upstreams[key].name
    return tuple(upstreams.values()), models


def _shares(plan: Plan) -> dict[str, dict[str, float]]:
    """Return the share of each group in the requests of each model."""
    found = {
        name: {part["group"]: part["share"] for part in parts}
        for name, parts in shares_of(plan.groups).items()
    }
    base = {group.id: group.base.share for group in plan.groups if group.base is not None}
    # Without planned traffic of the base model any server may answer its requests.
    found[plan.base_model] = base or dict.fromkeys((group.id for group in plan.groups), 0.0)
    replicas = {group.id: group.replicas for group in plan.groups}
    return {name: _placed(shares, replicas) for name, shares in found.items()}


def _placed(shares: Mapping[str, float], replicas: Mapping[str, int]) -> dict[str, float]:
    """Return the shares above 0; if there is none, the same for every server."""
    placed = {group: share for group, share in shares.items() if share > 0}
    if placed:
        return placed
    total = sum(replicas[group] for group in shares)
    return {group: replicas[group] / total for group in shares}


def weights_of(parts: Sequence[tuple[float, int]]) -> list[int]:
    """Return the weight of one server of each group, from the group's share and its number of servers.

    The weights are the smallest whole numbers that come within 0.001 of every share: after a failure nginx
    gives a server its weight back in steps of 1, one per request.
    """
    weights = [1] * len(parts)
    for total in range(1, _LARGEST_TOTAL + 1):
        weights = [max(1, round(share / servers * total)) for share, servers in parts]
        whole = sum(weight * servers for weight, (_, servers) in zip(weights, parts, strict=True))
        if all(
            abs(weight * servers / whole - share) <= _TOLERANCE
            for weight, (share, servers) in zip(weights, parts, strict=True)
        ):
            break
    return weights


def _upstream(upstream: Upstream, *, resolves: bool) -> str:
    """Return a block of the configuration; by its zone all worker processes share the turns."""
    size_kib = 64 + upstream.replicas
    follows = " resolve" if resolves else ""
    lines = [f"    upstream {upstream.name} {{", f"        zone {upstream.name} {size_kib}k;"]
    for address, weight in upstream.servers:
        lines.append(f"        server {address} weight={weight} max_fails=1 fail_timeout=10s{follows};")
    return "\n".join([*lines, "    }"])


def _error(message: str, kind: str, code: str) -> str:
    """Return an error in OpenAI's form, as a word of nginx."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return f"'{json.dumps({'error': error})}'"


_ERRORS: Final = {
    "too_large": _error("The body is too large", "invalid_request_error", "too_large"),
    "unavailable": _error(
        "No server of this model answers", "service_unavailable_error", "server_unavailable"
    ),
}

_CONFIG: Final = """\
load_module /usr/lib/nginx/modules/ngx_http_js_module.so;
worker_processes auto;
worker_rlimit_nofile 16384;
error_log stderr warn;

events {{
    worker_connections 8192;
}}

http {{
    access_log /dev/stdout;
    js_import gateway.js;
    js_var $upstream;{resolver}

{upstreams}

    server {{
        listen {port};
        default_type application/json;

        # The script reads bodies in memory.
        client_max_body_size 16m;
        client_body_buffer_size 16m;
        client_body_in_single_buffer on;

        error_page 413 @too_large;
        error_page 502 504 =503 @unavailable;

        location = /health {{
            return 200;
        }}
        location = /v1/models {{
            js_content gateway.list;
        }}
        location / {{
            js_content gateway.route;
        }}
        location @server {{
            proxy_pass http://$upstream;
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            # A new connection for each request: one that a server closes as idle would count as its failure.
            proxy_set_header Connection close;
            # Every token is sent on as it comes.
            proxy_buffering off;
            proxy_connect_timeout 5s;
            proxy_read_timeout 1h;
            # Another server is tried only while the client has got no byte, and not after long work.
            proxy_next_upstream error timeout non_idempotent;
            proxy_next_upstream_tries 3;
            proxy_next_upstream_timeout 60s;
        }}
        location @too_large {{
            return 413 {too_large};
        }}
        location @unavailable {{
            return 503 {unavailable};
        }}
    }}
}}
"""

_SCRIPT: Final = """\
// Upstreams by model, above; each request goes to that of its model.

const LONGEST_NAME = 100;

function route(r) {
    if (r.method !== 'POST') {
        fail(r, 404, 'There is no such page', null, 'not_found');
        return;
    }
    let body;
    try {
        body = JSON.parse(r.requestText);
    } catch (error) {
        fail(r, 400, 'The body is not valid JSON', null, 'invalid_json');
        return;
    }
    const model = body === null ? undefined : body.model;
    if (typeof model !== 'string') {
        fail(r, 400, 'model: must be the name of a model', 'model', 'invalid_model');
        return;
    }
    if (!Object.prototype.hasOwnProperty.call(MODELS, model)) {
        const name = model.length > LONGEST_NAME ? `${model.slice(0, LONGEST_NAME)}...` : model;
        fail(r, 404, `The model '${name}' does not exist`, 'model', 'model_not_found');
        return;
    }
    r.variables.upstream = MODELS[model];
    r.internalRedirect('@server');
}

function list(r) {
    const card = (id) => ({id: id, object: 'model', created: 0, owned_by: 'capplan'});
    answer(r, 200, {object: 'list', data: Object.keys(MODELS).map(card)});
}

function fail(r, status, message, param, code) {
    const type = status === 404 ? 'not_found_error' : 'invalid_request_error';
    answer(r, status, {error: {message: message, type: type, param: param, code: code}});
}

function answer(r, status, document) {
    r.headersOut['Content-Type'] = 'application/json';
    r.return(status, JSON.stringify(document));
}

export default {route, list};
"""
