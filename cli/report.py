"""`capplan report`: a plan as one HTML page."""

from __future__ import annotations

from typing import Annotated

import typer

from capplan.cli.explain import MORE, PlannedProfile, PlannedWorkload, asked_twin
from capplan.cli.inputs import PlanFile
from capplan.cli.output import require_writable_file


def report(
    plan: PlanFile,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="Write the page here: all of it or nothing."),
    ],
    workload: PlannedWorkload = None,
    profile: PlannedProfile = None,
) -> None:
    """Write a plan as one HTML page that works offline: groups, predictions, what binds, adapters.

    With the workload, also the curve of every number of slots, what is in use and what is left, and what one
    GPU fewer or more would do.
    """
    from capplan.cli.plan_page import plan_page
    from capplan.spec import Plan, write_text_atomic

    require_writable_file(output)
    document = Plan.from_json(plan)
    explanation = asked_twin(document, workload, profile)
    write_text_atomic(output, plan_page(plan, document, explanation))
    typer.echo(f"written to {output}" + ("" if explanation else f"; {MORE}"))
