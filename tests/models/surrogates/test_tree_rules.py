import numpy as np
import pytest
from hypothesis import given

from capplan.models.surrogates import FEATURES, LOG_OVER_EXPECTED, Tree, decision_rules
from capplan.models.surrogates._tree import PROBABILITY, output_text
from tests.models.surrogates.trees import LEAF, around, trees


@given(trees())
def test_exactly_one_rule_holds_and_predicts_as_the_tree(tree: Tree) -> None:
    rules = decision_rules(tree)
    assert len(rules) == tree.rules
    for row, answer in zip(around(tree), tree.predict(around(tree)), strict=True):
        holding = [
            rule
            for rule in rules
            if all(c.low < row[FEATURES.index(c.feature)] <= c.high for c in rule.conditions)
        ]
        assert [rule.value for rule in holding] == [answer]


@given(trees())
def test_rules_come_by_what_they_cover_and_ask_each_feature_once(tree: Tree) -> None:
    rules = decision_rules(tree)
    assert [rule.share for rule in rules] == sorted((rule.share for rule in rules), reverse=True)
    assert sum(rule.share for rule in rules) == pytest.approx(1.0)
    for rule in rules:
        features = [condition.feature for condition in rule.conditions]
        assert len(features) == len(set(features))
        assert "\n" not in rule.text


def test_a_rule_reads_as_a_sentence() -> None:
    at = FEATURES.index("adapters")
    tree = Tree(
        LOG_OVER_EXPECTED,
        (at, LEAF, at, LEAF, LEAF),
        (8.5, 0.0, 384.0, 0.0, 0.0),
        (1, LEAF, 3, LEAF, LEAF),
        (2, LEAF, 4, LEAF, LEAF),
        (0.0, 0.0, 0.0, float(np.log(0.97)), -1.0),
        (1.0, 0.2, 0.8, 0.7, 0.1),
    )
    assert [rule.text for rule in decision_rules(tree)] == [
        "if 8.5 < adapters <= 384 then throughput = 0.97 x expected",
        "if adapters <= 8.5 then throughput = 1 x expected",
        "if adapters > 384 then throughput = 0.368 x expected",
    ]


def test_outputs_carry_their_units() -> None:
    assert output_text(PROBABILITY, 0.5) == "starved (probability 0.50)"
    assert output_text(PROBABILITY, 0.49) == "not starved (probability 0.49)"
