"""Field types with their rules in words: what a number or a text in a document may be."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Annotated, Any, Final, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    Strict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from capplan.spec.base import broken

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
            raise broken(words) from None

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


NonNegative: TypeAlias = Annotated[float, Strict(), Field(ge=0), rule("must be a finite number >= 0")]
Positive: TypeAlias = Annotated[float, Strict(), Field(gt=0), rule("must be a finite number > 0")]
Share: TypeAlias = Annotated[
    float, Strict(), Field(gt=0, le=1), rule("must be a number above 0 and at most 1")
]
Fraction: TypeAlias = Annotated[float, Strict(), Field(ge=0, le=1), rule("must be a number from 0 to 1")]
Count: TypeAlias = Annotated[int, Strict(), Field(ge=1), rule("must be a whole number >= 1")]
Natural: TypeAlias = Annotated[int, Strict(), Field(ge=0), rule("must be a whole number >= 0")]
Rank: TypeAlias = Annotated[int, Strict(), Field(ge=1, le=512), rule("must be a whole number from 1 to 512")]
LoraRank: TypeAlias = Annotated[
    int,
    Strict(),
    Field(json_schema_extra={"enum": [*LORA_RANKS]}),
    AfterValidator(_listed_rank),
    rule(f"must be one of vLLM's ranks {', '.join(map(str, LORA_RANKS))}"),
]
Flag: TypeAlias = Annotated[bool, Strict(), rule("must be true or false")]
Text: TypeAlias = Annotated[
    str, Strict(), Field(min_length=1), rule("must be text, not empty; quote a number")
]
Name: TypeAlias = Annotated[
    str,
    Strict(),
    Field(min_length=1, max_length=256, pattern=r"^[^\s=,]+$"),
    rule("must be a name of 1 to 256 characters without spaces, '=' or ','; quote a number"),
]
