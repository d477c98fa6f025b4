"""Invalid requests, disconnects and failures: status codes, and a server without leaks."""

import asyncio
import contextlib
import http.client
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from capplan.engine import Engine, StepOutput
from capplan.engine.lora import PeftFolder
from capplan.server import ServerLimits
from capplan.server._protocol import _ANY, _UNSUPPORTED, ChatRequest, CompletionRequest
from tests.engine.live import ADMIN_KEY, SIZES, TINY, Live, live
from tests.engine.test_generate import cut_off, spoil_number, spoil_shape, write_adapter

pytestmark = pytest.mark.process

ADAPTERS = {"a": 8, "b": 4}


class Answer:
    """Response to one HTTP request."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"]
        return error


def send(server: Live, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        return Answer(connection.getresponse())


def post(server: Live, path: str, **fields: Any) -> Answer:
    return send(server, "POST", path, json.dumps(fields).encode())


def administer(server: Live, verb: str, key: str = ADMIN_KEY, **fields: str) -> Answer:
    body = json.dumps(fields).encode()
    return send(server, "POST", f"/v1/{verb}_lora_adapter", body, Authorization=f"Bearer {key}")


def load(server: Live, name: str, path: str) -> Answer:
    return administer(server, "load", lora_name=name, lora_path=path)


def unload(server: Live, name: str) -> Answer:
    return administer(server, "unload", lora_name=name)


def complete(server: Live, **fields: Any) -> Answer:
    asked = {"model": "a", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    return post(server, "/v1/completions", **(asked | fields))


@contextlib.contextmanager
def streamed(server: Live, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """Yield the response of a streamed completion once it has begun."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        body = json.dumps({"model": "a", "prompt": [1], "stream": True, **fields})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.readline()
        yield response


