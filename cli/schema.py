"""`capplan schema`: the JSON Schema of a document."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from capplan.cli.console import print_json

if TYPE_CHECKING:
    from pydantic import BaseModel


class Document(StrEnum):
    """A kind of document that capplan reads or writes."""

    PLAN = "plan"
    WORKLOAD = "workload"
    PROFILE = "profile"


def schema(
    document: Annotated[Document, typer.Argument(metavar="plan|workload|profile", help="Which document.")],
) -> None:
    """Print the JSON Schema of plan.json, workload.yaml or a profile."""
    from capplan.spec import Plan, Profile, WorkloadFile

    models: dict[Document, type[BaseModel]] = {
        Document.PLAN: Plan,
        Document.WORKLOAD: WorkloadFile,
        Document.PROFILE: Profile,
    }
    print_json(models[document].model_json_schema())
