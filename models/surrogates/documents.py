"""A surrogate as a document and arrays, and back, everything checked: what files of surrogates hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.models.surrogates.features import FEATURES
from capplan.models.surrogates.forest import Forest
from capplan.models.surrogates.heads import OVER_EXPECTED, PROBABILITY, STARVATION, THROUGHPUT, Form, Head
from capplan.models.surrogates.probe import feature_probe
from capplan.models.surrogates.surrogate import Surrogate
from capplan.models.surrogates.tree import LOG_OVER_EXPECTED, Tree
from capplan.models.surrogates.tree import PROBABILITY as CHANCE
from capplan.models.surrogates.uncertainty import Calibration, Domain, Intervals
from capplan.spec import Profile

SURROGATE_VERSION: Final = 3
KINDS: Final = ("best", "forest", "tree")

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

_TREE_FORMS: Final = MappingProxyType({"throughput": OVER_EXPECTED, "starvation": PROBABILITY})
_TREE_ANSWERS: Final = MappingProxyType({"throughput": LOG_OVER_EXPECTED, "starvation": CHANCE})
_DTYPES: Final[Mapping[str, type[np.generic]]] = MappingProxyType(
    {
        "roots": np.int32,
        "feature": np.int16,
        "threshold": np.float32,
        "left": np.int32,
        "right": np.int32,
        "value": np.float32,
    }
)


def profile_digest(profile: Profile) -> str:
    """Return a digest of everything in a profile that throughput and starvation depend on."""
    relevant = profile.model_dump(include={"gpu", "tp", "model", "engine", "length_correlation"})
    for part in ("step_latency", "memory", "loading"):
        fitted = getattr(profile, part)
        relevant[part] = [fitted.form, {name: c.value for name, c in fitted.coefficients.items()}]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()


def identity(profile: Profile, kind: str) -> dict[str, Any]:
    """Return what a document must say of itself to be read for this profile and kind."""
    return {
        "version": SURROGATE_VERSION,
        "kind": kind,
        "profile": profile.name,
        "profile_digest": profile_digest(profile),
        "features": list(FEATURES),
        "probe": feature_probe(profile),
    }


def document_of(surrogate: Surrogate) -> dict[str, Any]:
    """Return everything of a surrogate but its forests."""
    domain = surrogate.domain
    document = identity(surrogate.profile, surrogate.kind) | {
        "calibration": {"slope": surrogate.calibration.slope, "offset": surrogate.calibration.offset},
        "intervals": {
            "low": surrogate.intervals.low.to_document(),
            "high": surrogate.intervals.high.to_document(),
        },
        "domain": {
            "low": [float(x) for x in domain.low],
            "high": [float(x) for x in domain.high],
            "centre": [float(f"{x:.9g}") for x in domain.centre],
            "whitening": [[float(f"{x:.6g}") for x in row] for row in domain.whitening],
            "farthest": domain.farthest,
        },
        "report": surrogate.report,
    }
    if surrogate.throughput_tree and surrogate.starvation_tree:
        trees = {"throughput": surrogate.throughput_tree, "starvation": surrogate.starvation_tree}
        return document | {"trees": {name: tree.to_document() for name, tree in trees.items()}}
    return document | {
        "forms": {"throughput": surrogate.throughput.form, "starvation": surrogate.starvation.form}
    }


def arrays_of(surrogate: Surrogate) -> dict[str, NDArray[Any]]:
    """Return the forests of a surrogate by names of their arrays."""
    return {
        f"{name}_{number}_{field}": getattr(forest, field)
        for name, head in (("throughput", surrogate.throughput), ("starvation", surrogate.starvation))
        for number, forest in enumerate(head.forests)
        for field in Forest._fields
    }


def surrogate_of(document: Mapping[str, Any], arrays: Arrays, profile: Profile) -> Surrogate:
    """Return the surrogate of a document whose `identity` was checked, and of the arrays beside it.

    Raises
    ------
    InputError, KeyError, TypeError, ValueError
        When anything is missing, of another type, or would lead a walk astray.
    """
    report = document["report"]
    if not isinstance(report, dict):
        raise TypeError("report")
    calibration = document["calibration"]
    intervals = document["intervals"]
    trees = {name: _tree(tree, _TREE_ANSWERS[name]) for name, tree in document.get("trees", {}).items()}
    if trees:
        throughput, starvation = (
            Head(form, (tree_forest(trees[name]),)) for name, form in _TREE_FORMS.items()
        )
    else:
        throughput = _head("throughput", document["forms"]["throughput"], THROUGHPUT, arrays)
        starvation = _head("starvation", document["forms"]["starvation"], STARVATION, arrays)
    return Surrogate(
        profile=profile,
        kind=document["kind"],
        throughput=throughput,
        starvation=starvation,
        calibration=Calibration(_finite(calibration["slope"]), _finite(calibration["offset"])),
        intervals=Intervals(*(_tree(intervals[end], LOG_OVER_EXPECTED) for end in ("low", "high"))),
        domain=_domain(document["domain"]),
        report=report,
        throughput_tree=trees.get("throughput"),
        starvation_tree=trees.get("starvation"),
    )


def tree_forest(tree: Tree) -> Forest:
    """Return a small tree as a forest of one."""
    flat = tree.flat
    return Forest(
        roots=np.zeros(1, np.int32),
        feature=flat.feature,
        threshold=flat.threshold,
        left=flat.left.astype(np.int32),
        right=flat.right.astype(np.int32),
        value=flat.value.astype(np.float32),
    )


def _tree(document: object, answer: str) -> Tree:
    tree = Tree.from_document(document)
    if tree.answer != answer:
        raise InputError(f"must answer {answer}", tree.answer, "tree")
    return tree


def _head(name: str, form: str, forms: Mapping[str, Form], arrays: Arrays) -> Head:
    forests = tuple(_forest(arrays, f"{name}_{number}") for number in range(forms[form].forests))
    return Head(form, forests)


def _forest(arrays: Arrays, name: str) -> Forest:
    forest = Forest(**{field: arrays[f"{name}_{field}"] for field in _DTYPES})
    for field, dtype in _DTYPES.items():
        column = getattr(forest, field)
        if column.ndim != 1 or column.dtype != dtype:
            raise TypeError(f"{name}_{field}")
    if not _holds_together(forest):
        raise ValueError(name)
    return forest


def _holds_together(forest: Forest) -> bool:
    """Tell whether the compiled walk stays inside: every step must go forward, to a node that exists."""
    roots, feature = forest.roots, forest.feature
    nodes = np.arange(feature.size)
    if roots.size == 0 or any(
        getattr(forest, field).size != nodes.size for field in _DTYPES if field != "roots"
    ):
        return False
    inner = feature >= 0
    children = (forest.left[inner], forest.right[inner])
    return (
        bool(np.all((roots >= 0) & (roots < nodes.size)))
        and bool(np.all(feature < len(FEATURES)))
        and all(bool(np.all((child > nodes[inner]) & (child < nodes.size))) for child in children)
        and bool(np.all(np.isfinite(forest.threshold)) and np.all(np.isfinite(forest.value)))
    )


def _domain(document: Mapping[str, Any]) -> Domain:
    features = len(FEATURES)
    farthest = _finite(document["farthest"])
    if farthest <= 0.0:
        raise InputError("must be above 0", farthest, "domain")
    return Domain(
        low=_numbers(document["low"], (features,)).astype(np.float32),
        high=_numbers(document["high"], (features,)).astype(np.float32),
        centre=_numbers(document["centre"], (features,)),
        whitening=_numbers(document["whitening"], (features, features)),
        farthest=farthest,
    )


def _numbers(values: object, shape: tuple[int, ...]) -> NDArray[np.float64]:
    numbers = np.array(values, float)
    if numbers.shape != shape or not np.all(np.abs(numbers) <= np.finfo(np.float32).max):
        raise InputError("must be finite numbers", location="domain")
    return numbers


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise TypeError("must be a finite number")
    return float(value)
