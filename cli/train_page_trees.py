"""The small trees in the report of a training: what their rules cost, their drawings, and their rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.cli import html
from capplan.cli.charts import Axis, Curve, line_chart
from capplan.cli.console import counted, percent
from capplan.models.surrogates.drawing import drawing
from capplan.models.surrogates.tree_rules import rules_of

if TYPE_CHECKING:
    from capplan.models.learning.train import Trained
    from capplan.models.surrogates.tree import Tree

_ERRORS: Final = {"throughput": "SMAPE, %", "starvation": "100 × (1 - macro-F1), %"}


def front_section(trained: Trained) -> html.Section:
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
    return html.section(
        "Rules against error",
        html.charts(*charts),
        intro="The best small tree of every number of rules, judged on scenarios that it did not grow on; "
        f"one is chosen by error and a penalty for each rule. What trees grew from, {'; '.join(told)}.",
    )


def tree_section(trained: Trained) -> html.Section:
    """Return the trees as drawings and as rules."""
    parts: list[html.Html] = []
    for task, tree in _small_trees(trained).items():
        title = f"{task}: {counted(tree.rules, 'rule')}, at most {counted(tree.depth, 'question')} deep"
        rows = [(percent(rule.share), rule.text) for rule in rules_of(tree)]
        rules = html.table(("covers", "rule"), rows, numbers_from=None)
        parts.append(html.Html(f'<div class="scroll">{drawing([(title, tree)])}</div>'))
        parts.append(html.folded(f"The rules of {task}, those that cover most scenarios first", rules))
    return html.section(
        "The small trees",
        *parts,
        intro="Read from the left: where the answer to a question is yes, the upper branch. A leaf tells "
        "what follows, and the share of the training scenarios that it covers.",
    )


def _small_trees(trained: Trained) -> dict[str, Tree]:
    small = trained.surrogates["tree"]
    trees = {"throughput": small.throughput_tree, "starvation": small.starvation_tree}
    return {task: tree for task, tree in trees.items() if tree is not None}
