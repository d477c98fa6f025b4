"""Chat templates: of the model folder, or chosen by special tokens."""

import contextlib
import http.client
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from capplan import InputError
from capplan.engine import ByteTokenizer, Engine
from capplan.engine._tokenizer import FileTokenizer
from capplan.server import ServerLimits
from capplan.server._protocol import ChatMessage
from capplan.server._service import chat_template
from tests.engine.live import SIZES, TINY, Live

TALK = [
    ChatMessage(role="developer", content="Be brief."),
    ChatMessage(
        role="user", content=[{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]
    ),
    ChatMessage(role="assistant", content=None),
]
CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n"
    "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
)
LLAMA3 = (
    "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho are you?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
PLAIN = "system: Be brief.\nuser: Who are you?\nassistant: \nassistant:"


def byte_level(mark: str) -> HfTokenizer:
    """Return a byte tokenizer with one special token."""
    alphabet = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = HfTokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(mark, special=True)])
    return tokenizer


@pytest.mark.parametrize(
    ("mark", "form"), [("<|im_start|>", CHATML), ("<|start_header_id|>", LLAMA3), ("<other>", PLAIN)]
)
def test_the_template_is_chosen_by_the_tokens_of_the_model(tmp_path: Path, mark: str, form: str) -> None:
    byte_level(mark).save(str(tmp_path / "tokenizer.json"))
    found = chat_template(FileTokenizer(tmp_path / "tokenizer.json"), tmp_path)
    assert found.render(TALK) == form
    assert found.adds_special


@pytest.mark.parametrize("vocab_size", [100, 300])
def test_a_model_without_a_tokenizer_uses_plain_lines(vocab_size: int) -> None:
    assert chat_template(ByteTokenizer(vocab_size)).render(TALK) == PLAIN


# Features used by templates of common models.
OWN = """
{%- set seen = namespace(system='none') -%}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'developer' %}
        {%- set seen.system = message.content | trim %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- raise_exception('no tools here') }}
    {%- endif %}
    {{- '<' + message['role'] + '>' + (message['content'][:7] | tojson) + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<assistant after ' ~ seen.system ~ '>' }}
{%- endif %}
"""


def folder_with(tmp_path: Path, template: object, *, file: str = "") -> Path:
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    if file:
        (tmp_path / file).write_text(str(template))
    else:
        settings["chat_template"] = template  # type: ignore[assignment]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("kind", ["text", "named", "file"])
def test_the_template_of_the_folder_takes_precedence(tmp_path: Path, kind: str) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": OWN}]
    file = "chat_template.jinja" if kind == "file" else ""
    folder = folder_with(tmp_path, named if kind == "named" else OWN, file=file)
    found = chat_template(ByteTokenizer(300), folder)
    assert found.render(TALK) == '<s><user>"Who are"</s><assistant>""</s><assistant after Be brief.>'
    assert not found.adds_special  # they are in the text


def test_rendering_equals_transformers(tmp_path: Path) -> None:
    jinja = pytest.importorskip("transformers.utils.chat_template_utils")
    talk = [{"role": message.role, "content": message.text()} for message in TALK]
    (theirs,), _ = jinja.render_jinja_template(
        [talk], chat_template=OWN, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert chat_template(ByteTokenizer(300), folder_with(tmp_path, OWN)).render(TALK) == theirs


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no tools here') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[9].content.x }}",
        "{{ messages | length + 'a' }}",
    ],
)
def test_an_error_in_the_template_refuses_the_conversation(tmp_path: Path, template: str) -> None:
    found = chat_template(ByteTokenizer(300), folder_with(tmp_path, template))
    with pytest.raises(InputError, match="the model's chat template refuses the conversation: "):
        found.render(TALK)