def tokens_of(answer: Answer) -> list[int]:
    assert answer.status == 200, answer.body
    found: list[int] = json.loads(answer.body)["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good adapter and broken ones, and an adapter outside of it."""
    top = tmp_path_factory.mktemp("adapters")
    folder = top / "root"
    folder.mkdir()
    with Engine(TINY, num_kv_blocks=4) as engine:
        for at in (folder / "good", folder / "other", top / "outside"):
            write_adapter(at, engine)
    return folder


@pytest.fixture(scope="module")
def shared(root: Path) -> Iterator[Live]:
    engine = {"max_adapters": 8, "max_loras": 2}
    with live(ADAPTERS, engine, lora_root=root, limits=ServerLimits(max_body_bytes=100_000)) as running:
        yield running


@pytest.fixture
def server(shared: Live) -> Iterator[Live]:
    """A server that is checked for leaks after the test."""
    right = tokens_of(complete(shared, return_token_ids=True))
    yield shared
    assert tokens_of(complete(shared, return_token_ids=True)) == right
    shared.check_idle()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "a", "prompt": "x"',
        b'{"model": "a", "prompt": "x", "max_tokens": NaN}',
        b'{"model": "a", "prompt": "x", "temperature": Infinity}',
        b'{"model": "a", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 50_000,
        b'{"model": "a", "prompt": "\\ud800"}',
    ],
)
def test_an_invalid_body_is_refused(server: Live, body: bytes) -> None:
    answer = send(server, "POST", "/v1/completions", body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], "x"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 300]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[1]] * 2000}, "prompt"),
        ({"prompt": ["a"] * 15_000}, "prompt"),  # before they are tokenized
        ({"prompt": [1] * 512}, "prompt"),
        ({"prompt": [1] * 20_000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 510}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": 4.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 128, "prompt": [[1]] * 9}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_completion_tokens": 510}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"priority": 1}, "priority"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ({"messages": []}, "messages"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"stop_token_ids": [-3]}, "stop_token_ids"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"temprature": 0.5}, "temprature"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_an_invalid_value_is_refused_with_its_field(server: Live, fields: dict[str, Any], param: str) -> None:
    answer = complete(server, **fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_the_largest_seed_of_openai_is_accepted(server: Live) -> None:
    assert complete(server, seed=2**63 - 1).status == 200


def test_an_unknown_field_is_refused_with_the_nearest_name(server: Live) -> None:
    assert "did you mean 'temperature'" in complete(server, temprature=0.5).error["message"]
    assert "did you mean 'top_k'" in complete(server, topk=1).error["message"]


@pytest.mark.parametrize("name", [*_UNSUPPORTED, "chat_template_kwargs", "reasoning_budget", "guided_xyz"])
def test_a_refused_field_suggests_none_that_means_something_else(server: Live, name: str) -> None:
    if any(neutral not in (None, [], {}, True, False, 0, 1, "") for neutral in _UNSUPPORTED.get(name, ())):
        return  # other tests refuse values of these
    answer = complete(server, **{name: {"a": 5}})
    assert (answer.status, answer.error["param"]) == (400, name)
    assert "did you mean" not in answer.error["message"]


def test_neutral_values_of_unsupported_fields_are_accepted(server: Live) -> None:
    neutral = {name: values[-1] for name, values in _UNSUPPORTED.items() if values}
    neutral = {name: "any" if value is _ANY else value for name, value in neutral.items()}
    assert len(neutral) > 30
    plain = tokens_of(complete(server, return_token_ids=True))
    assert tokens_of(complete(server, return_token_ids=True, **neutral)) == plain
    for values in ({"n": 1, "top_k": -1, "min_p": 0, "echo": False}, {"top_k": 0, "seed": -1}):
        assert tokens_of(complete(server, return_token_ids=True, **values)) == plain


def test_null_means_the_default_in_every_field(server: Live) -> None:
    for model, path in ((CompletionRequest, "/v1/completions"), (ChatRequest, "/v1/chat/completions")):
        needed = ("model", "prompt", "messages")
        nulls = dict.fromkeys([*model.model_fields, *_UNSUPPORTED, "echo", "chat_template_kwargs"])
        asked = {name: value for name, value in nulls.items() if name not in needed}
        asked |= {"model": "a", "max_tokens": 3, "stream_options": None}
        asked |= (
            {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        )
        answer = post(server, path, **asked)
        assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"echo": True}, "echo"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_an_invalid_conversation_is_refused(server: Live, fields: dict[str, Any], param: str) -> None:
    asked = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = post(server, "/v1/chat/completions", **(asked | fields))
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_unknown_models_and_paths_are_404(server: Live) -> None:
    assert complete(server, model="unknown").status == 404
    assert complete(server, model="unknown").error["code"] == "model_not_found"
    assert send(server, "GET", "/v1/nothing").status == 404
    assert send(server, "GET", "/v1/nothing").error["type"] == "not_found_error"
    assert send(server, "GET", "/v1/completions").status == 405
    assert unload(server, "unknown").status == 404


def test_a_too_large_body_is_refused_before_it_is_read(server: Live) -> None:
    answer = complete(server, prompt="x" * 200_000)
    assert (answer.status, answer.error["code"]) == (413, "too_large")
    chunks = iter([b'{"prompt": "', *[b"x" * 10_000] * 20])  # no length is declared
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
        assert connection.getresponse().status == 413
    declared = send(server, "POST", "/v1/completions", b"{}", **{"Content-Length": str(10**15)})
    assert declared.status == 413


def cut_off_header(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 5)


def lose_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def grow_rank(folder: Path) -> None:
    tensors = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        axis = 0 if "lora_A" in name else 1
        tensors[name] = torch.cat([tensor] * 8, dim=axis)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 32}))


