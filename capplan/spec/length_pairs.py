"""Prompt and output lengths of recorded requests, kept together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import CoreSchema, core_schema

from capplan.errors import InputError
from capplan.spec.lengths import Lengths
from capplan.spec.trace import lengths_column

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from pydantic import GetCoreSchemaHandler


@dataclass(frozen=True, eq=False)
class LengthPairs:
    """Lengths of requests, drawn jointly; the arrays are read-only. Build it with :meth:`from_arrays`.

    Attributes
    ----------
    prompt_tokens, output_tokens : ndarray of int32, shape (n,)
        Lengths in tokens.
    """

    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]

    @classmethod
    def from_arrays(cls, prompt_tokens: ArrayLike, output_tokens: ArrayLike) -> LengthPairs:
        """Check and keep two columns of equal length.

        Raises
        ------
        InputError
            Located at the column: lengths not whole numbers of at least 1 token, or no request.
        """
        import numpy as np

        if np.size(prompt_tokens) == 0:
            raise InputError("must hold at least one request", location="prompt_tokens")
        columns = (
            lengths_column("prompt_tokens", prompt_tokens),
            lengths_column("output_tokens", output_tokens),
        )
        if len(columns[0]) != len(columns[1]):
            raise InputError("columns must be equally long")
        for column in columns:
            column.setflags(write=False)
        return cls(*columns)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Documents hold the pairs as they are, and write their digest."""
        written = core_schema.plain_serializer_function_ser_schema(cls.digest, when_used="json")
        return core_schema.is_instance_schema(cls, serialization=written)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def marginals(self) -> tuple[Lengths, Lengths]:
        """Return the distribution of prompts and that of outputs, each on its own."""
        return Lengths.of(self.prompt_tokens), Lengths.of(self.output_tokens)

    def digest(self) -> str:
        """Return the SHA-256 of the contents, in hexadecimal; the same on every machine."""
        sha = hashlib.sha256(b"length pairs")
        for column in (self.prompt_tokens, self.output_tokens):
            sha.update(column.astype("<i8").tobytes())
        return sha.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LengthPairs) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash((len(self), int(self.prompt_tokens[0]), int(self.output_tokens[0])))