def test_special_tokens_are_added_once_and_refusals_are_400(tmp_path: Path) -> None:
    tokenizer = byte_level("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    engine = Engine(TINY, {}, **SIZES)
    engine.tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    refusal = "{% if messages[0].role != 'user' %}{{ raise_exception('users begin') }}{% endif %}"
    engine.folder = folder_with(tmp_path, refusal + "{{ bos_token + messages[0].content }}")
    server = Live(engine, {})
    try:
        responses = {role: chat(server, role) for role in ("user", "assistant")}
    finally:
        server.close()
    assert responses["user"][1]["usage"]["prompt_tokens"] == 1 + len("Hello")
    status, answer = responses["assistant"]
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "users begin" in answer["error"]["message"]


def chat(server: Live, role: str) -> tuple[int, dict[str, Any]]:
    """Return status and response of a conversation of one turn."""
    asked = {"model": "base", "max_tokens": 2, "messages": [{"role": role, "content": "Hello"}]}
    with contextlib.closing(http.client.HTTPConnection(server.url.removeprefix("http://"))) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1"])
def test_a_broken_template_is_reported_with_its_file(tmp_path: Path, template: str) -> None:
    with pytest.raises(InputError, match=r"tokenizer_config\.json"):
        chat_template(ByteTokenizer(300), folder_with(tmp_path, template))


def test_a_binary_template_is_reported_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja"):
        chat_template(ByteTokenizer(300), tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "longer than 0.5 s",
        ),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "more than 67108864 characters"),
        ("{{ messages[0].content * 2 ** 31 }}", "more than 1073741824 bytes"),
    ],
    ids=["loop", "text", "memory"],
)
def test_a_conversation_on_which_the_template_is_endless_is_refused(
    tmp_path: Path, template: str, message: str
) -> None:
    """The process of the template ends or refuses, and the next conversation is rendered."""
    source = "{% if messages[0].content == 'Hello' %}" + template + "{% else %}fine{% endif %}"
    limits = ServerLimits(chat_template_timeout_s=0.5)
    found = chat_template(ByteTokenizer(300), folder_with(tmp_path, source), limits)
    with contextlib.closing(found):
        begin_s = time.monotonic()
        with pytest.raises(InputError, match=message):
            found.render([ChatMessage(role="user", content="Hello")])
        assert time.monotonic() - begin_s < 5
        assert found.render(TALK) == "fine"


def test_a_template_that_cannot_be_compiled_in_time_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "{{ 9 ** (9 ** 9) }}")  # constants are computed by the compiler
    with pytest.raises(InputError, match=r"tokenizer_config\.json: chat template: it takes longer than"):
        chat_template(ByteTokenizer(300), folder, ServerLimits(chat_template_timeout_s=0.5))


@pytest.mark.long
def test_an_endless_template_does_not_delay_other_requests(tmp_path: Path) -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    engine = Engine(TINY, {}, **SIZES)
    engine.folder = folder_with(tmp_path, source)
    server = Live(engine, {}, limits=ServerLimits(chat_template_timeout_s=4.0))
    try:
        with ThreadPoolExecutor(4) as threads:
            chats = [threads.submit(chat, server, "user") for _ in range(4)]
            waits_s = []
            while not all(each.done() for each in chats):
                begin_s = time.monotonic()
                with contextlib.closing(
                    http.client.HTTPConnection(server.url.removeprefix("http://"))
                ) as probe:
                    probe.request("GET", "/health")
                    assert probe.getresponse().status == 200
                waits_s.append(time.monotonic() - begin_s)
    finally:
        server.close()
    assert statistics.median(waits_s) < 2.0  # on the event loop, a conversation would take its 4 s
    for status, answer in (each.result() for each in chats):
        assert (status, answer["error"]["param"]) == (400, "messages")


def test_variables_of_a_request_reach_the_template(tmp_path: Path) -> None:
    source = (
        "{{ messages[0].content }}"
        "{% if enable_thinking is defined and not enable_thinking %} /quick{% endif %}"
        "{{ bos_token }}{% if add_generation_prompt %}>{% endif %}"
    )
    found = chat_template(ByteTokenizer(300), folder_with(tmp_path, source))
    turn = [ChatMessage(role="user", content="Hi")]
    with contextlib.closing(found):
        assert found.render(turn) == "Hi<s>>"
        assert found.render(turn, {"enable_thinking": False}) == "Hi /quick<s>>"
        assert found.render(turn, {"add_generation_prompt": False, "bos_token": ""}) == "Hi"
        assert found.render(turn, {"messages": []}) == "Hi<s>>"  # the conversation is that of the request
