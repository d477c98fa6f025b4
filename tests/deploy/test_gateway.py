import contextlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError, Plan
from capplan.deploy import EXPORTERS, export
from capplan.deploy._gateway import CONFIG, SCRIPT, gateway_files, gateway_losses, weights_of
from capplan.spec import Group, PlanBase
from tests.cli.examples import MODEL, group, plan_of, small_plan
from tests.deploy.gateways import Gateway, Stub, resolves_names, running, stubs, written

NAMES = (
    'a"b',
    "a$host",
    "a\\b",
    "a';}{",
    "é漢🙂",
    "a`${b}",
    "a/b:c",
    "constructor",
    "123",
    "x</script>",
    "a#b",
)


def upstreams(files: dict[str, str]) -> dict[str, dict[str, int]]:
    """Return the weights of the servers of each upstream."""
    blocks = re.findall(r"upstream (\w+) \{(.*?)\}", files[CONFIG], re.DOTALL)
    found = {name: re.findall(r"server (\S+) weight=(\d+)", text) for name, text in blocks}
    return {name: {server: int(weight) for server, weight in servers} for name, servers in found.items()}


def models(files: dict[str, str]) -> dict[str, str]:
    """Return the table of the script."""
    table: dict[str, str] = json.loads(files[SCRIPT].removeprefix("const MODELS = ").partition(";\n")[0])
    return table


def weights(plan: Plan, **addresses: list[str]) -> dict[str, dict[str, int]]:
    """Return the weights of servers by model."""
    files = gateway_files(plan, addresses, 8000)
    return {model: upstreams(files)[name] for model, name in models(files).items()}


def small_weights() -> dict[str, dict[str, int]]:
    return weights(small_plan(), g0=["x:1", "x:2"], g1=["y:1"])


def test_a_shared_adapter_has_the_shares_of_the_plan_as_weights() -> None:
    assert small_weights()["shared"] == {"x:1": 1, "x:2": 1, "y:1": 6}


def test_an_adapter_of_one_group_takes_turns_over_its_replicas() -> None:
    assert small_weights()["a"] == {"x:1": 1, "x:2": 1}
    assert small_weights()["b"] == {"y:1": 1}


def test_one_name_for_all_replicas_has_the_weight_of_each() -> None:
    assert weights(small_plan(), g0=["g0:8000"], g1=["g1:8000"])["shared"] == {"g0:8000": 1, "g1:8000": 6}


def test_adapters_of_one_group_take_turns_together_and_shared_ones_by_themselves() -> None:
    both = (("a", 8, 1.0, None), ("shared", 8, 0.5, None))
    plan = plan_of(group("g", (*both, ("b", 8, 1.0, None))), group("h", (("shared", 8, 0.5, None),)))
    table = models(gateway_files(plan, {"g": ["g:1"], "h": ["h:1"]}, 8000))
    assert table["a"] == table["b"]
    assert len(set(table.values())) == 3


def halves(adapters: int, replicas: int = 1) -> Plan:
    """Return a plan of two groups that share every adapter."""
    names = tuple((f"a{number}", 8, 1.0, None) for number in range(adapters))
    groups = [group(name, names, replicas=replicas) for name in ("g", "h")]
    shared = [tuple(adapter.replace(share=0.5) for adapter in each.adapters) for each in groups]
    return plan_of(*(each.replace(adapters=part) for each, part in zip(groups, shared, strict=True)))


def test_first_requests_of_shared_adapters_go_to_different_servers() -> None:
    files = gateway_files(halves(4), {"g": ["g:1"], "h": ["h:1"]}, 8000)
    assert [next(iter(each)) for each in upstreams(files).values()] == ["g:1", "h:1", "g:1", "h:1", "g:1"]


def based(**shares: float) -> Plan:
    groups = [group(name, ((f"on-{name}", 8, 1.0, None),)) for name in ("g", "h", "i")]
    made = [
        each.replace(base=PlanBase(rate_rps=1.0, share=shares[each.id])) if each.id in shares else each
        for each in groups
    ]
    return plan_of(*made)


