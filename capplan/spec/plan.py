"""The plan document: what runs where, why, and what it is predicted to achieve."""

from __future__ import annotations

import json
import math
import os
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, Strict, model_validator

from capplan.errors import InputError
from capplan.spec.base import Key, SpecModel, broken, check_unique, checked, dotted
from capplan.spec.files import read_text, write_text_atomic
from capplan.spec.plan_parts import Group, Move, PlanEngine, Totals, Verification
from capplan.spec.settings import Objective, Slo
from capplan.spec.types import Text, rule
from capplan.spec.yaml_source import parse_yaml

_SHARE_TOLERANCE = 1e-6
Sha256 = Annotated[str, Strict(), Field(pattern="^[0-9a-f]{64}$"), rule("must be a SHA-256 in hexadecimal")]


class Plan(SpecModel):
    """A serving plan. Routing is the shares: there is no second table."""

    schema_version: Literal[1] = Field(1, description="Version of this format.")
    created_by: Text = Field(description="Program and version that made the plan.")
    base_model: Text = Field(description="Hugging Face id of the base model.")
    engine: PlanEngine = Field(description="Serving engine the plan is made for.")
    objective: Objective = Field(description="What the plan optimises.")
    slo: Slo = Field(Slo(), description="Objectives the plan was verified against.")
    workload_digest: Sha256 = Field(description="Digest of the workload the plan is for.")
    groups: tuple[Group, ...] = Field(min_length=1, description="Groups of identical instances.")
    totals: Totals = Field(description="Size and price.")
    moves: tuple[Move, ...] = Field((), description="Changes from the plan in force.")
    provenance: dict[str, JsonValue] = Field({}, description="Where the numbers and the plan come from.")
    verification: Verification = Field(description="Verdict of the twin.")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        ids = check_unique("groups", (group.id for group in self.groups), field="id")
        for index, verdict in enumerate(self.verification.groups):
            if verdict.id not in ids:
                raise broken("must be a group", key=("verification", "groups", index, "id"), value=verdict.id)
        gpus = sum(group.replicas * group.tp for group in self.groups)
        if gpus != self.totals.gpus:
            raise broken(
                f"must equal the sum over groups, {gpus}", key=("totals", "gpus"), value=self.totals.gpus
            )
        self._check_adapters()
        return self

    def _check_adapters(self) -> None:
        shares: dict[str, list[float]] = {}
        common: dict[str, tuple[int, float]] = {}
        for i, group in enumerate(self.groups):
            for j, adapter in enumerate(group.adapters):
                shares.setdefault(adapter.name, []).append(adapter.share)
                facts = (adapter.rank, adapter.rate_rps)
                if common.setdefault(adapter.name, facts) != facts:
                    at = ("groups", i, "adapters", j)
                    raise broken(
                        "must have the rank and rate of its other entries", key=at, value=adapter.name
                    )
        for name, parts in shares.items():
            total = math.fsum(parts)
            if abs(total - 1) > _SHARE_TOLERANCE:
                raise broken(
                    f"shares of adapter {name!r} must sum to 1 over groups", key=("groups",), value=total
                )

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the plan as JSON text, and write it to ``path`` if given: all of it or nothing.

        Raises
        ------
        InputError
            When the file cannot be written.
        """
        text = json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if path is not None:
            write_text_atomic(path, text)
        return text

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises
        ------
        InputError
            For the first broken rule, as ``FILE:LINE: key: rule (got VALUE)``.
        """
        name = os.fspath(path)
        text = read_text(path)
        return checked(cls, parse_json(text, name), lambda key: _locate(text, name, key))


def parse_json(text: str, name: str) -> Any:
    """Parse JSON, strictly: no duplicate keys, no NaN; ``name`` is the file's name in errors.

    Raises
    ------
    InputError
        For the first fault, with its line where the parser knows it.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise InputError("duplicate key", key, name)
        return dict(pairs)

    def no_constant(constant: str) -> Any:
        raise InputError("must hold finite numbers only", constant, name)

    try:
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"must be JSON: {error.msg}", location=f"{name}:{error.lineno}") from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("must be JSON without deep nesting or endless numbers", location=name) from None


def _locate(text: str, name: str, key: Key) -> str:
    """Return the place of a key in JSON text, which a YAML parser reads too, with line numbers."""
    try:
        return parse_yaml(text, name).locate(key)
    except InputError:  # a corner where YAML is not a superset of JSON: the key alone must do
        return f"{name}: {dotted(key)}"
