"""OpenAI's official client against a real server on loopback."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

from capplan.engine import Completion, Engine
from tests.engine.live import SIZES, TINY, Live, live

pytestmark = pytest.mark.process

KEY = "secret"
ADAPTERS = {f"a{i}": (4, 8, 16)[i % 3] for i in range(16)}
SLOTS = {"max_loras": 4}
PROMPT = "Dear Sir or Madam"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
AS_PLAIN_TEXT = "system: Be brief.\nuser: Who are you?\nassistant:"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(ADAPTERS, SLOTS, api_key=KEY) as running:
        yield running
        running.check_idle()


@pytest.fixture(scope="module")
def reference() -> Iterator[Engine]:
    """The same engine without a server."""
    with Engine(TINY, ADAPTERS, **SIZES, **SLOTS) as engine:
        yield engine


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as connected:
        yield connected


def answer(engine: Engine, prompt: str | list[int], adapter: str | None, tokens: int) -> Completion:
    [done] = engine.generate([prompt], adapter, max_tokens=tokens)
    return done


@pytest.mark.parametrize("name", ["base", "a0", "a7"])
def test_a_completion_equals_the_engines(client: openai.OpenAI, reference: Engine, name: str) -> None:
    expected = answer(reference, PROMPT, None if name == "base" else name, 20)
    extra = {"return_token_ids": True}
    got = client.completions.create(model=name, prompt=PROMPT, max_tokens=20, temperature=0, extra_body=extra)
    assert got.model == name
    assert got.choices[0].text == expected.text
    assert got.choices[0].model_extra is not None
    assert got.choices[0].model_extra["token_ids"] == list(expected.token_ids)
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(PROMPT), 20)


def test_a_stream_has_the_same_text_and_usage(client: openai.OpenAI, reference: Engine) -> None:
    expected = answer(reference, PROMPT, "a1", 30)
    chunks = list(
        client.completions.create(
            model="a1",
            prompt=PROMPT,
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == expected.text
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason == "length"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == len(PROMPT) + 30
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_list_of_prompts_gives_one_choice_each(client: openai.OpenAI, reference: Engine) -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    expected = [answer(reference, prompt, "a2", 8).text for prompt in prompts]
    asked = {"model": "a2", "prompt": prompts, "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [""] * 3
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_a_response_is_valid_as_the_next_turn(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="a3", messages=MESSAGES, max_tokens=4).choices[0].message
    for turn in (first, first.model_dump()):
        talk = [*MESSAGES, turn, {"role": "user", "content": "Go on."}]
        again = client.chat.completions.create(model="a3", messages=talk, max_tokens=4)
        assert again.usage is not None
        assert again.usage.completion_tokens == 4


def test_text_offsets_continue_over_a_stream(client: openai.OpenAI) -> None:
    asked = {"model": "a1", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**asked).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    assert whole is not None
    assert [at for part in parts if part for at in part.text_offset or ()] == whole.text_offset


def test_a_chat_equals_the_completion_of_its_template(client: openai.OpenAI, reference: Engine) -> None:
    expected = answer(reference, AS_PLAIN_TEXT, "a3", 12)
    got = client.chat.completions.create(
        model="a3", messages=MESSAGES, max_completion_tokens=12, temperature=0
    )
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model="a3", messages=MESSAGES, max_tokens=12, temperature=0, stream=True
    )
    deltas = [chunk.choices[0] for chunk in stream]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == expected.text
    assert deltas[-1].finish_reason == "length"


def test_log_probabilities_come_with_every_token(client: openai.OpenAI, reference: Engine) -> None:
    [expected] = reference.generate([PROMPT], "a4", max_tokens=5, logprobs=2)
    assert expected.logprobs is not None
    right = [each.logprob for each in expected.logprobs]
    done = client.completions.create(model="a4", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2)
    got = done.choices[0].logprobs
    assert got is not None
    assert got.token_logprobs == pytest.approx(right, abs=1e-4)
    assert got.top_logprobs is not None
    assert len(got.tokens or ()) == len(got.text_offset or ()) == 5
    chunks = client.completions.create(
        model="a4", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=0, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    streamed = [value for part in parts if part is not None for value in part.token_logprobs or ()]
    assert streamed == pytest.approx(right, abs=1e-4)
    chat = client.chat.completions.create(
        model="a4", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    likelihoods = chat.choices[0].logprobs
    assert likelihoods is not None
    assert [len(each.top_logprobs) for each in likelihoods.content or ()] == [3] * 5
    for each in likelihoods.content or ():
        assert each.logprob == pytest.approx(each.top_logprobs[0].logprob)  # greedy


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, reference: Engine) -> None:
    text = answer(reference, PROMPT, "a5", 200).text
    half = len(text) // 2
    stop = text[half : half + 2]
    assert text.index(stop) > 0
    asked = {"model": "a5", "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stop": [stop, "\0\0"]}
    got = client.completions.create(**asked)
    assert got.choices[0].text == text[: text.index(stop)]
    assert got.choices[0].finish_reason == "stop"
    assert got.usage is not None
    assert got.usage.completion_tokens < 200
    chunks = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]


def test_a_stop_token_is_named(client: openai.OpenAI, reference: Engine) -> None:
    tokens = answer(reference, PROMPT, "a6", 40).token_ids
    stop = tokens[20]
    extra = {"stop_token_ids": [stop], "return_token_ids": True}
    got = client.completions.create(model="a6", prompt=PROMPT, max_tokens=40, temperature=0, extra_body=extra)
    fields = got.choices[0].model_extra
    assert fields is not None
    assert fields["token_ids"] == list(tokens[: tokens.index(stop) + 1])
    assert (got.choices[0].finish_reason, fields["stop_reason"]) == ("stop", stop)


def test_models_are_the_base_model_and_its_adapters(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [each.id for each in listed] == ["base", *ADAPTERS]
    parents = [(each.model_extra or {})["parent"] for each in listed]
    assert parents == [None, *["base"] * len(ADAPTERS)]
    assert client.models.retrieve("a9").id == "a9"


def test_errors_map_to_the_clients_exceptions(client: openai.OpenAI, server: Live) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="a99", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a99")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="a0", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_two_hundred_streams_over_sixteen_adapters_on_four_slots(server: Live, reference: Engine) -> None:
    prompts = {name: [*range(at, at + 5 + at % 7)] for at, name in enumerate(ADAPTERS)}
    done = reference.generate(list(prompts.values()), list(prompts), max_tokens=16)
    expected = {name: list(answer.token_ids) for name, answer in zip(prompts, done, strict=True)}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(ADAPTERS)

    async def stream(client: openai.AsyncOpenAI, name: str) -> tuple[str, list[int]]:
        tokens: list[int] = []
        async for chunk in await client.completions.create(
            model=name,
            prompt=prompts[name],
            max_tokens=16,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True},
        ):
            tokens += (chunk.choices[0].model_extra or {}).get("token_ids", [])
        return name, tokens

    async def all_at_once() -> list[tuple[str, list[int]]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            names = list(ADAPTERS)
            return await asyncio.gather(*(stream(client, names[i % 16]) for i in range(200)))

    answers = asyncio.run(all_at_once())
    assert len(answers) == 200
    assert [name for name, tokens in answers if tokens != expected[name]] == []


def test_choices_differ_by_their_seeds_and_count_the_prompt_once(client: openai.OpenAI) -> None:
    def asked(seed: int, n: int) -> dict[str, object]:
        return {
            "model": "a0",
            "prompt": [[1, 2, 3], [4, 5]],
            "max_tokens": 20,
            "temperature": 1.5,
            "seed": seed,
            "n": n,
        }

    whole = client.completions.create(**asked(5, 2))  # type: ignore[call-overload]
    texts = [choice.text for choice in whole.choices]
    single = [
        [choice.text for choice in client.completions.create(**asked(seed, 1)).choices]  # type: ignore[call-overload]
        for seed in (5, 6)
    ]
    assert texts == [single[0][0], single[1][0], single[0][1], single[1][1]]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 80)
    streamed = [""] * 4
    for chunk in client.completions.create(**asked(5, 2), stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    chat = client.chat.completions.create(model="a0", messages=MESSAGES, max_tokens=5, n=3, seed=1)
    assert len({choice.message.content for choice in chat.choices}) == 3


@pytest.mark.parametrize("prompt", ["Dear Sir", [10, 20, 30, 40], [7]])
@pytest.mark.parametrize("chunk", [2048, 5], ids=["whole", "chunked"])
def test_an_echo_has_the_log_probabilities_of_teacher_forcing(prompt: str | list[int], chunk: int) -> None:
    """The log-probability of each token of a prompt is that of a request that ends before it."""
    with live({"a": 8}, {"max_num_batched_tokens": chunk, "max_num_seqs": 4}) as server:
        connected = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        with connected as client:
            asked = {"model": "a", "max_tokens": 2, "temperature": 0, "logprobs": 20, "echo": True}
            whole = client.completions.create(prompt=prompt, **asked).choices[0]
            parts = [
                chunk.choices[0] for chunk in client.completions.create(prompt=prompt, stream=True, **asked)
            ]
            tokens = list(prompt.encode()) if isinstance(prompt, str) else prompt
            text = prompt if isinstance(prompt, str) else bytes(prompt).decode()
            assert whole.text.startswith(text)
            assert "".join(part.text for part in parts) == whole.text
            found = whole.logprobs
            assert found is not None
            assert [
                value for part in parts if part.logprobs for value in part.logprobs.token_logprobs or ()
            ] == (found.token_logprobs)
            assert found.token_logprobs is not None
            assert found.top_logprobs is not None
            assert found.token_logprobs[0] is None
            assert found.top_logprobs[0] is None
            assert len(found.token_logprobs) == len(found.tokens or ()) == len(tokens) + 2
        server.check_idle()
    with Engine(TINY, {"a": 8}, **SIZES) as engine:
        for at in range(1, len(tokens)):
            [done] = engine.generate([tokens[:at]], "a", max_tokens=1, logprobs=300)
            assert done.logprobs is not None
            right = dict(done.logprobs[0].top)
            assert found.token_logprobs[at] == pytest.approx(right[tokens[at]], abs=1e-4)
            best = sorted(right.values())[-20:]
            assert max((found.top_logprobs[at] or {}).values()) == pytest.approx(best[-1], abs=1e-4)


def test_an_echo_alone_needs_no_log_probabilities(client: openai.OpenAI, reference: Engine) -> None:
    expected = answer(reference, PROMPT, "a1", 5).text
    asked = {"model": "a1", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "echo": True}
    assert client.completions.create(**asked).choices[0].text == PROMPT + expected
    chunks = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + expected


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_continuous_usage_counts_the_tokens_so_far(client: openai.OpenAI, kind: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    extra = {"return_token_ids": True}
    asked = {"model": "a2", "max_tokens": 9, "stream": True, "stream_options": options, "extra_body": extra}
    if kind == "chat":
        chunks = list(client.chat.completions.create(messages=MESSAGES, **asked))
    else:
        chunks = list(client.completions.create(prompt=[[1, 2, 3], [4]], **asked))
    counts = {0: 0, 1: 0}
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        counts[choice.index] += len((choice.model_extra or {}).get("token_ids", []))
        assert chunk.usage is not None
        assert chunk.usage.completion_tokens == counts[choice.index]
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + counts[choice.index]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == sum(counts.values())