def write_nonsense(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


@pytest.mark.parametrize(
    "spoil",
    [spoil_shape, spoil_number, cut_off, cut_off_header, lose_weights, grow_rank, write_nonsense],
)
def test_loading_a_broken_adapter_is_refused(server: Live, root: Path, spoil: Callable[[Path], None]) -> None:
    folder = root / f"broken-{spoil.__name__}"
    write_adapter(folder, server.engine)
    spoil(folder)
    answer = load(server, "broken", folder.name)
    assert (answer.status, answer.error["param"]) == (400, "lora_path")
    assert str(root) not in answer.error["message"]
    assert complete(server, model="broken").status == 404


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("../outside", 403),
        ("good/../../outside", 403),
        ("{outside}", 403),
        ("link", 403),
        ("linked-file", 403),
        ("/etc", 403),
        ("/etc/no-such-folder", 403),
        ("~root", 404),
        ("nothing", 404),
        ("good/adapter_config.json", 404),
        ("x" * 5000, 400),
        ("good\0", 400),
        ("", 400),
    ],
)
def test_adapters_outside_the_root_are_refused(server: Live, root: Path, path: str, status: int) -> None:
    outside = root.parent / "outside"
    if path == "link":
        (root / "link").symlink_to(outside)
    if path == "linked-file":
        (root / path).mkdir()
        (root / path / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    asked = path.format(outside=outside)
    answer = load(server, "stranger", asked)
    assert answer.status == status, answer.body
    assert answer.error["param"] == "lora_path"
    assert complete(server, model="stranger").status == 404


@pytest.mark.parametrize("name", ["", "a", "base", "x" * 257, "new\nline"])
def test_an_adapter_name_must_be_valid_and_unique(server: Live, name: str) -> None:
    answer = load(server, name, "good")
    assert (answer.status, answer.error["param"]) == (400, "lora_name")


def test_adapters_are_loaded_and_unloaded_at_run_time(server: Live, root: Path) -> None:
    with Engine(TINY, {"good": root / "good"}, **SIZES) as engine:
        [right] = engine.generate([[1, 2, 3]], "good", max_tokens=20)
    for path in ("good", str(root / "good"), "./good/."):
        assert load(server, "new", path).status == 200
        assert "new" in [each["id"] for each in json.loads(send(server, "GET", "/v1/models").body)["data"]]
        got = complete(server, model="new", max_tokens=20, return_token_ids=True)
        assert tokens_of(got) == list(right.token_ids)
        assert unload(server, "new").status == 200
        assert complete(server, model="new").status == 404


def load_in_place(server: Live, name: str, path: str, in_place: bool = True) -> Answer:
    fields = json.dumps({"lora_name": name, "lora_path": path, "load_inplace": in_place}).encode()
    return send(server, "POST", "/v1/load_lora_adapter", fields, Authorization=f"Bearer {ADMIN_KEY}")


def test_an_adapter_is_replaced_in_place_unless_requests_use_it(server: Live, root: Path) -> None:
    with Engine(TINY, num_kv_blocks=4) as engine:
        write_adapter(root / "stronger", engine, scale=9.0)
    assert load_in_place(server, "new", "good").status == 200  # there is none yet
    first = tokens_of(complete(server, model="new", max_tokens=20, return_token_ids=True))
    taken = load_in_place(server, "new", "stronger", in_place=False)
    assert (taken.status, taken.error["code"]) == (400, "already_loaded")
    assert load_in_place(server, "base", "stronger").status == 400
    assert load_in_place(server, "new", "nothing").status == 404
    assert tokens_of(complete(server, model="new", max_tokens=20, return_token_ids=True)) == first
    with streamed(server, model="new", max_tokens=500, temperature=0) as response:
        assert load_in_place(server, "new", "stronger").status == 409
        assert b"[DONE]" in response.read()
    assert load_in_place(server, "new", "stronger").status == 200
    changed = tokens_of(complete(server, model="new", max_tokens=20, return_token_ids=True))
    assert changed != first
    assert unload(server, "new").status == 200
    assert load(server, "new", "stronger").status == 200
    assert tokens_of(complete(server, model="new", max_tokens=20, return_token_ids=True)) == changed
    assert unload(server, "new").status == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_before_the_minimum_does_not_end_the_output(server: Live, streamed: bool) -> None:
    text = json.loads(complete(server, max_tokens=40).body)["choices"][0]["text"]
    stop = text[1]
    assert json.loads(complete(server, max_tokens=40, stop=stop).body)["usage"]["completion_tokens"] < 8
    fields = {"max_tokens": 40, "stop": [stop, "never"], "min_tokens": 8, "ignore_eos": True}
    if not streamed:
        found = json.loads(complete(server, **fields).body)
        got, tokens = found["choices"][0]["text"], found["usage"]["completion_tokens"]
    else:
        body = complete(server, stream=True, stream_options={"include_usage": True}, **fields).body.decode()
        events = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
        got = "".join(choice["text"] for event in events for choice in event["choices"])
        tokens = events[-1]["usage"]["completion_tokens"]
    assert tokens >= 8
    assert text.startswith(got)
    assert stop in got


def test_an_adapter_in_use_cannot_be_removed(server: Live) -> None:
    load(server, "busy", "good")
    with streamed(server, model="busy", max_tokens=500, temperature=0) as response:
        assert unload(server, "busy").status == 409
        assert b"[DONE]" in response.read()
    assert unload(server, "busy").status == 200


def test_a_deleted_adapter_fails_only_its_own_requests(root: Path) -> None:
    folder = root / "vanishing"
    with Engine(TINY, num_kv_blocks=4) as engine:
        write_adapter(folder, engine)
    engine_settings = {"max_adapters": 4, "max_loras": 1, "max_cpu_loras": 1}
    with live({"a": 8}, engine_settings, lora_root=root) as server:
        right = tokens_of(complete(server, return_token_ids=True))
        assert load(server, "v", "vanishing").status == 200
        lose_weights(folder)
        for stream in (False, True):  # a stream that fails before its first token has a status
            answer = complete(server, model="v", stream=stream)
            assert (answer.status, answer.error["code"]) == (500, "request_failed")
            assert "adapter_model.safetensors" in answer.error["message"]
        assert tokens_of(complete(server, return_token_ids=True)) == right
        server.check_idle()


def test_a_folder_swapped_for_a_link_is_not_followed(root: Path) -> None:
    with Engine(TINY, num_kv_blocks=4) as engine:
        write_adapter(root / "swapped", engine)
    engine_settings = {"max_adapters": 4, "max_loras": 1, "max_cpu_loras": 1}
    with live({"a": 8}, engine_settings, lora_root=root) as server:
        assert load(server, "v", "swapped").status == 200
        (root / "swapped").rename(root / "before")
        (root / "swapped").symlink_to(root.parent / "outside")
        answer = complete(server, model="v")
        assert (answer.status, answer.error["code"]) == (500, "request_failed")
        assert "cannot be read" in answer.error["message"]
        assert str(root) not in answer.error["message"]
        server.check_idle()


def test_adapters_change_with_the_admin_key_and_a_root_only(root: Path) -> None:
    with live(ADAPTERS, {"max_adapters": 4}, lora_root=root, api_key="client") as server:
        for key in ("", "client", "admi", "admin2"):
            for verb in ("load", "unload"):
                answer = administer(server, verb, key, lora_name="a", lora_path="good")
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert send(server, "GET", "/v1/models", Authorization=f"Bearer {ADMIN_KEY}").status == 401
        assert load(server, "new", "good").status == 200
        models = send(server, "GET", "/v1/models", Authorization="Bearer client").body.decode()
        assert '"new"' in models
        assert str(root) not in models
        assert unload(server, "new").status == 200
    with live(ADAPTERS, admin_api_key=ADMIN_KEY) as server:
        for answer in (load(server, "new", "good"), unload(server, "a")):
            assert (answer.status, answer.error["code"]) == (403, "no_lora_root")


def test_a_file_system_that_hangs_holds_neither_other_loads_nor_the_end(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, read = threading.Event(), PeftFolder.read

    def hangs(folder: PeftFolder, *args: Any, **options: Any) -> Any:
        if folder.name == "other":
            hang.wait(60)
        return read(folder, *args, **options)

    monkeypatch.setattr(PeftFolder, "read", hangs)
    limits = ServerLimits(lora_timeout_s=0.3)
    with live(ADAPTERS, {"max_adapters": 4}, lora_root=root, limits=limits) as server:
        for _ in range(2):
            answer = load(server, "new", "other")
            assert (answer.status, answer.error["code"]) == (503, "timeout")
        assert load(server, "new", "good").status == 200
        answers = [load(server, "newer", "other") for _ in range(14)]  # a thread hangs for each, up to 12
        assert {each.status for each in answers} == {503}
        assert answers[-1].error["code"] == "overloaded"
        server.close()
        assert not hang.is_set()
    hang.set()


@pytest.mark.parametrize(
    "rules",
    [
        {"rules": "capplan", "max_loras": 1, "max_cpu_loras": 1},
        {"rules": "vllm-0.8", "max_loras": 1, "enable_prefix_caching": True, "shared_prefix_tokens": 8},
        {"rules": "slora"},
        {"scheduler": "chameleon", "cache": "chameleon"},
    ],
    ids=["capplan", "vllm", "slora", "chameleon"],
)
def test_disconnects_of_clients_leak_nothing(rules: dict[str, Any]) -> None:
    rng = random.Random(0)

    async def leave_early(server: Live, number: int) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        asked = {
            "model": ("a", "b", "base")[number % 3],
            "prompt": [[*range(10), number]] * rng.choice((1, 1, 3)),
            "max_tokens": rng.choice((5, 50, 150)),
            "stream": number % 4 != 0,
        }
        body = json.dumps(asked).encode()
        sent = rng.choice((len(body), len(body), len(body) // 2))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:sent])
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.05, 0.2, 0.5)))
        if rng.random() < 0.5:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(rng.choice((1, 100, 5000))), 2)
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    async def all_at_once(server: Live) -> None:
        await asyncio.gather(*(leave_early(server, number) for number in range(100)))

    with live(ADAPTERS, {"num_kv_blocks": 80, "max_model_len": 200, "max_num_seqs": 16, **rules}) as server:
        right = tokens_of(complete(server, return_token_ids=True))
        asyncio.run(all_at_once(server))
        server.check_idle()
        assert b'finished_reason="abort"' in send(server, "GET", "/metrics").body
        assert tokens_of(complete(server, return_token_ids=True)) == right


