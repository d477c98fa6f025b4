"""Rules and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from capplan.deploy._servers import vllm_version
from capplan.deploy.lint._parts import Part
from capplan.deploy.lint._schemas import Schemas
from capplan.spec import Plan

Level: TypeAlias = Literal["error", "warning"]

P = TypeVar("P", bound=Part)

REFERENCE: Final = "docs/reference/lint.md"


@dataclass(frozen=True)
class Context:
    """What a rule may look at beside a part: the other parts of the input, the plan in force, and schemas."""

    parts: tuple[Part, ...] = ()
    plan: Plan | None = None
    schemas: Schemas | None = None

    def of(self, kind: type[P]) -> Iterator[P]:
        """Yield the parts of a kind."""
        return (part for part in self.parts if isinstance(part, kind))

    @property
    def version(self) -> str | None:
        """Version of vLLM of the plan; None without a plan, or if its groups have several."""
        if self.plan is None:
            return None
        versions = {vllm_version(self.plan.engine_of(group)) for group in self.plan.groups}
        return versions.pop() if len(versions) == 1 else None


@dataclass(frozen=True)
class Hit:
    """A broken rule: the reason with the value, and its line if it is not that of the part."""

    reason: str
    line: int | None = None


Check: TypeAlias = Callable[[P, Context], Iterable[Hit]]


@dataclass(frozen=True)
class Rule(Generic[P]):
    """A rule.

    Parameters
    ----------
    id
        ``CAP`` and three digits; the first is that of the kind of input.
    level
        ``error``: it does not work, or not as planned. ``warning``: it works, and may not be meant.
    on
        Kind of part that `check` looks at.
    check
        Function of a part and the context that yields what is broken.
    title
        The rule in one line.
    fix
        Next step.
    reason
        Reason for the rule.
    """

    id: str
    level: Level
    on: type[P]
    check: Check[P]
    title: str
    fix: str
    reason: str

    @property
    def anchor(self) -> str:
        """Section of the documentation."""
        return f"{REFERENCE}#{self.id.lower()}"


@dataclass(frozen=True)
class Finding:
    """A broken rule in an input.

    Parameters
    ----------
    file
        Input, or a file of it.
    line
        Line in the file; None: not known.
    level, id, fix, anchor
        Those of the rule.
    reason
        In one line, with the value.
    """

    file: str
    line: int | None
    level: Level
    id: str
    reason: str
    fix: str
    anchor: str
