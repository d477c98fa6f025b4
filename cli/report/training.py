"""The report of a training: one HTML page that works offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from capplan.cli.console import DASH, counted, number, percent
from capplan.cli.report import page
from capplan.cli.report.figures import Axis, Curve, bar_rows, line_chart, scatter_chart
from capplan.models.surrogates.features import HORIZON_S
from capplan.models.surrogates.surrogate import COVERAGE
from capplan.models.surrogates.tree_export import decision_rules, export_svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from capplan.models.surrogates.tree import Tree
    from capplan.models.training.data import Manifest
    from capplan.models.training.train import Trained
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
    return page.page(
        f"Surrogates of {profile.name}",
        _data_section(data, report),
        _kind_section(trained, sizes),
        _model_section(report),
        _importance_section(report),
        _certainty_section(report),
        front_section(trained),
        tree_section(trained),
        page.section("Definitions", page.definitions(meanings)),
        subtitle=subtitle,
        cards=_cards(report),
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
    parts = [page.table(head, rows)]
    if any(each.asked.duration_s != HORIZON_S for each in data):
        short = f"Not all were simulated for {HORIZON_S:,.0f} s, which is what surrogates answer about."
        parts.insert(0, page.paragraph(page.bad(short)))
    total = sum(report["scenarios"].values())
    intro = (
        f"{counted(total, 'scenario')} of one GPU, each answered by the digital twin; "
        f"{percent(report['starved_share'])} starve some of their requests. "
        f"The search: {_search(report['options'])}."
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
        page.table(head, rows),
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
        page.table(
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


def _model_section(report: Mapping[str, Any]) -> page.Section:
    parts: list[page.Block] = []
    for task, measure in _MEASURES.items():
        models = [each for each in report["models"] if each["task"] == task]
        regimes = list(dict.fromkeys(name for each in models for name in each["scores"]))
        digits = 2 if task == "throughput" else 3
        rows = [
            (
                page.good(f"{each['name']}, chosen")
                if each["name"] == report["chosen"][task]
                else each["name"],
                *(number(each["scores"].get(name), digits) for name in regimes),
            )
            for each in models
        ]
        parts.append(page.heading(f"{task}: {measure}"))
        parts.append(page.table(("model", *regimes), rows))
    settings = [(each["name"], each["task"], _settings(each["params"])) for each in report["models"]]
    found = page.table(("model", "task", "settings"), settings, numbers_from=None)
    return page.section(
        "Models compared",
        *parts,
        page.folded("What the search chose", found),
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
        intro="What the trees of the best model ask. Their answers are relative to the fluid estimate, so a "
        "feature counts here for what it says beyond that. Features have their units in their names.",
    )


def _certainty_section(report: Mapping[str, Any]) -> page.Section:
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
    return page.section(
        "Uncertainty",
        page.charts(reliable, bar_rows("Intervals of throughput", regimes, covered, axis, bounds=bounds)),
        page.folded(
            "Scenarios by tenths of probability",
            page.table(("surrogate", "answered", "share that starved", "scenarios"), tenths),
        ),
        intro="Probabilities of starvation are calibrated, and intervals around throughput conformal, both "
        "on the answers that the figures above are of.",
    )


def _along(scores: Mapping[str, float], names: Sequence[str]) -> list[float]:
    return [scores.get(name, float("nan")) for name in names]


def _search(options: Mapping[str, Any]) -> str:
    return f"{counted(options['budget'], 'setting')} of each family and task, seed {options['seed']}"


def _settings(values: Mapping[str, Any]) -> str:
    shown = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in values.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or DASH


_ERRORS: Final = {"throughput": "SMAPE, %", "starvation": "100 × (1 - macro-F1), %"}


def front_section(trained: Trained) -> page.Section:
    """Return what each number of rules costs."""
    charts, told = [], []
    for task, found in trained.refined.items():
        points = trained.report["front"][task]
        chosen = found.chosen
        curves = [
            Curve("no other tree beats these", [p[0] for p in points], [p[1] for p in points], marked=True),
            Curve(f"chosen: {counted(chosen.rules, 'rule')}", [chosen.rules], [chosen.error], marked=True),
        ]
        y = Axis(_ERRORS[task])
        charts.append(line_chart(task.capitalize(), curves, Axis("decision rules", low=0.0), y))
        told.append(f"{task}: from the {found.recipe}'s answers")
    return page.section(
        "Rules against error",
        page.charts(*charts),
        intro="The best small tree of every number of rules, judged on scenarios that it did not grow on; "
        f"one is chosen by error and a penalty for each rule. What trees grew from, {'; '.join(told)}.",
    )


def tree_section(trained: Trained) -> page.Section:
    """Return the trees as drawings and as rules."""
    parts: list[page.Block] = []
    for task, tree in _small_trees(trained).items():
        title = f"{task}: {counted(tree.rules, 'rule')}, at most {counted(tree.depth, 'question')} deep"
        rows = [(percent(rule.share), rule.text) for rule in decision_rules(tree)]
        rules = page.table(("covers", "rule"), rows, numbers_from=None)
        parts.append(page.svg(export_svg([(title, tree)])))
        parts.append(page.folded(f"The rules of {task}, those that cover most scenarios first", rules))
    return page.section(
        "The small trees",
        *parts,
        intro="Read from the left: where the answer to a question is yes, the upper branch. A leaf tells "
        "what follows, and the share of the training scenarios that it covers.",
    )


def _small_trees(trained: Trained) -> dict[str, Tree]:
    small = trained.surrogates["tree"]
    trees = {"throughput": small.throughput_tree, "starvation": small.starvation_tree}
    return {task: tree for task, tree in trees.items() if tree is not None}
