"""The errors a caller can branch on; each carries the exit status of the command line."""

from __future__ import annotations

import re
from typing import ClassVar, Final, Literal, TypeAlias

InfeasibleReason: TypeAlias = Literal["memory", "starvation", "slo", "gpus", "time"]

_VALUE_LIMIT: Final = 80  # characters of a value shown in a message
_LOCATION_LIMIT: Final = 1024  # more than any path
_RULE_LIMIT: Final = 2048  # more than any rule that holds no name of the user's
_PASSWORD_KEY: Final = re.compile(r"(?<!\w)((?:ssl)?pass(?:word|wd)?|pwd)=[^\s&;'\"]+", re.IGNORECASE)
_USER_IN_URL: Final = re.compile(r"(?:\b[a-z][\w+.-]{0,30}:/{1,2}|//)[^\s:@/]*:", re.IGNORECASE)
"""Up to the password; one slash: of a URL that was taken for a path. Bounded: a text may have a megabyte."""
_WORD: Final = re.compile(r"\S+")


class NoValue:
    """Type of :data:`NO_VALUE`; a class of its own, because ``None`` is a value a user can give."""

    def __repr__(self) -> str:
        return "NO_VALUE"


NO_VALUE: Final = NoValue()


class CapplanError(Exception):
    """Base of every error capplan raises on purpose.

    Attributes
    ----------
    exit_code : int
        Exit status of the command line when the error reaches it.
    """

    exit_code: ClassVar[int] = 1


class InputError(CapplanError, ValueError):
    """Something the user gave breaks a rule.

    ``str(error)`` is one line: ``LOCATION: RULE (got VALUE)``.

    Parameters
    ----------
    rule : str
        What must hold, such as ``"must be a finite number >= 0"``.
    value : object
        The value that breaks the rule; left out of the message when not given.
    location : str
        Where it stands: ``FILE:LINE: key``, ``FILE: key``, ``Class.field``, a flag, or empty.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, rule: str, value: object = NO_VALUE, location: str = "") -> None:
        super().__init__(rule, value, location)
        self.rule = rule
        self.value = value
        self.location = location

    def __str__(self) -> str:
        where = f"{_clipped(self.location, _LOCATION_LIMIT)}: " if self.location else ""
        got = "" if isinstance(self.value, NoValue) else f" (got {_short(self.value)})"
        return _one_line(f"{where}{_clipped(self.rule, _RULE_LIMIT)}{got}")


class InfeasibleError(CapplanError):
    """No plan can satisfy the workload on the hardware given.

    Parameters
    ----------
    message : str
        One line that says what does not fit and by how much.
    reason : {"memory", "starvation", "slo", "gpus", "time"}
        What stands in the way: memory of one GPU, requests that starve, a latency bound, too few GPUs, or a
        solver that did not end in the time it had.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, reason: InfeasibleReason) -> None:
        super().__init__(message, reason)
        self.message = message
        self.reason: InfeasibleReason = reason

    def __str__(self) -> str:
        return _one_line(_clipped(self.message, _RULE_LIMIT))


def _clipped(text: str, limit: int) -> str:
    """Return a text without its middle if it is longer: a name of the user's may be in it."""
    text = redacted(text)
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"


def _short(value: object) -> str:
    text = redacted(repr(value))
    return text if len(text) <= _VALUE_LIMIT else f"{text[: _VALUE_LIMIT - 3]}..."


def _one_line(text: str) -> str:
    return printable(redacted(" ".join(text.split())))


def redacted(text: str) -> str:
    """Return text with asterisks in place of passwords: in URLs, and behind keys such as ``password=``."""
    text = _PASSWORD_KEY.sub(r"\1=***", text)
    return _WORD.sub(_without_password, text) if "@" in text else text


def _without_password(word: re.Match[str]) -> str:
    """Return a word with asterisks for what is between the user of a URL and the last @."""
    text, end = word[0], word[0].rfind("@")
    user = _USER_IN_URL.search(text, 0, max(end, 0))
    return text if user is None else f"{text[: user.end()]}***{text[end:]}"


def printable(text: str) -> str:
    """Return text with escapes in place of characters that would control a terminal, but for line breaks."""
    if text.isprintable():
        return text
    plain = (
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )
    return "".join(plain)