def test_a_full_queue_refuses_and_recovers() -> None:
    with live(ADAPTERS, {"max_num_seqs": 2}, max_requests=3) as server:
        assert complete(server, prompt=[[1]] * 4).status == 400  # more than the queue
        assert complete(server, prompt=[[1]] * 3).status == 200
        with streamed(server, prompt=[[1], [2], [3]], max_tokens=150) as response:
            shed = complete(server)
            assert (shed.status, shed.error["code"]) == (429, "queue_full")
            assert 1 <= int(shed.headers["Retry-After"]) <= 60
            assert b'capplan:requests_refused_total{status="429"} 1.0' in send(server, "GET", "/metrics").body
            assert b"[DONE]" in response.read()
        assert complete(server).status == 200
        server.check_idle()


def test_requests_without_the_key_are_401() -> None:
    with live(ADAPTERS, api_key="naïve") as server:
        for value in ("", "Bearer", "Bearer wrong", "Basic na\u00efve", "Bearer \xff\xfe"):
            answer = send(server, "POST", "/v1/completions", b"{", Authorization=value)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert send(server, "GET", "/v1/models").status == 401
        right = "Bearer naïve".encode().decode("latin-1")  # as HTTP carries bytes
        assert send(server, "GET", "/v1/models", Authorization=right).status == 200
        assert send(server, "GET", "/health").status == 200


