"""The user guide is true: its examples load, and it mentions every key."""

import re
from pathlib import Path

import pytest

from capplan import load_workload
from capplan.spec import WorkloadFile, parse_yaml

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "workload.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
PROGRAMS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def test_the_first_example_is_a_whole_file(tmp_path):
    path = tmp_path / "workload.yaml"
    path.write_text(EXAMPLES[0], encoding="utf-8")
    assert len(load_workload(path).adapters) == 65


@pytest.mark.parametrize("example", EXAMPLES[1:])
def test_every_other_example_fits_into_the_first(example):
    fragment = parse_yaml(example, "guide").data
    whole = parse_yaml(EXAMPLES[0], "guide").data | fragment
    replaced = {"pools": ["profile", "gpus"], "trace": ["adapters", "requests"]}
    for key in (old for new, olds in replaced.items() if new in fragment for old in olds):
        if key not in fragment:
            del whole[key]
    WorkloadFile.model_validate(whole)


def test_every_key_of_the_format_is_explained():
    schema = WorkloadFile.model_json_schema()
    keys = {name for part in (schema, *schema["$defs"].values()) for name in part.get("properties", {})}
    assert {key for key in keys if not re.search(rf"`{key}[`:]|\b{key}: ", GUIDE)} == set()


def test_the_program_runs(capsys):
    exec(PROGRAMS[0], {})
    assert capsys.readouterr().out.startswith("3.2 requests per second, digest ")
