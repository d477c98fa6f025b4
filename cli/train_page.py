"""The report of a training: one HTML page that works offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from capplan.cli import html
from capplan.cli.bar_rows import bar_rows
from capplan.cli.charts import Axis, Curve, scatter_chart
from capplan.cli.console import DASH, counted, number, percent
from capplan.cli.train_page_trees import front_section, tree_section
from capplan.models.surrogates.features import HORIZON_S
from capplan.models.surrogates.uncertainty import COVERAGE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from capplan.models.learning.manifest import Manifest
    from capplan.models.learning.train import Trained
    from capplan.spec import Profile

_MOST_FEATURES: Final = 15

_MEASURES: Final = {"throughput": "SMAPE, %", "starvation": "macro-F1"}

_KINDS: Final = {
    "best": "what did best, of what compiled code can answer",
    "forest": "random forests, as the paper's",
    "tree": "one small tree each",
}

_MEANINGS: Final = {
    "throughput": "input and output tokens of completed requests per second",
    "starved": "fewer than 90 % of the requests were served within the horizon",
    "SMAPE": "{formula}; p answered, a simulated by the twin",
    "macro-F1": "mean of the F1 scores of starved and not starved; 1 is without a mistake",
    "near the edge": "the load is within 20 % of the capacity that the fluid estimate gives",
    "rules": "leaves of trees, each a rule: conditions and what follows",
    "interval": "the range that 90 % of the twin's answers fall into, as wide as the regime is hard",
    "reliability": "of scenarios that a surrogate gives some probability of starvation, how many starve; "
    "on the diagonal, probabilities are true",
    "importance": "share of the questions that trees ask of a feature; one at depth d weighs 1 / 2^d",
    "expected": "the offered load in tok/s, as far as the fluid estimate lets it through",
}


def training_page(
    profile: Profile, data: Sequence[Manifest], trained: Trained, sizes: Mapping[str, int]
) -> str:
    """Return the report.

    Parameters
    ----------
    profile
        Whose surrogates were trained.
    data
        What the datasets that were learned from say of themselves.
    trained
        What training gave.
    sizes
        Bytes of the file of each kind.
    """
    report = trained.report
    engine = f"{profile.engine.name} {profile.engine.version}"
    subtitle = f"{profile.model.name} on {profile.gpu.name}, {engine}; judged on {report['judged_on']}"
    meanings = {term: text.replace("{formula}", report["error_formula"]) for term, text in _MEANINGS.items()}
    return html.page(
        f"Surrogates of {profile.name}",
        _data_section(data, report),
        _kind_section(trained, sizes),
        _model_section(report),
        _importance_section(report),
        _certainty_section(report),
        front_section(trained),
        tree_section(trained),
        html.section("What the words mean", html.definitions(meanings)),
        subtitle=subtitle,
    )


def _data_section(data: Sequence[Manifest], report: Mapping[str, Any]) -> html.Section:
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
    parts = [html.table(head, rows)]
    if any(each.asked.duration_s != HORIZON_S for each in data):
        short = f"Not all were simulated for {HORIZON_S:,.0f} s, which is what surrogates answer about."
        parts.insert(0, html.paragraph(html.bad(short)))
    total = sum(report["scenarios"].values())
    intro = (
        f"{counted(total, 'scenario')} of one GPU, each answered by the digital twin; "
        f"{percent(report['starved_share'])} starve some of their requests. "
        f"The search: {_search(report['options'])}."
    )
    return html.section("What was learned from", *parts, intro=intro)


def _kind_section(trained: Trained, sizes: Mapping[str, int]) -> html.Section:
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
    return html.section(
        "What answers",
        html.table(head, rows),
        html.charts(
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
        html.table(
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
        intro=f"Three surrogates are written. The best answers throughput by {chosen['throughput']} and "
        f"starvation by {chosen['starvation']}. Figures are of scenarios that the answering model had not "
        "learned from.",
    )


def _model_section(report: Mapping[str, Any]) -> html.Section:
    parts: list[html.Html] = []
    for task, measure in _MEASURES.items():
        models = [each for each in report["models"] if each["task"] == task]
        regimes = list(dict.fromkeys(name for each in models for name in each["scores"]))
        digits = 2 if task == "throughput" else 3
        rows = [
            (
                html.good(f"{each['name']}, chosen")
                if each["name"] == report["chosen"][task]
                else each["name"],
                *(number(each["scores"].get(name), digits) for name in regimes),
            )
            for each in models
        ]
        parts.append(html.heading(f"{task}: {measure}"))
        parts.append(html.table(("model", *regimes), rows))
    settings = [(each["name"], each["task"], _settings(each["params"])) for each in report["models"]]
    found = html.table(("model", "task", "settings"), settings, numbers_from=None)
    return html.section(
        "Models compared",
        *parts,
        html.folded("What the search chose", found),
        intro="The best of each family, by regime. The best in the mean over designs is chosen; nearest "
        "neighbours and support vector machines are shown beside, since no compiled code answers them.",
    )


def _importance_section(report: Mapping[str, Any]) -> html.Section:
    charts = []
    for task, shares in report["importance"].items():
        first = dict(list(shares.items())[:_MOST_FEATURES])
        bars = {"": [100.0 * share for share in first.values()]}
        note = f"{report['chosen'][task]}; the first {len(first)} of {len(shares)} features"
        charts.append(bar_rows(task.capitalize(), list(first), bars, Axis("importance, %"), note=note))
    return html.section(
        "Which features matter",
        html.charts(*charts),
        intro="What the trees of the best model ask. Their answers are relative to the fluid estimate, so a "
        "feature counts here for what it says beyond that. Features have their units in their names.",
    )


def _certainty_section(report: Mapping[str, Any]) -> html.Section:
    kinds = report["kinds"]
    curves = [
        Curve(kind, [row[0] for row in each["reliability"]], [row[1] for row in each["reliability"]])
        for kind, each in kinds.items()
    ]
    axes = (Axis("probability of starvation, as answered", low=0.0, high=1.0),)
    reliable = scatter_chart(
        "Reliability",
        curves,
        *axes,
        Axis("share that starved", low=0.0, high=1.0),
        diagonal=True,
        note="by tenths of probability",
    )
    regimes = list(next(iter(kinds.values()))["interval_coverage"])
    covered = {
        kind: [100.0 * share for share in _along(each["interval_coverage"], regimes)]
        for kind, each in kinds.items()
    }
    bounds = {f"{100 * COVERAGE:.0f} % aimed at": 100.0 * COVERAGE}
    axis = Axis("inside the interval, %", low=0.0, high=100.0)
    tenths = [
        (kind, number(answered, 3), number(starved, 3), f"{count:,.0f}")
        for kind, each in kinds.items()
        for answered, starved, count in each["reliability"]
    ]
    return html.section(
        "How sure they are",
        html.charts(reliable, bar_rows("Intervals of throughput", regimes, covered, axis, bounds=bounds)),
        html.folded(
            "Scenarios by tenths of probability",
            html.table(("surrogate", "answered", "share that starved", "scenarios"), tenths),
        ),
        intro="Probabilities of starvation are calibrated, and intervals around throughput conformal, both "
        "on the answers that the figures above are of.",
    )


def _along(scores: Mapping[str, float], names: Sequence[str]) -> list[float]:
    return [scores.get(name, float("nan")) for name in names]


def _search(options: Mapping[str, Any]) -> str:
    tried = f"{counted(options['budget'], 'setting')} of each family and task"
    if options["paper_space"]:
        tried = f"the paper's whole grids, and {tried} that has none"
    return f"{tried}, seed {options['seed']}"


def _settings(values: Mapping[str, Any]) -> str:
    shown = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in values.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or DASH
