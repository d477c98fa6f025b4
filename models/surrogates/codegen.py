"""From a small tree to plain Python, compiled: nested comparisons that answer in tens of nanoseconds (6.1).

The source is written from the numbers of a checked `Tree` and from `FEATURES`, never from a file's text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

import numba
import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.surrogates.features import FEATURES
from capplan.models.surrogates.forest import LEAF
from capplan.models.surrogates.tree import LOG_OVER_EXPECTED, LOG_TOK_S, PROBABILITY, FlatTree, Tree

TreeFunction: TypeAlias = Callable[[NDArray[np.float32]], float]

_INDENT: Final = "    "
_MEANING: Final[Mapping[str, str]] = MappingProxyType(
    {
        LOG_OVER_EXPECTED: "the natural logarithm of throughput over the throughput that the features expect",
        LOG_TOK_S: "the natural logarithm of throughput in tokens per second",
        PROBABILITY: "the probability that requests starve",
    }
)


def python_source(tree: Tree, name: str = "answer") -> str:
    """Return a Python function of one feature vector `x`, in the order of `FEATURES`, that answers as `tree`.

    Every number is written so that it reads back as the same float; thresholds are float32, so comparing
    them with float32 features is exact in Python, NumPy and compiled code alike.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"not a plain name: {name!r}")
    head = [f"def {name}(x):", f'{_INDENT}"""Return {_MEANING[tree.answer]}; {tree.rules} rules."""']
    return "\n".join([*head, *_lines(tree, 0, 1)]) + "\n"


def compile_tree(tree: Tree) -> TreeFunction:
    """Return the compiled function of a tree: of one feature vector, float32[:], to its answer, float64.

    It can be called from Python and from compiled code.
    """
    namespace: dict[str, Any] = {"__builtins__": {}}
    code = compile(python_source(tree), f"<tree of {tree.rules} rules>", "exec")
    exec(code, namespace)  # noqa: S102 - numbers of a checked tree, and nothing that a file said
    compiled = numba.njit("float64(float32[::1])", nogil=True, error_model="numpy")(namespace["answer"])
    return cast(TreeFunction, compiled)


@jit
def flat_answer(tree: FlatTree, x: NDArray[np.float32]) -> float:
    """Return the answer of a tree to one feature vector, shape (features,); any tree, compiled once."""
    node = 0
    while tree.feature[node] >= 0:
        node = tree.left[node] if x[tree.feature[node]] <= tree.threshold[node] else tree.right[node]
    return float(tree.value[node])


def _lines(tree: Tree, node: int, depth: int) -> Iterator[str]:
    indent = _INDENT * depth
    feature = tree.feature[node]
    if feature == LEAF:
        yield f"{indent}return {float(tree.value[node])!r}"
        return
    name = re.sub(r"[^a-z0-9_]", "?", FEATURES[feature])
    yield f"{indent}if x[{int(feature)}] <= {float(tree.threshold[node])!r}:  # {name}"
    yield from _lines(tree, tree.left[node], depth + 1)
    yield f"{indent}else:  # {name} > {tree.threshold[node]:.4g}"
    yield from _lines(tree, tree.right[node], depth + 1)
