"""Incremental detokenization and stop strings."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from capplan.engine import ByteTokenizer, Tokenizer
from capplan.engine._tokenizer import FileTokenizer
from capplan.server._async_engine import StopChecker, new_detokenizer

SAMPLE = "Grüße aus Köln, 東京 and 🙂🙃! It is what it is; the rest is silence.\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """Byte-level BPE with few merges: characters consist of several tokens."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([SAMPLE] * 3, trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return FileTokenizer(Path(file))


def streamed(tokenizer: Tokenizer, parts: Sequence[Sequence[int]]) -> list[str]:
    stream = new_detokenizer(tokenizer)
    return [*(stream.feed(part) for part in parts), stream.finish()]


def cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    parts = []
    for size in sizes:
        parts.append(tokens[:size])
        tokens = tokens[size:]
    return [*parts, tokens]


@given(st.lists(st.integers(0, 299)), st.lists(st.integers(1, 5)))
def test_streamed_bytes_add_up_to_the_text(tokens: list[int], sizes: list[int]) -> None:
    tokenizer = ByteTokenizer(300)
    assert "".join(streamed(tokenizer, cut(tokens, sizes))) == tokenizer.decode(tokens)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_streamed_tokens_add_up_to_the_text(trained: FileTokenizer, size: int) -> None:
    tokens = trained.encode(SAMPLE * 3)
    parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    shown = streamed(trained, parts)
    assert "".join(shown) == SAMPLE * 3
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(shown)
    assert max(map(len, shown)) <= 10 * size  # text is not held back


def test_invalid_bytes_are_not_held_back_forever(trained: FileTokenizer) -> None:
    lonely = trained.encode("ü")[0]  # the first byte of two, or both
    [first] = [token for token in range(300) if trained.decode([token]) == "\N{REPLACEMENT CHARACTER}"][:1]
    shown = streamed(trained, [[first]] * 40 + [[lonely]])
    assert sum(map(bool, shown)) > 5


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str], data: st.DataObject) -> None:
    found = [text.index(stop) for stop in stops if stop in text]
    parts = cut_text(text, data.draw(st.lists(st.integers(1, 6))))
    watch, shown = StopChecker(stops), ""
    for part in parts:
        more, stop = watch.feed(part)
        shown += more
        if stop is not None:
            # The string that ends first is found first, even if another begins before it.
            assert text[: len(shown) + len(stop)].endswith(stop)
            assert all(other not in shown for other in stops)
            return
    assert not found
    assert shown + watch.finish() == text


def cut_text(text: str, sizes: Sequence[int]) -> list[str]:
    parts = []
    for size in sizes:
        parts.append(text[:size])
        text = text[size:]
    return [*parts, text]
