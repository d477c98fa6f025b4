"""Inputs with values of other types than meant end in findings or one line, never in another error."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from capplan import InputError, Plan
from capplan.deploy import EXPORTERS, export
from capplan.deploy.lint import lint
from tests.cli.examples import small_plan
from tests.deploy.lint.inputs import chart, crd, dynamo, kserve, lora_adapter, one_group, pod, ray, write

OBJECTS = {
    "pod": pod("--enable-lora"),
    "kserve": kserve(maxAdapters=2, maxRank=16, maxCpuAdapters=2),
    "aibrix": crd("model.aibrix.ai/v1alpha1", "ModelAdapter", replicas=1),
    "lora-adapter": lora_adapter("x"),
    "chart": chart(),
    "ray": ray(),
    "dynamo": dynamo("--max-loras", "2")[0],
    "objective": crd("llm-d.ai/v1alpha2", "InferenceObjective", poolRef={"name": "p"}),
}
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    "",
    "x y",
    [],
    [None, 1, "a"],
    {},
    {"a": {"b": None}},
    "9" * 5000,
)


def keys(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of all values within a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *rest) for rest in keys(inner))


def replaced(document: Any, key: tuple[Any, ...], value: Any) -> Any:
    result = copy.deepcopy(document)
    inner = result
    for part in key[:-1]:
        inner = inner[part]
    inner[key[-1]] = value
    return result


def refusal(path: Path, plan: Plan | None = None) -> str:
    """Return the line with which an input is refused; that of an unknown kind if it is not."""
    try:
        lint(path, plan=plan)
    except InputError as error:
        return str(error)
    return "is not understood"


@pytest.mark.parametrize("name", OBJECTS)
def test_any_value_anywhere_is_read(name: str, tmp_path: Path) -> None:
    plan = one_group(("a", 16, None))
    for key in keys(OBJECTS[name]):
        for value in VALUES:
            text = yaml.safe_dump(replaced(OBJECTS[name], key, value), sort_keys=False)
            assert "is not understood" in refusal(write(tmp_path, text), plan)


@pytest.mark.parametrize("target", list(EXPORTERS))
def test_a_file_that_is_cut_anywhere_is_read(target: str, tmp_path: Path) -> None:
    settings = {"adapters-path": "s3://bucket/a"} if target == "ray" else None
    for text in export(small_plan(), target, settings=settings).values():
        for end in range(0, len(text), max(1, len(text) // 40)):
            assert "is not understood" in refusal(write(tmp_path, text[:end]))
