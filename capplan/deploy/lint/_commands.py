"""Command lines of engines, in scripts and in arguments of containers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from capplan.deploy.lint._parts import Server, served_adapters

ENGINE: Final = re.compile(
    r"\bvllm\s+serve\b|vllm\.entrypoints\.openai|sglang\.launch_server|\bsglang\s+serve\b|dynamo\.vllm"
    r"|vllm-openai:"
)
"""What a text with a command line of an engine contains."""

_COMMANDS: Final = (
    (("vllm", "serve"), "vllm"),
    (("-m", "vllm.entrypoints.openai.api_server"), "vllm"),
    (("sglang", "serve"), "sglang"),
    (("-m", "sglang.launch_server"), "sglang"),
    (("-m", "dynamo.vllm"), "dynamo"),
)
"""First words of command lines, with the program."""

_ALIASES: Final = {
    **dict.fromkeys(("-tp", "--tp", "--tp-size"), "--tensor-parallel-size"),
    **dict.fromkeys(("-pp", "--pp", "--pp-size"), "--pipeline-parallel-size"),
    **dict.fromkeys(("-dp", "--dp", "--dp-size"), "--data-parallel-size"),
}
_IMAGE: Final = re.compile(r"(?:^|/)vllm-openai(?:@|:|$)")
_TAG: Final = re.compile(r"vllm-openai:v?(\d+\.\d+(?:\.\d+)?)")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=")
_OPERATOR: Final = re.compile(r"[();<>|&]+")
_NUMBER: Final = re.compile(r"-[\d.]+")


class Command(NamedTuple):
    """A command line of an engine."""

    program: str
    arguments: Sequence[str]
    image: str = ""


def engine_command(words: Sequence[str], image: str = "") -> Command | None:
    """Return the command line of an engine in words; None if there is none.

    Parameters
    ----------
    image
        Image of the container: that of vLLM starts it.
    """
    for at in range(len(words)):
        for first, program in _COMMANDS:
            if (PurePosixPath(words[at]).name, *words[at + 1 : at + 2]) == first:
                return Command(program, words[at + 2 :], image)
        if not image and _IMAGE.search(words[at]):  # docker run
            return engine_command(words[at + 1 :], words[at])
    return Command("vllm", words, image) if _IMAGE.search(image) else None


def version_of(image: str) -> str | None:
    """Return the version of vLLM by the tag of its image."""
    found = _TAG.search(image)
    return found[1] if found else None


def flags_of(words: Iterable[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return the words before the first flag, and the values by flag."""
    flags: dict[str, tuple[str, ...]] = {}
    before: list[str] = []
    name: str | None = None
    for word in words:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            flag, equals, value = word.partition("=")
            name = _ALIASES.get(flag, flag.replace("_", "-"))
            flags[name] = (value,) if equals else ()
        elif word == "$@":
            name = None
        elif name is not None:
            flags[name] = (*flags[name], word)
        elif not flags:
            before.append(word)
    return before, flags


def model_of(before: Sequence[str], flags: dict[str, tuple[str, ...]]) -> str | None:
    """Return the model of a command line; None if it is not stated."""
    named = (*before[:1], *flags.get("--model", ()), *flags.get("--model-path", ()))
    return named[0] if named else None


def script_servers(file: str, text: str) -> Iterator[Server]:
    """Yield the servers that a text of the shell starts."""
    env: dict[str, str] = {}
    for line, words in _shell_commands(text):
        env |= dict(_assignments(words))
        command = engine_command(words)
        if command is not None:
            before, flags = flags_of(command.arguments)
            yield Server(
                file=file,
                line=line,
                text=text,
                program=command.program,
                flags=flags,
                adapters=served_adapters(flags),
                env=dict(env),
                version=version_of(command.image),
                model=model_of(before, flags),
            )


def inner_command(words: Sequence[str], image: str) -> Command | None:
    """Return the command line of an engine in the words of a container, or in a script among them."""
    for word in words:
        if ENGINE.search(word) and " " in word:
            found = (engine_command(inner) for _, inner in _shell_commands(word))
            return next((each._replace(image=image) for each in found if each is not None), None)
    return engine_command(words, image)


def _assignments(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield variables that a command sets: those before its name, or after ``export``."""
    for word in words[1:] if words[:1] == ["export"] else words:
        if not _ASSIGNMENT.match(word):
            return
        name, _, value = word.partition("=")
        yield name, value


def _shell_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the commands of a text of the shell with their lines; what is no command is skipped."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        first, parts = at, [lines[at]]
        while parts[-1].endswith("\\") and at + 1 < len(lines):
            at += 1
            parts[-1] = parts[-1][:-1]
            parts.append(lines[at])
        at += 1
        for words in _simple_commands(" ".join(parts)):
            yield first + 1, words


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of the commands of a line, between operators."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        tokens = list(lexer)
    except ValueError:  # an open quotation mark: prose, or text over several lines
        return
    for token in tokens:
        if _OPERATOR.fullmatch(token):
            yield words
            words = []
        else:
            words.append(token)
    yield words
