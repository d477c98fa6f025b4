"""The report of `capplan validate`: one HTML page that works offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.cli import html
from capplan.cli.validate_tables import HEAD, heading, rows_of, verdict
from capplan.models.calibration.least_squares import SMAPE_FORMULA

if TYPE_CHECKING:
    from capplan.profiling.validation.compare import GroupValidation
    from capplan.profiling.validation.validate import Validation

_MEANINGS: Final = {
    "measured": "by the load generator, from the requests that completed within the time",
    "predicted": "by the digital twin, for the same requests with the same lengths at the same times",
    "SMAPE": f"{SMAPE_FORMULA}; p predicted, a measured",
    "constant step": "baseline: the twin with one time for all steps, its mean step at the plan's rates",
    "offered load": "baseline: everything that is asked for is served; knows no latency",
    "itl_ms_mean": "mean time between two tokens of a request, every gap counting alike",
    "kv_tokens_mean": "KV tokens in use while requests run, whole blocks, by the server's metrics",
    "starved": "served_fraction below 0.9",
}


def validation_page(plan: str, found: Validation) -> str:
    """Return the report.

    Parameters
    ----------
    plan
        Name of the plan's file.
    found
        The validation.
    """
    mark = html.good("agrees") if found.agrees else html.bad("disagrees")
    summary = html.section("Verdict", html.table(("plan", "twin and engines"), [(plan, mark)]))
    words = html.section("What the words mean", html.definitions(_MEANINGS))
    return html.page("Plan and measurement", summary, *map(_section, found.groups), words, subtitle=plan)


def _section(group: GroupValidation) -> html.Section:
    rows = html.table(HEAD, rows_of(group), numbers_from=1)
    return html.section(heading(group), rows, html.paragraph(verdict(group)))
