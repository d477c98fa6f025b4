"""Validation shared by all documents: the frozen base model, field types, limits, one-line input errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from capplan.errors import NO_VALUE, InputError

Key: TypeAlias = tuple[str | int, ...]
"""Path of a value inside a document, such as ``("adapters", 1, "rate_rps")``."""


class SpecModel(BaseModel):
    """Frozen, no unknown keys, no NaN; construction raises :class:`~capplan.errors.InputError`.

    ``model_validate`` keeps pydantic's own error, with its structured positions, for readers of files;
    :func:`validate_document` turns it into an input error that says where in the file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            name = type(self).__name__
            raise input_error(error, lambda key: f"{name}.{format_key(key)}" if key else name) from None

    # Pydantic calls a custom __init__ for nested models too, which would hide the path of an error in them.
    # This marks ours as equivalent to the inherited one, as pydantic's own RootModel does.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    raise rule_error(unknown_key(key, cls.model_fields), key=(str(key),))
        return data

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the given fields changed, checked like a new one; unset ones stay unset."""
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**(fields | changes))


class SparseModel(SpecModel):
    """Document that leaves some keys out while they are unset, false or empty."""

    _optional_keys: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value or key not in self._optional_keys}


Model = TypeVar("Model", bound=BaseModel)


def validate_document(model: type[Model], data: object, locate: Callable[[Key], str]) -> Model:
    """Validate ``data``; ``locate`` turns the key of the first broken rule into a location.

    Raises
    ------
    InputError
        For the first broken rule.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise input_error(error, locate) from None


def input_error(error: ValidationError, locate: Callable[[Key], str]) -> InputError:
    """Translate the first error of a pydantic report."""
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    # Parts in angle brackets are tags of a union, not keys of the document.
    key = tuple(part for part in first["loc"] if not str(part).startswith("<")) + context.get("key", ())
    missing = first["type"] == "missing"
    value = NO_VALUE if missing else context.get("value", first["input"])
    if isinstance(value, Mapping | BaseModel):
        value = NO_VALUE  # too long to help
    return InputError(_broken_rule(first), value, locate(key))


