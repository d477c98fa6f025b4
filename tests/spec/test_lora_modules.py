import json
from pathlib import Path

import pytest

from capplan import Adapter, load_workload
from capplan.errors import InputError
from capplan.spec import LORA_MODULES, PeftFiles

HEAD = """
version: 1
base_model: org/model
profile: h100-64g/any
requests: {prompt_tokens: {mean: 10}, output_tokens: {mean: 10}}
"""


def peft_folder(folder: Path, target_modules: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "target_modules": target_modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["v_proj", "q_proj"], ("q_proj", "v_proj")),
        (["model.layers.3.self_attn.o_proj", "o_proj"], ("o_proj",)),
        ("all-linear", LORA_MODULES),
        (r".*\.(q|k)_proj", ("q_proj", "k_proj")),
        (r"model\.layers\.\d+\.mlp\.\w+", ("gate_proj", "up_proj", "down_proj")),
        (["gate_up_proj", "qkv_proj"], ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")),
        (r".*\.(qkv|o)_proj", LORA_MODULES[:4]),
        (["lm_head", "q_proj", "embed_tokens"], ("q_proj", "embed_tokens", "lm_head")),
        (r"lm_head|.*\.q_proj", ("q_proj", "lm_head")),
    ],
)
def test_peft_configs_are_read_as_peft_matches_them(tmp_path: Path, given: object, expected: object) -> None:
    assert PeftFiles.of(peft_folder(tmp_path, given)).describe().target_modules == expected


@pytest.mark.parametrize("given", [["norm"], [], "nothing", "(", "\ud800", None, 3, ["q_proj", 3]])
def test_peft_configs_that_target_other_layers_are_refused_by_key(tmp_path: Path, given: object) -> None:
    with pytest.raises(InputError, match=r"adapter_config\.json: target_modules"):
        PeftFiles.of(peft_folder(tmp_path, given)).describe()


@pytest.mark.parametrize("given", [["q_proj", "q_proj"], ["norm"], [], "q_proj", 3])
def test_adapters_target_each_linear_layer_at_most_once(given: object) -> None:
    with pytest.raises(InputError, match="must be all-linear or a list of q_proj"):
        Adapter(name="a", rank=8, rate_rps=1.0, target_modules=given)


def test_a_workload_file_names_modules_or_the_file_that_holds_them(tmp_path: Path) -> None:
    for number, modules in enumerate((["q_proj"], ["down_proj"])):
        peft_folder(tmp_path / f"peft-{number}", modules)
    file = tmp_path / "w.yaml"
    file.write_text(
        HEAD
        + """
adapters:
  - {name: "p{i}", count: 2, rank: 8, rate_rps: 1.0, path: "peft-{i}", target_modules: adapter_config.json}
  - {name: listed, rank: 8, rate_rps: 1.0, target_modules: [o_proj, k_proj]}
  - {name: all, rank: 8, rate_rps: 1.0}
"""
    )
    found = {a.name: a.target_modules for a in load_workload(file).adapters}
    assert found == {
        "p0": ("q_proj",),
        "p1": ("down_proj",),
        "listed": ("k_proj", "o_proj"),
        "all": None,
    }


def test_a_table_of_adapters_names_modules_between_spaces(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name,rank,rate_rps,target_modules\na,8,1,q_proj v_proj\nb,8,1,\n")
    (tmp_path / "w.yaml").write_text(HEAD + "adapters: a.csv\n")
    assert [a.target_modules for a in load_workload(tmp_path / "w.yaml").adapters] == [
        ("q_proj", "v_proj"),
        None,
    ]


def test_errors_name_the_key_of_the_workload_file(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    for modules, message in (
        ("[q_prj]", r"w.yaml:7: adapters\[0\]\.target_modules\[0\]"),
        ("adapter_config.json", "path"),
    ):
        file.write_text(
            HEAD + f"adapters:\n  - {{name: a, rank: 8, rate_rps: 1.0, target_modules: {modules}}}\n"
        )
        with pytest.raises(InputError, match=message):
            load_workload(file)