def test_requests_of_the_base_model_follow_its_shares() -> None:
    servers = {name: [f"{name}:1"] for name in ("g", "h", "i")}
    assert weights(based(g=0.2, h=0.8), **servers)[MODEL] == {"g:1": 1, "h:1": 4}
    assert weights(based(), **servers)[MODEL] == {"g:1": 1, "h:1": 1, "i:1": 1}


def test_an_adapter_without_shares_is_spread_over_the_servers_that_store_it() -> None:
    def stored(each: Group) -> Group:
        adapters = tuple(adapter.model_copy(update={"share": 0.0}) for adapter in each.adapters)
        return each.model_copy(update={"adapters": adapters})

    plan = small_plan()
    plan = plan.model_copy(update={"groups": tuple(map(stored, plan.groups))})
    assert weights(plan, g0=["x:1", "x:2"], g1=["y:1"])["shared"] == {"x:1": 1, "x:2": 1, "y:1": 1}


@given(
    st.lists(st.tuples(st.floats(0.001, 1), st.integers(1, 8)), min_size=1, max_size=8).map(
        lambda parts: [(share / sum(each for each, _ in parts), servers) for share, servers in parts]
    )
)
def test_weights_are_small_and_near_the_shares(parts: list[tuple[float, int]]) -> None:
    found = weights_of(parts)
    whole = sum(weight * servers for weight, (_, servers) in zip(found, parts, strict=True))
    assert min(found) >= 1
    assert whole <= 11_000
    for weight, (share, servers) in zip(found, parts, strict=True):
        assert weight * servers / whole == pytest.approx(share, abs=0.001)


def test_a_router_by_the_state_of_servers_is_a_loss_and_a_comment() -> None:
    assert gateway_losses(small_plan()) == gateway_losses(small_plan(router="smooth-shares")) == ()
    plan = small_plan(router="least-loaded")
    (loss,) = gateway_losses(plan)
    assert loss.router == "smooth-shares"
    files = gateway_files(plan, {"g0": ["x:1", "x:2"], "g1": ["y:1"]}, 8000)
    assert files[CONFIG].startswith(f"# Differs from the plan: {loss.text}.\n")
    for target, name in (("compose", "compose.yaml"), ("kubernetes", "manifests.yaml")):
        assert EXPORTERS[target].losses(plan) == (loss,)
        assert f"# Differs from the plan: {loss.text}.\n" in export(plan, target)[name]


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_out_of_range_is_rejected(port: int) -> None:
    with pytest.raises(InputError, match="port: must be from 1 to 65535"):
        gateway_files(small_plan(), {"g0": ["x:1", "x:2"], "g1": ["y:1"]}, port)


def test_the_configuration_holds_no_name_of_a_model() -> None:
    plan = plan_of(group("g", tuple((name, 8, 1.0, None) for name in NAMES)), base_model="the-base")
    files = gateway_files(plan, {"g": ["g:1"]}, 8000)
    assert models(files) == dict.fromkeys((*NAMES, "the-base"), "u0")
    assert [name for name in (*NAMES, "the-base") if name in files[CONFIG] and name != "123"] == []


