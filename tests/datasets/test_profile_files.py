import json
from pathlib import Path
from typing import Any

import pytest

from capplan import errors, list_profiles, load_profile
from capplan.datasets import _profile_files as profile_files
from tests.cli.examples import profile_document


@pytest.fixture
def profile_json(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile_document()))
    return path


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two shipped profiles in a temporary folder."""
    names = ("gpu-a/model/vllm-0.8.5", "gpu-b/model/vllm-0.8.5")
    for name in names:
        path = tmp_path / "profiles" / f"{name}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(profile_document() | {"name": name}))
    monkeypatch.setattr(profile_files, "_SHIPPED", tmp_path / "profiles")
    return names


def message(name: str | Path) -> str:
    with pytest.raises(errors.InputError) as caught:
        load_profile(name)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_every_shipped_profile_loads_under_its_own_name() -> None:
    assert {name: load_profile(name).name for name in list_profiles()} == {
        name: name for name in list_profiles()
    }


def test_names_are_gpu_model_and_engine_in_order(shipped: tuple[str, str]) -> None:
    assert list_profiles() == shipped


def test_a_shipped_name_wins_over_a_file_of_that_name(
    shipped: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    decoy = tmp_path / shipped[0]
    decoy.parent.mkdir(parents=True)
    decoy.write_text("not a profile")
    assert load_profile(shipped[0]).name == shipped[0]


def test_a_path_loads_as_text_as_path_and_without_a_suffix(
    profile_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(profile_json.parent)
    bare = profile_json.rename(profile_json.with_name("mine"))
    expected = load_profile(bare)
    assert load_profile("mine") == load_profile(str(bare)) == load_profile("./mine") == expected
    assert expected.name == profile_document()["name"]


def test_an_unknown_name_gets_the_nearest_one_and_the_command_for_all(
    shipped: tuple[str, str],
) -> None:
    text = message("gpu-a/model/vllm-0.8.4")
    assert "did you mean 'gpu-a/model/vllm-0.8.5'?" in text
    assert f"`capplan profiles` lists all {len(shipped)}" in text


@pytest.mark.parametrize(
    "name", ["", "x" * 5000, "a\0b", "../profiles/gpu-a/model/vllm-0.8.5", "gpu-a/model"]
)
def test_no_odd_name_leads_to_a_profile(name: str, shipped: tuple[str, str]) -> None:
    message(name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    text = message(tmp_path / "absent.json")
    assert "absent.json" in text
    assert "not a file" in text


@pytest.mark.parametrize("end", [0, 1, 100, -1])
def test_a_truncated_file_is_named(profile_json: Path, end: int) -> None:
    profile_json.write_text(profile_json.read_text()[:end])
    assert str(profile_json) in message(profile_json)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\0\1", b"[]", b"null", b'{"name": NaN}', b'{"a": 1, "a": 2}', b"[" * 100_000]
)
def test_a_corrupt_file_is_named(profile_json: Path, content: bytes) -> None:
    profile_json.write_bytes(content)
    assert str(profile_json) in message(profile_json)


def _without(document: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


@pytest.mark.parametrize(
    ("edit", "key", "rule"),
    [
        (lambda d: _without(d, "gpu"), "gpu", "is required"),
        (lambda d: d | {"gpus": 1}, "gpus", "did you mean 'gpu'?"),
        (lambda d: d | {"tp": 0}, "tp", "greater than or equal to 1"),
        (lambda d: d | {"gpu": d["gpu"] | {"memory_bytes": "much"}}, "gpu.memory_bytes", "integer"),
        (lambda d: d | {"memory": _without(d["memory"], "fit")}, "memory.fit", "is required"),
        (lambda d: d | {"schema_version": 2}, "schema_version", "less than or equal to 1"),
    ],
)
def test_a_broken_rule_is_told_with_file_and_key(profile_json: Path, edit: Any, key: str, rule: str) -> None:
    profile_json.write_text(json.dumps(edit(profile_document())))
    text = message(profile_json)
    assert text.startswith(f"{profile_json}: {key}: ")
    assert rule in text


def test_a_profile_of_a_known_model_has_its_positions(tmp_path: Path) -> None:
    document = profile_document()
    assert "max_positions" not in document["model"]
    path = tmp_path / "mine.json"
    for hf_id, given, expected in [
        ("meta-llama/Llama-2-7b-hf", None, 4096),
        ("meta-llama/Llama-2-7b-hf", 2048, 2048),
        ("someone/own-model", None, None),
    ]:
        document["model"] |= {"hf_ids": [hf_id], "max_positions": given}
        path.write_text(json.dumps(document))
        assert load_profile(path).model.max_positions == expected
    assert all(load_profile(name).model.max_positions is not None for name in list_profiles())
