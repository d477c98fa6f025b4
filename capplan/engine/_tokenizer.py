"""Tokenizers: the model's ``tokenizer.json``, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as HfTokenizer

from capplan.errors import InputError
from capplan.spec import read_text

_OTHER_FORMS: Final = ("tokenizer.model", "vocab.json", "tekken.json")


class ByteTokenizer:
    """One token per byte of UTF-8; tokens above 255 have no text."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text."""
        if self._vocab_size < 256:
            rule = "must be token ids: the model has no tokenizer, and too small a vocabulary for bytes"
            raise InputError(rule, text, "prompt")
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A model's ``tokenizer.json``; `special` of `encode` adds the special tokens of the model."""

    def __init__(self, file: Path) -> None:
        text = read_text(file)
        try:
            self._tokenizer = HfTokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception
            raise InputError(f"cannot be read: {error}", location=str(file)) from None
        # The file may contain truncation and padding of a training run.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


class UnreadableTokenizer(ByteTokenizer):
    """Placeholder for an unsupported format: prompts must be token ids, and completions have no text."""

    def __init__(self, vocab_size: int, file: Path) -> None:
        super().__init__(vocab_size)
        self._file = file

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text."""
        rule = f"must be token ids: beside {self._file.name} there is no tokenizer.json in the model's folder"
        raise InputError(rule, location="prompt")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return ""


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(folder: Path | None, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a model's folder, or bytes if it has none."""
    if folder is None:
        return ByteTokenizer(vocab_size)
    if (folder / "tokenizer.json").is_file():
        return FileTokenizer(folder / "tokenizer.json")
    for name in _OTHER_FORMS:
        if (folder / name).is_file():
            return UnreadableTokenizer(vocab_size, folder / name)
    return ByteTokenizer(vocab_size)