def test_a_draining_server_finishes_running_requests_and_refuses_new_ones() -> None:
    with live(ADAPTERS) as server:
        with streamed(server, max_tokens=400, ignore_eos=True) as response:
            server.loop.call_soon_threadsafe(server.server.end)
            server.on_loop(lambda: None)
            refused = complete(server)
            assert (refused.status, refused.error["code"]) == (503, "shutting_down")
            assert refused.headers["Retry-After"]
            assert send(server, "GET", "/health").status == 503
            events = response.read().decode().split("\n\n")
        assert events[-2] == "data: [DONE]"
        assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        server.join()


def test_requests_beyond_the_drain_timeout_end_with_an_error() -> None:
    with live(ADAPTERS, drain_timeout_s=0.1) as server:
        with streamed(server, prompt=[[1]] * 60, max_tokens=500) as response:
            server.loop.call_soon_threadsafe(server.server.end)
            last = response.read().decode().strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "aborted"
        server.join()
        check = server.engine.core.requests
        assert check == {}


def test_a_second_signal_stops_the_server_at_once() -> None:
    with (
        live(ADAPTERS, drain_timeout_s=600) as server,
        streamed(server, prompt=[[1]] * 60, max_tokens=500) as response,
    ):
        for _ in range(2):
            server.loop.call_soon_threadsafe(server.server.end)
        server.join()
        with contextlib.suppress(http.client.IncompleteRead):
            assert b"[DONE]" not in response.read()


def test_a_hanging_engine_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capplan.server._routes._HEALTH_S", 0.2)
    with live(ADAPTERS) as server:
        resume = threading.Event()
        step = server.engine.step

        def hangs() -> StepOutput | None:
            resume.wait(60)
            return step()

        monkeypatch.setattr(server.engine, "step", hangs)
        assert send(server, "GET", "/health").status == 200
        with contextlib.closing(http.client.HTTPConnection(server.url.removeprefix("http://"))) as waiting:
            body = json.dumps({"model": "a", "prompt": [1], "max_tokens": 2})
            waiting.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            while send(server, "GET", "/health").status == 200:
                pass
            resume.set()
            assert waiting.getresponse().status == 200
        assert send(server, "GET", "/health").status == 200


def test_a_failed_engine_ends_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(ADAPTERS) as server:
        steps = 0
        step = server.engine.step

        def breaks() -> StepOutput | None:
            nonlocal steps
            steps += 1
            if steps > 20:
                raise MemoryError("no more")
            return step()

        monkeypatch.setattr(server.engine, "step", breaks)
        answer = complete(server, max_tokens=400, stream=True)
        last = answer.body.decode().strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "instance_failed"
        server.join()
        assert "MemoryError: no more" in str(server.service.engine.failure)