def _broken_rule(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "rule":
            return detail["msg"]
        case "missing":
            return "is required"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be a mapping of keys to values"
        case "tuple_type":
            return "must be a list"
        case "too_short":
            return "must not be empty"
        case _:
            return detail["msg"].replace("Input should be", "must be").replace("a valid ", "")


def rule_error(rule: str, *, key: Key = (), value: object = NO_VALUE) -> PydanticCustomError:
    """Return the error a validator raises; ``key`` leads from the validated value to the one at fault."""
    position = {"key": key, "value": value} if key else {}
    return PydanticCustomError("rule", "{rule}", {"rule": rule, **position})


def refuse_unread(model: Model, unread: Mapping[str, str], at: Key = ()) -> Model:
    """Return the model if no key without effect is given; `unread` has the rule for each such key.

    `at` leads to the model from the one that is validated.
    """
    for key, broken in unread.items():
        if key in model.model_fields_set:
            value = getattr(model, key)
            # The first item of a mapping, which is too long to show.
            inner = next(iter(value.items()), None) if isinstance(value, Mapping) else None
            path, shown = ((key,), value) if inner is None else ((key, inner[0]), inner[1])
            raise rule_error(broken, key=(*at, *path), value=shown)
    return model


def without_keys(fields: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a document without keys, so that one that is written can be read."""
    return {key: value for key, value in fields.items() if key not in keys}


def check_unique(key: str, names: Iterable[str], field: str = "name") -> set[str]:
    """Return the names, the i-th from ``key[i].field``; raise for one that repeats."""
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise rule_error("must be unique", key=(key, index, field), value=name)
        seen.add(name)
    return seen


def unknown_key(key: object, valid: Iterable[str], likeness: float = 0.6) -> str:
    """Return the rule that an unknown key breaks, with the nearest valid one or all of them."""
    names = list(valid)
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=likeness)
    return (
        f"unknown key; did you mean {near[0]!r}?"
        if near
        else f"unknown key; valid keys are {', '.join(names)}"
    )


def unknown_name(name: object, valid: Sequence[str]) -> str:
    """Return the rule that an unknown name breaks, with the valid ones and the nearest of them."""
    near = difflib.get_close_matches(str(name), valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"must be one of {', '.join(valid)}{hint}"


def format_key(key: Key) -> str:
    """Return ``adapters[1].rate_rps`` for ``("adapters", 1, "rate_rps")``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")


MAX_TOKENS: Final = 2**24  # longest request length understood; keeps every sum of lengths far inside int64

LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values vLLM 0.32 allows for max_lora_rank


def rule(words: str) -> WrapValidator:
    """Return a validator that states ``words`` when the type or a bound is broken.

    NumPy scalars count as the Python numbers they stand for.
    """

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, Real) and not isinstance(value, int | float):
            value = int(value) if isinstance(value, Integral) else float(value)
        try:
            return handler(value)
        except ValidationError:
            raise rule_error(words) from None

    return WrapValidator(validate)


def one_of(names: Any, *aliases: str) -> WrapValidator:
    """Return a validator of a ``Literal`` whose message lists the names, and the nearest one."""
    valid = (*get_args(names), *aliases)

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise rule_error(unknown_name(value, valid)) from None

    return WrapValidator(validate)


def allowed_lora_rank(rank: int) -> int:
    """Return the smallest ``max_lora_rank`` vLLM allows that holds an adapter of ``rank``.

    Raises
    ------
    ValueError
        Unless 1 <= rank <= 512.
    """
    if not 1 <= rank <= LORA_RANKS[-1]:
        raise ValueError(f"rank must be from 1 to {LORA_RANKS[-1]}, got {rank}")
    return next(allowed for allowed in LORA_RANKS if allowed >= rank)


def _listed_rank(rank: int) -> int:
    if rank not in LORA_RANKS:
        raise ValueError(rank)
    return rank


def at_most(most: float) -> AfterValidator:
    """Return a validator of an upper bound that users do not reach; its message is of its own."""

    def validate(value: Any) -> Any:
        if value > most:
            raise rule_error(f"must be at most {most:g}")
        return value

    return AfterValidator(validate)


_MOST: Final = 1e100  # products of three numbers of a document, and sums of millions, stay finite

_MOST_WHOLE: Final = 2**53  # exact as a number of JSON, and products with 1000 fit into int64

Item = TypeVar("Item")

Many: TypeAlias = Annotated[tuple[Item, ...], Field(fail_fast=True)]
"""List with errors of its first wrong item alone: those of millions would fill the memory."""

NonNegative: TypeAlias = Annotated[
    float, Strict(), Field(ge=0), rule("must be a finite number >= 0"), at_most(_MOST)
]

Positive: TypeAlias = Annotated[
    float, Strict(), Field(gt=0), rule("must be a finite number > 0"), at_most(_MOST)
]

Share: TypeAlias = Annotated[
    float, Strict(), Field(gt=0, le=1), rule("must be a number above 0 and at most 1")
]

Fraction: TypeAlias = Annotated[float, Strict(), Field(ge=0, le=1), rule("must be a number from 0 to 1")]

Count: TypeAlias = Annotated[
    int, Strict(), Field(ge=1), rule("must be a whole number >= 1"), at_most(_MOST_WHOLE)
]

Natural: TypeAlias = Annotated[
    int, Strict(), Field(ge=0), rule("must be a whole number >= 0"), at_most(_MOST_WHOLE)
]

SeedNumber: TypeAlias = Annotated[
    int, Strict(), Field(ge=0), rule("must be a whole number >= 0"), at_most(2.0**128)
]

Rank: TypeAlias = Annotated[int, Strict(), Field(ge=1, le=512), rule("must be a whole number from 1 to 512")]

LoraRank: TypeAlias = Annotated[
    int,
    Strict(),
    Field(json_schema_extra={"enum": [*LORA_RANKS]}),
    AfterValidator(_listed_rank),
    rule(f"must be one of vLLM's ranks {', '.join(map(str, LORA_RANKS))}"),
]

Flag: TypeAlias = Annotated[bool, Strict(), rule("must be true or false")]

_CONTROL: Final = r"\x00-\x1f\x7f-\x9f"  # in a class of a pattern: characters that control a terminal
NOT_PRINTABLE: Final = "control, bidirectional or invisible characters"


def is_printable(text: str) -> bool:
    """Return whether text shows as it is written, in a terminal, a page and a script.

    It holds no control, format (bidirectional, zero-width), surrogate, private or unassigned characters, no
    separators of lines and paragraphs, and no space but the usual one.
    """
    return text.isprintable()


def _printable(text: str) -> str:
    if not is_printable(text):
        raise ValueError(text)
    return text


_Printable: Final = AfterValidator(_printable)

Line: TypeAlias = Annotated[
    str,
    Strict(),
    Field(pattern=rf"^[^{_CONTROL}]*$"),
    _Printable,
    rule(f"must be text on one line, without {NOT_PRINTABLE}"),
]

Text: TypeAlias = Annotated[
    str,
    Strict(),
    Field(min_length=1, pattern=rf"^[^{_CONTROL}]+$"),
    _Printable,
    rule(f"must be text, not empty, without {NOT_PRINTABLE}; quote a number"),
]

Sha256: TypeAlias = Annotated[
    str, Strict(), Field(pattern="^[0-9a-f]{64}$"), rule("must be a SHA-256 in hexadecimal")
]

ModelId: TypeAlias = Annotated[
    str,
    Strict(),
    Field(min_length=1, pattern=rf"^[\w/.~][^{_CONTROL}]*$"),
    _Printable,
    rule(f"must be a Hugging Face id or a path, without {NOT_PRINTABLE}"),
]
"""Never a flag: exported scripts pass it to the engine as an argument."""

Name: TypeAlias = Annotated[
    str,
    Strict(),
    Field(min_length=1, max_length=256, pattern=rf"^[^\W_][^\s=,{_CONTROL}]*$"),
    _Printable,
    rule(
        "must be a name of 1 to 256 characters that begins with a letter or digit, without spaces, '=', ',', "
        f"{NOT_PRINTABLE}; quote a number"
    ),
]
"""Never a flag: exported scripts begin arguments with it."""


MAX_SIMULATED_S: Final = 2e9  # 63 years; 2^62 nanoseconds, 146 years, stand for never in the twin
LEAST_S: Final = 1e-9  # the clock counts nanoseconds
MAX_SEEDS: Final = 1000  # the standard error of the mean over them is 3 % of the standard deviation


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """Limits of one process; each is an option of `capplan`, before the name of the command.

    Attributes
    ----------
    max_adapters : int
        Adapters of a workload file; a million takes some GiB.
    max_instances : int
        Instances of a plan.
    max_duration_s : float
        Simulated time, in seconds, up to `MAX_SIMULATED_S`; the default is a leap year.
    max_trace_rows : int
        Requests of a trace; each takes 20 bytes.
    """

    max_adapters: int = 1_000_000
    max_instances: int = 10_000
    max_duration_s: float = 366 * 86_400.0
    max_trace_rows: int = 100_000_000

    def __post_init__(self) -> None:
        for name in ("max_adapters", "max_instances", "max_trace_rows"):
            if getattr(self, name) < 1:
                raise InputError("must be a whole number >= 1", getattr(self, name), name)
        if not 0 < self.max_duration_s <= MAX_SIMULATED_S:
            rule = f"must be a number of seconds above 0, at most {MAX_SIMULATED_S:g}"
            raise InputError(rule, self.max_duration_s, "max_duration_s")


_DEFAULTS: Final = InputLimits()
_LIMITS: Final = ContextVar("input_limits", default=_DEFAULTS)


def input_limits() -> InputLimits:
    """Return the limits in force."""
    return _LIMITS.get()


@contextmanager
def limited(limits: InputLimits) -> Iterator[None]:
    """Put limits in force until the end of the block."""
    before = _LIMITS.set(limits)
    try:
        yield
    finally:
        _LIMITS.reset(before)


def beyond(most: float, what: str, flag: str) -> str:
    """Return the rule that more of something than a limit breaks, with the option that raises it."""
    return f"must be at most {most:,.15g} {what}; capplan {flag} sets another limit"


def require_seed_count(count: int, location: str) -> None:
    """Check a number of seeds.

    Raises
    ------
    InputError
        Unless it is from 1 to `MAX_SEEDS`.
    """
    if count < 1:
        raise InputError("must be >= 1", count, location)
    if count > MAX_SEEDS:
        raise InputError(f"must be at most {MAX_SEEDS}", count, location)


def require_duration(duration_s: float, location: str = "duration_s") -> None:
    """Check a simulated time, in seconds.

    Raises
    ------
    InputError
        Unless it is above 0 and within the limit.
    """
    most_s = input_limits().max_duration_s
    if not 0 < duration_s < float("inf"):
        raise InputError("must be a finite number > 0", duration_s, location)
    if duration_s < LEAST_S:
        raise InputError(f"must be at least {LEAST_S:g} seconds, the unit of the clock", duration_s, location)
    if duration_s > most_s:
        raise InputError(beyond(most_s, "seconds", "--max-duration-s"), duration_s, location)