def require_accepted(folder: Path, files: dict[str, str]) -> None:
    done = subprocess.run([*written(folder, files), "-t"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_nginx_accepts_hundreds_of_servers_and_of_upstreams(tmp_path: Path) -> None:
    ports = [f"127.0.0.1:{9000 + number}" for number in range(300)]
    require_accepted(tmp_path, gateway_files(halves(300, replicas=300), {"g": ports, "h": ports}, 8000))


def test_nginx_accepts_names_whose_addresses_change(tmp_path: Path) -> None:
    if not resolves_names():
        pytest.skip("nginx before 1.27.3 cannot follow the addresses of names")
    addresses = {"g0": ["g0:8000"], "g1": ["g1:8000"]}
    require_accepted(tmp_path, gateway_files(small_plan(), addresses, 8000, "resolver 127.0.0.11 valid=5s;"))


def two_groups(*more: str) -> Plan:
    """Return a plan of one server each, with an adapter of their own and a shared one."""
    shared = ("shared", 8, 0.5, None)
    extra = tuple((name, 8, 1.0, None) for name in more)
    return plan_of(
        group("g", (("a", 8, 1.0, None), shared, *extra)), group("h", (("b", 8, 1.0, None), shared))
    )


@contextlib.contextmanager
def served(folder: Path, *more: str) -> Iterator[tuple[Gateway, Stub, Stub]]:
    """Run the gateway of these groups; yield it and the servers."""
    with (
        stubs("g", "h") as (g, h),
        running(folder, two_groups(*more), {"g": [g.port], "h": [h.port]}) as gateway,
    ):
        yield gateway, g, h


def test_requests_reach_the_servers_of_their_model_as_they_are(tmp_path: Path) -> None:
    with served(tmp_path) as (gateway, g, _):
        assert gateway.ask("a") == (200, {"server": "g", "model": "a"})
        assert gateway.ask("b") == (200, {"server": "h", "model": "b"})
        assert {gateway.ask("shared")[1]["server"] for _ in range(4)} == {"g", "h"}
        assert {gateway.ask(MODEL)[1]["server"] for _ in range(4)} == {"g", "h"}
        path = "/v1/chat/completions?a=%2F&b"
        body = {"model": "a", "prompt": "x" * 3_000_000, "n": 1}
        gateway.post(json.dumps(body).encode(), path, {"Authorization": "Bearer secret"})
        got = g.requests[-1]
        assert got["target"] == path
        assert got["headers"]["authorization"] == "Bearer secret"
        assert got["body"] == body


def test_hostile_names_are_models_like_others(tmp_path: Path) -> None:
    with served(tmp_path, *NAMES) as (gateway, _, _):
        for name in NAMES:
            assert gateway.ask(name) == (200, {"server": "g", "model": name})
        status, body = gateway.get("/v1/models")
        assert status == 200
        assert {card["id"] for card in json.loads(body)["data"]} == {"a", "b", "shared", MODEL, *NAMES}


def test_an_unknown_model_is_an_error_in_the_form_of_openai(tmp_path: Path) -> None:
    with served(tmp_path) as (gateway, g, h):
        for name in ("c", "", "toString", "__proto__", "u0", "A", "a ", "\u2028", "x" * 10_000):
            status, document = gateway.ask(name)
            assert (status, document["error"]["code"]) == (404, "model_not_found")
            assert document["error"]["param"] == "model"
            assert len(document["error"]["message"]) < 200
        assert g.requests == h.requests == []


def test_a_body_without_a_model_is_refused(tmp_path: Path) -> None:
    no_json = (b"", b"{", b"\xff\xfe")
    no_model = (b"null", b"[]", b"{}", b'{"model": ["a"]}', b'{"model": 1}')
    with served(tmp_path) as (gateway, _, _):
        for body in (*no_json, *no_model):
            status, document = gateway.post(body)
            code = "invalid_json" if body in no_json else "invalid_model"
            assert (status, document["error"]["code"]) == (400, code)
        assert gateway.get("/v1/completions")[0] == 404


def test_a_body_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as (gateway, g, _):
        with contextlib.closing(gateway.connection()) as connection:
            connection.putrequest("POST", "/v1/completions")
            connection.putheader("Content-Length", str(2**24 + 1))
            connection.endheaders()
            answer = connection.getresponse()
            assert answer.status == 413
            assert json.loads(answer.read())["error"]["code"] == "too_large"
        assert g.requests == []


def test_chunks_of_a_stream_arrive_as_they_are_sent(tmp_path: Path) -> None:
    with served(tmp_path) as (gateway, g, _), contextlib.closing(gateway.connection()) as connection:
        connection.request("POST", "/v1/completions", json.dumps({"model": "a", "stream": True}))
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"
        assert answer.readline() == b"first\n"  # the server waits for what follows
        g.resume.set()
        assert answer.read() == b"second\n"


def test_a_stream_that_has_begun_is_not_started_again(tmp_path: Path) -> None:
    with served(tmp_path) as (gateway, g, h), contextlib.closing(gateway.connection()) as connection:
        body = json.dumps({"model": "shared", "stream": True, "breaks": True})
        connection.request("POST", "/v1/completions", body)
        answer = connection.getresponse()
        assert answer.readline() == b"first\n"
        g.resume.set()
        h.resume.set()
        with contextlib.suppress(Exception):
            answer.read()
        assert len(g.requests) + len(h.requests) == 1


def test_a_server_that_is_gone_is_taken_out(tmp_path: Path) -> None:
    with served(tmp_path) as (gateway, g, h):
        g.fails = True
        answers = [gateway.ask("shared") for _ in range(20)]
        assert answers == [(200, {"server": "h", "model": "shared"})] * 20
        assert len(g.requests) == 1
        assert len(h.requests) == 20


def test_a_model_without_a_server_is_an_error_in_the_form_of_openai(tmp_path: Path) -> None:
    with stubs("h") as (h,), running(tmp_path, two_groups(), {"g": [1], "h": [h.port]}) as gateway:
        status, document = gateway.ask("a")
        assert (status, document["error"]["code"]) == (503, "server_unavailable")
        assert {gateway.ask("shared")[0] for _ in range(6)} == {200}


@pytest.mark.process
def test_requests_follow_the_shares_of_the_plan(tmp_path: Path) -> None:
    shared = {"g": (0.13, 1), "h": (0.29, 2), "i": (0.58, 1)}
    groups = (
        group(name, (("shared", 8, share, None),), replicas=count) for name, (share, count) in shared.items()
    )
    plan = plan_of(*groups)
    names = ("g", "h1", "h2", "i")
    requests = 5000
    with stubs(*names) as made:
        g, h1, h2, i = (each.port for each in made)
        with running(tmp_path, plan, {"g": [g], "h": [h1, h2], "i": [i]}) as gateway:

            def client(count: int) -> Counter[str]:
                body = json.dumps({"model": "shared"})
                found: Counter[str] = Counter()
                with contextlib.closing(gateway.connection()) as connection:
                    for _ in range(count):
                        connection.request("POST", "/v1/completions", body)
                        found[json.loads(connection.getresponse().read())["server"]] += 1
                return found

            with ThreadPoolExecutor(4) as pool:
                found = sum(pool.map(client, [requests // 4] * 4), Counter[str]())
    measured = {name: found[name] / requests for name in names}
    expected = {"g": 0.13, "h1": 0.145, "h2": 0.145, "i": 0.58}
    assert measured == pytest.approx(expected, abs=0.02), measured


@pytest.mark.process
def test_real_engines_stream_through_the_gateway(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the engine needs torch (extra `engine`)")
    from tests.engine.test_core_process import Server

    groups = (group("g", (("a", 8, 1.0, None),)), group("h", (("b", 16, 1.0, None),)))
    plan = plan_of(*groups, base_model="tiny-llama")
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            engines = list(pool.map(lambda _: Server("--max-loras", 2), range(2)))
        for each in engines:
            stack.callback(each.end)
            stack.callback(each.process.terminate)
        ports = {name: [int(each.url.rpartition(":")[2])] for name, each in zip("gh", engines, strict=True)}
        gateway = stack.enter_context(running(tmp_path, plan, ports))
        for name in ("a", "b", "tiny-llama"):
            # Long, for a server merges the tokens that wait while its front is not scheduled.
            asked = {"prompt": [1, 2, 3], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
            status, whole = gateway.ask(name, **asked)
            assert status == 200, whole
            texts = streamed(gateway, {"model": name, **asked})
            assert len(texts) > 1
            assert "".join(texts) == whole["choices"][0]["text"]
        served = [each.metric("vllm:request_success_total") for each in engines]
        assert min(served) > 0


def streamed(gateway: Gateway, fields: dict[str, object]) -> list[str]:
    """Return the text of each event of a streamed completion."""
    with contextlib.closing(gateway.connection()) as connection:
        body, headers = json.dumps({**fields, "stream": True}), {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        lines = connection.getresponse().read().decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [choice["text"] for event in events for choice in json.loads(event)["choices"]]
