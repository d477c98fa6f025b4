import ast

import numba
import numpy as np
import pytest
from hypothesis import given, settings

from capplan.models.surrogates import FEATURES, LOG_OVER_EXPECTED, Tree, export_python
from capplan.models.surrogates._tree import compile_tree
from tests.models.surrogates.trees import LEAF, around, trees

ALLOWED = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Expr, ast.Constant, ast.If, ast.Return),
    *(ast.Compare, ast.LtE, ast.Subscript, ast.Name, ast.Load, ast.UnaryOp, ast.USub),
)


@given(trees())
def test_the_source_answers_as_the_tree_and_does_nothing_else(tree: Tree) -> None:
    source = export_python(tree)
    assert all(isinstance(node, ALLOWED) for node in ast.walk(ast.parse(source)))
    namespace: dict[str, object] = {"__builtins__": {}}
    exec(source, namespace)
    answer = namespace["answer"]
    assert callable(answer)
    rows = around(tree)
    assert [answer(row) for row in rows] == tree.predict(rows).tolist()
    assert source.count("return ") == tree.rules
    assert all(FEATURES[feature] in source for feature in tree.feature if feature != LEAF)


@settings(deadline=None, max_examples=12)
@given(trees())
def test_the_compiled_function_answers_as_the_tree(tree: Tree) -> None:
    compiled = compile_tree(tree)
    rows = around(tree)
    assert [compiled(row) for row in rows] == tree.predict(rows).tolist()


def test_the_compiled_function_can_be_called_from_compiled_code() -> None:
    compiled = compile_tree(
        Tree(
            LOG_OVER_EXPECTED,
            (3, LEAF, LEAF),
            (8.0, 0, 0),
            (1, LEAF, LEAF),
            (2, LEAF, LEAF),
            (0.0, 1.0, 2.0),
            (1.0, 0.5, 0.5),
        )
    )

    @numba.njit
    def total(rows: np.ndarray) -> float:
        result = 0.0
        for i in range(rows.shape[0]):
            result += compiled(rows[i])
        return result

    rows = np.zeros((10, len(FEATURES)), np.float32)
    rows[:4, 3] = 9.0
    assert total(rows) == 4 * 2.0 + 6 * 1.0


@pytest.mark.parametrize("name", ["", "a b", "answer(x):\n    pass\ndef evil", "Answer", "1st"])
def test_a_name_that_is_not_plain_is_refused(name: str) -> None:
    tree = Tree(LOG_OVER_EXPECTED, (LEAF,), (0.0,), (LEAF,), (LEAF,), (1.0,), (1.0,))
    with pytest.raises(ValueError, match="plain name"):
        export_python(tree, name)
