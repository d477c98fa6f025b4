"""The report of a training: one HTML page that works offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from capplan.models.calibration import SMAPE_FORMULA
from capplan.models.surrogates import COVERAGE, HORIZON_S, decision_rules, export_svg
from capplan.reports._console import DASH, Cell, Table, counted, number, percent
from capplan.reports.pages import _page as page
from capplan.reports.pages._figures import Axis, Curve, bar_rows, line_chart, scatter_chart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from capplan.models.training import Manifest, Trained
    from capplan.spec import Profile

_MOST_FEATURES: Final = 15

_MEASURES: Final = {"throughput": "SMAPE, %", "starvation": "macro-F1"}

_KINDS: Final = {
    "best": "the best models that compile",
    "forest": "random forests, as in the paper",
    "tree": "one small tree each",
}

_TERMS: Final = {
    "throughput": "input and output tokens of completed requests per second",
    "starved": "fewer than 90 % of the requests were served within the horizon",
    "SMAPE": f"{SMAPE_FORMULA}; p predicted by the surrogate, a simulated by the twin",
    "macro-F1": "mean of the F1 scores of starved and not starved; 1 is the best",
    "near the edge": "load within 20 % of the capacity by the fluid model",
    "rules": "leaves of trees, each a rule: conditions and their prediction",
    "interval": "range that holds 90 % of the twin's results, calibrated by regime",
    "reliability": "share of starved scenarios by predicted probability; calibrated on the diagonal",
    "importance": "share of the splits on a feature; a split at depth d weighs 1 / 2^d",
    "expected": "offered load in tok/s, up to the capacity by the fluid model",
}


def training_page(
    profile: Profile, data: Sequence[Manifest], trained: Trained, sizes: Mapping[str, int]
) -> str:
    """Return the report.

    Parameters
    ----------
    profile
        Profile of the surrogates.
    data
        Manifests of the training datasets.
    trained
        Result of the training.
    sizes
        Bytes of the file of each kind.
    """
    report = trained.report
    engine = f"{profile.engine.name} {profile.engine.version}"
    subtitle = f"{profile.model.name} on {profile.gpu.name}, {engine}; evaluated on {report['judged_on']}"
    return page.page(
        f"Surrogates of {profile.name}",
        _data_section(data, report),
        _kind_section(trained, sizes),
        _model_section(report),
        _importance_section(report),
        _certainty_section(report),
        _front_section(trained),
        _tree_section(trained),
        subtitle=subtitle,
        cards=_cards(report),
        terms=_TERMS,
    )


def _cards(report: Mapping[str, Any]) -> list[page.Card]:
    best = report["kinds"]["best"]
    chosen = report["chosen"]
    scenarios = counted(sum(report["scenarios"].values()), "scenario")
    coverage = percent(best["interval_coverage"]["all"])
    return [
        page.Card(
            "Throughput SMAPE", f"{number(best['throughput_smape']['all'], 2)} %", chosen["throughput"]
        ),
        page.Card("Starvation macro-F1", number(best["starvation_macro_f1"]["all"], 3), chosen["starvation"]),
        page.Card("Inside the interval", coverage, f"{100 * COVERAGE:.0f} % expected"),
        page.Card("Evaluated on", scenarios, report["judged_on"]),
    ]


def _data_section(data: Sequence[Manifest], report: Mapping[str, Any]) -> page.Section:
    rows = []
    for each in data:
        asked, answered = each.asked, each.answered
        counts: tuple[str, ...] = (DASH,) * 3
        if answered is not None:
            left_out = (answered.refused_for_memory, answered.without_requests)
            counts = (f"{answered.rows:,}", *(f"{count:,}" for count in left_out))
        duration = f"{asked.duration_s:,g}"
        rows.append((asked.design, f"{asked.scenarios:,}", *counts, str(asked.seed), duration))
    head = ("design", "drawn", "learned from", "no memory", "no request", "seed", "simulated, s")
    parts: list[page.Block | Table] = [Table(head, rows)]
    if any(each.asked.duration_s != HORIZON_S for each in data):
        short = f"Not all were simulated for {HORIZON_S:,.0f} s, the horizon of surrogates."
        parts.insert(0, page.paragraph(page.bad(short)))
    total, options = sum(report["scenarios"].values()), report["options"]
    intro = (
        f"{counted(total, 'scenario')} of one GPU, each simulated by the digital twin; "
        f"{percent(report['starved_share'])} starve some of their requests. "
        f"Search: {counted(options['budget'], 'setting')} of each family and task, seed {options['seed']}."
    )
    return page.section("Training data", *parts, intro=intro)


def _kind_section(trained: Trained, sizes: Mapping[str, int]) -> page.Section:
    report = trained.report
    kinds = report["kinds"]
    rows = [
        (
            f"{kind}: {_KINDS.get(kind, '')}",
            number(each["throughput_smape"]["all"], 2),
            number(each["starvation_macro_f1"]["all"], 3),
            percent(each["interval_coverage"]["all"]),
            " and ".join(f"{count:,}" for count in each["rules"]),
            f"{sizes[kind]:,}",
        )
        for kind, each in kinds.items()
    ]
    head = ("surrogate", "throughput SMAPE, %", "starvation macro-F1", "in interval", "rules", "bytes")
    regimes = list(next(iter(kinds.values()))["throughput_smape"])
    classed = [
        name for name in regimes if any(name in each["starvation_macro_f1"] for each in kinds.values())
    ]
    errors = {kind: _along(each["throughput_smape"], regimes) for kind, each in kinds.items()}
    scores = {kind: _along(each["starvation_macro_f1"], classed) for kind, each in kinds.items()}
    chosen = report["chosen"]
    return page.section(
        "Surrogates",
        Table(head, rows),
        page.charts(
            bar_rows(
                "Error of throughput by regime", regimes, errors, Axis("SMAPE, %"), note="less is better"
            ),
            bar_rows(
                "Score of starvation by regime",
                classed,
                scores,
                Axis("macro-F1", low=0.0, high=1.0),
                note="1 is best; regimes with both classes",
            ),
        ),
        Table(
            ("regime", *(f"{kind}: SMAPE, %" for kind in kinds), *(f"{kind}: macro-F1" for kind in kinds)),
            [
                (
                    name,
                    *(number(each["throughput_smape"].get(name), 2) for each in kinds.values()),
                    *(number(each["starvation_macro_f1"].get(name), 3) for each in kinds.values()),
                )
                for name in regimes
            ],
        ),
        intro=f"Three surrogates are written. The best one predicts throughput by {chosen['throughput']} and "
        f"starvation by {chosen['starvation']}. Scores are of scenarios left out of its training.",
    )


def _model_section(report: Mapping[str, Any]) -> page.Section:
    parts: list[page.Block | Table] = []
    for task, measure in _MEASURES.items():
        models = [each for each in report["models"] if each["task"] == task]
        regimes = list(dict.fromkeys(name for each in models for name in each["scores"]))
        digits = 2 if task == "throughput" else 3
        rows: list[tuple[Cell, ...]] = [
            (
                page.good(f"{each['name']}, chosen")
                if each["name"] == report["chosen"][task]
                else each["name"],
                *(number(each["scores"].get(name), digits) for name in regimes),
            )
            for each in models
        ]
        parts.append(page.heading(f"{task}: {measure}"))
        parts.append(Table(("model", *regimes), rows))
    settings = [(each["name"], each["task"], _settings(each["params"])) for each in report["models"]]
    found = Table(("model", "task", "settings"), settings, numbers_from=None)
    return page.section(
        "Models compared",
        *parts,
        page.folded("Settings chosen by the search", found),
        intro="The best of each family, by regime. The best in the mean over designs is chosen.",
    )


def _importance_section(report: Mapping[str, Any]) -> page.Section:
    charts = []
    for task, shares in report["importance"].items():
        first = dict(list(shares.items())[:_MOST_FEATURES])
        bars = {"": [100.0 * share for share in first.values()]}
        note = f"{report['chosen'][task]}; the first {len(first)} of {len(shares)} features"
        charts.append(bar_rows(task.capitalize(), list(first), bars, Axis("importance, %"), note=note))
    return page.section(
        "Feature importance",
        page.charts(*charts),
        intro="Splits of the trees of the best model. They predict throughput relative to the fluid model, "
        "so importance is that beyond the fluid model. Features have their units in their names.",
    )


def _certainty_section(report: Mapping[str, Any]) -> page.Section:
    kinds = report["kinds"]
    curves = [
        Curve(kind, [row[0] for row in each["reliability"]], [row[1] for row in each["reliability"]])
        for kind, each in kinds.items()
    ]
    x, y = Axis("predicted probability", low=0.0, high=1.0), Axis("share that starved", low=0.0, high=1.0)
    note = "by tenths of the probability of starvation"
    reliable = scatter_chart("Reliability", curves, x, y, diagonal=True, note=note)
    regimes = list(next(iter(kinds.values()))["interval_coverage"])
    covered = {
        kind: [100.0 * share for share in _along(each["interval_coverage"], regimes)]
        for kind, each in kinds.items()
    }
    bounds = {f"{100 * COVERAGE:.0f} % expected": 100.0 * COVERAGE}
    axis = Axis("inside the interval, %", low=0.0, high=100.0)
    tenths = [
        (kind, number(answered, 3), number(starved, 3), f"{count:,.0f}")
        for kind, each in kinds.items()
        for answered, starved, count in each["reliability"]
    ]
    return page.section(
        "Uncertainty",
        page.charts(reliable, bar_rows("Intervals of throughput", regimes, covered, axis, bounds=bounds)),
        page.folded(
            "Scenarios by tenths of probability",
            Table(("surrogate", "predicted", "share that starved", "scenarios"), tenths),
        ),
        intro="Probabilities of starvation are calibrated and intervals of throughput conformal, both on the "
        "predictions scored above.",
    )


def _along(scores: Mapping[str, float], names: Sequence[str]) -> list[float]:
    return [scores.get(name, float("nan")) for name in names]


def _settings(values: Mapping[str, Any]) -> str:
    shown = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in values.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or DASH


_ERRORS: Final = {"throughput": "SMAPE, %", "starvation": "100 × (1 - macro-F1), %"}


def _front_section(trained: Trained) -> page.Section:
    charts, sources = [], []
    for task, found in trained.refined.items():
        points = trained.report["front"][task]
        chosen = found.chosen
        curves = [
            Curve("best by number of rules", [p[0] for p in points], [p[1] for p in points], marked=True),
            Curve(f"chosen: {counted(chosen.rules, 'rule')}", [chosen.rules], [chosen.error], marked=True),
        ]
        y = Axis(_ERRORS[task])
        charts.append(line_chart(task.capitalize(), curves, Axis("decision rules", low=0.0), y))
        sources.append(f"{task} from the labels of the {found.recipe}")
    return page.section(
        "Rules against error",
        page.charts(*charts),
        intro="The best small tree of every number of rules, by its error on left-out scenarios; one is "
        f"chosen by error and a penalty for each rule. Trees are grown: {'; '.join(sources)}.",
    )


def _tree_section(trained: Trained) -> page.Section:
    parts: list[page.Block] = []
    small = trained.surrogates["tree"]
    for task, tree in (("throughput", small.throughput_tree), ("starvation", small.starvation_tree)):
        if tree is None:
            continue
        title = f"{task}: {counted(tree.rules, 'rule')}, at most {counted(tree.depth, 'question')} deep"
        rows = [(percent(rule.share), rule.text) for rule in decision_rules(tree)]
        rules = Table(("covers", "rule"), rows, numbers_from=None)
        parts.append(page.svg(export_svg([(title, tree)])))
        parts.append(page.folded(f"Rules of {task}, by the share of scenarios covered", rules))
    return page.section(
        "The small trees",
        *parts,
        intro="Read from the left: the upper branch if the condition holds. A leaf shows the prediction and "
        "the share of the training scenarios that it covers.",
    )
