"""The rules of a small tree in words: "condition and condition -> output", as the paper counts them (6.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from capplan.models.surrogates.features import FEATURES
from capplan.models.surrogates.forest import LEAF
from capplan.models.surrogates.tree import LOG_OVER_EXPECTED, LOG_TOK_S, Tree

EXPECTED: Final = "expected = the offered load in tok/s, as far as a formula of the features lets it through"


@dataclass(frozen=True)
class Condition:
    """What a rule asks of one feature: above `low`, at most `high`."""

    feature: str
    low: float = -math.inf
    high: float = math.inf

    @property
    def text(self) -> str:
        """The condition in words; four figures tell apart what differs."""
        if self.low == -math.inf:
            return f"{self.feature} <= {short_figure(self.high)}"
        if self.high == math.inf:
            return f"{self.feature} > {short_figure(self.low)}"
        return f"{short_figure(self.low)} < {self.feature} <= {short_figure(self.high)}"


@dataclass(frozen=True)
class Rule:
    """One leaf of a tree.

    Attributes
    ----------
    conditions
        All must hold; at most one per feature, in the order in which the tree asks.
    answer, value
        What the leaf says, as in `Tree.answer` and `Tree.value`.
    share
        Share of the training scenarios that it covers.
    """

    conditions: tuple[Condition, ...]
    answer: str
    value: float
    share: float

    @property
    def output(self) -> str:
        """What follows, in words: ``throughput = 0.97 x expected``."""
        return output_text(self.answer, self.value)

    @property
    def text(self) -> str:
        """The whole rule on one line."""
        conditions = " and ".join(condition.text for condition in self.conditions) or "always"
        return f"if {conditions} then {self.output}"


def rules_of(tree: Tree) -> tuple[Rule, ...]:
    """Return the rules of a tree, the one that covers most training scenarios first."""
    return tuple(sorted(paths_of(tree).values(), key=lambda rule: -rule.share))


def paths_of(tree: Tree) -> dict[int, Rule]:
    """Return the rule of each leaf, by its node."""
    return dict(_walk(tree, 0, {}))


def output_text(answer: str, value: float) -> str:
    """Return in words what a leaf says."""
    if answer == LOG_OVER_EXPECTED:
        return f"throughput = {math.exp(value):.3g} x expected"
    if answer == LOG_TOK_S:
        return f"throughput = {short_figure(math.exp(value))} tok/s"
    verdict = "starved" if value >= 0.5 else "not starved"
    return f"{verdict} (probability {value:.2f})"


def _walk(tree: Tree, node: int, held: dict[str, Condition]) -> Iterator[tuple[int, Rule]]:
    if tree.feature[node] == LEAF:
        yield node, Rule(tuple(held.values()), tree.answer, tree.value[node], tree.share[node])
        return
    name, at = FEATURES[tree.feature[node]], tree.threshold[node]
    before = held.get(name, Condition(name))
    below = Condition(name, before.low, min(before.high, at))
    above = Condition(name, max(before.low, at), before.high)
    yield from _walk(tree, tree.left[node], held | {name: below})
    yield from _walk(tree, tree.right[node], held | {name: above})


def short_figure(value: float) -> str:
    """Return a number as people write it: four figures, and no exponent for those of everyday size."""
    if value == 0.0 or not 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
