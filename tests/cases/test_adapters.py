"""Adapter folders, paths, flags and names: cases of ``../shared/cases`` and their siblings."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from capplan import Adapter, InputError, Lengths, Workload, load_workload, plan
from capplan.deploy import vllm_files
from capplan.registry import RegisteredAdapter, read_adapter
from capplan.serving import RELEASES, flag_since, release_of, vllm_rank
from capplan.spec import (
    LORA_MODULES,
    NOT_PRINTABLE,
    PeftFiles,
    Plan,
    PlanEngine,
    Pool,
    WorkloadFile,
    path_kind,
    placed_path,
)
from capplan.spec._peft_folder import is_other_model
from tests.cli.conftest import Run, error_line, run
from tests.cli.examples import MODEL, group, plan_of, small_plan
from tests.deploy.test_vllm import launched, only_script, options

__all__ = ["run"]

HEAD = f"""
base_model: {MODEL}
profile: h100-80g/llama-3.1-8b/vllm-0.15.1
requests: {{prompt_tokens: {{mean: 200}}, output_tokens: {{mean: 100}}}}
"""
HIDDEN = ("\u202e", "\u2066", "\u200b", "\u2028", "\ufeff", "\u00ad", "\x1b", "\x9b", "\x7f", "\U000e0001")


def write_zeros(path: Path, matrices: Mapping[str, tuple[int, int, int]]) -> None:
    """Write A and B of layers of (rank, in, out) as zeros that take no room on the disk."""
    header, at = {}, 0
    for layer, (rank, width, out) in matrices.items():
        for half, shape in (("A", [rank, width]), ("B", [out, rank])):
            size = 2 * shape[0] * shape[1]
            name = f"{layer}.lora_{half}.weight"
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def adapter_folder(folder: Path, rank: int = 16, layers: int = 2, width: int = 4096, **config: Any) -> Path:
    """Write q_proj and v_proj of Llama-3.1-8B in some layers."""
    folder.mkdir(parents=True, exist_ok=True)
    matrices = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}": (rank, width, out)
        for layer in range(layers)
        for module, out in (("q_proj", 4096), ("v_proj", 1024))
    }
    write_zeros(folder / "adapter_model.safetensors", matrices)
    fields = {"peft_type": "LORA", "r": rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def workload_file(folder: Path, adapters: str) -> Path:
    (folder / "w.yaml").write_text(HEAD + adapters)
    return folder / "w.yaml"


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_workload(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("workload.yaml", ("adapters[0].rank: must be 64", "legal/adapter_config.json", "(got 16)")),
        ("workload-dora.yaml", ("dora/adapter_config.json: modules_to_save: must be off", "lm_head")),
        ("w-ia3.yaml", ("ia3/adapter_config.json: peft_type: must be a LoRA adapter", "(got 'IA3')")),
    ],
)
@pytest.mark.parametrize("modules", [True, False])
def test_05_a_folder_that_contradicts_the_workload_is_refused(
    case: Callable[[str], Path], run: Run, file: str, words: tuple[str, ...], modules: bool
) -> None:
    path = case("05") / file
    if not modules:  # the folder is read for its own sake
        path.write_text(path.read_text().replace(", target_modules: adapter_config.json", ""))
    for command in ("plan", "simulate", "capacity"):
        line = error_line(run(command, path))
        assert all(word in line for word in words)


def test_05_a_rank_that_is_not_stated_is_that_of_the_folder(case: Callable[[str], Path]) -> None:
    path = case("05") / "workload.yaml"
    path.write_text(path.read_text().replace("rank: 16, ", ""))
    (adapter,) = load_workload(path).adapters
    assert (adapter.rank, adapter.target_modules) == (64, LORA_MODULES)
    assert adapter.path == str(path.parent / "adapters" / "legal")


def test_06_matrices_of_fused_layers_are_those_of_their_parts(case: Callable[[str], Path], run: Run) -> None:
    folder = case("06")
    for file in ("workload.yaml", "w2.yaml", "w3.yaml"):
        modules = load_workload(folder / file).adapters[0].target_modules
        assert modules == ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    write_zeros(
        folder / "adapters" / "resume" / "adapter_model.safetensors",
        {
            f"base_model.model.model.layers.{layer}.{name}": (16, 3072, out)
            for layer in range(32)
            for name, out in (("self_attn.qkv_proj", 3 * 3072), ("mlp.gate_up_proj", 2 * 8192))
        },
    )
    assert run("plan", folder / "w3.yaml", "-o", folder / "plan.json").exit_code == 0
    write_zeros(
        folder / "adapters" / "resume" / "adapter_model.safetensors",
        {
            "model.layers.0.self_attn.qkv_proj": (16, 3072, 3072),
            "model.layers.0.mlp.gate_up_proj": (16, 3072, 16384),
        },
    )
    assert "qkv_proj: must go from 3072 to 9216" in error_line(run("plan", folder / "w3.yaml"))


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "rank of the tensors": ({"r": 8}, "must have the rank 8 that adapter_config.json says"),
    "rank pattern of tensors": ({"rank_pattern": {"q_proj": 32}}, "must have the rank 32"),
    "a module without tensors": ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "(got 'o_proj')"),
    "tensors of no target": ({"target_modules": ["q_proj"]}, "must be among the target_modules"),
    "all linear layers": ({"target_modules": "all-linear"}, "must hold tensors of all target_modules"),
    "an expression": ({"target_modules": r".*\.(q|v|k)_proj"}, "k_proj"),
    "an expression of fewer": ({"target_modules": r".*q_proj"}, "must be among the target_modules"),
    "layers": ({"layers_to_transform": [0]}, "layers_to_transform"),
    "a layer without tensors": ({"layers_to_transform": [0, 1, 2]}, "(got 2)"),
    "no rank": ({"r": "16"}, "finite number"),
    "no names": ({"target_modules": 3}, "must be a list of names"),
    "another kind": ({"peft_type": "LOHA"}, "must be a LoRA adapter"),
    "no kind": ({"peft_type": None}, "must be a LoRA adapter"),
    "DoRA": ({"use_dora": True}, "use_dora: must be off"),
    "biases": ({"bias": "lora_only"}, "bias: must be none"),
    "another model": ({"base_model_name_or_path": "Qwen/Qwen2.5-7B"}, "must be an adapter of meta-llama/"),
    "a model that is no text": ({"base_model_name_or_path": 7}, "base_model_name_or_path: must be text"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_folder_that_contradicts_itself_or_the_model_is_refused(tmp_path: Path, name: str) -> None:
    config, words = CONTRADICTIONS[name]
    path = workload_file(tmp_path, "adapters: [{name: a, rate_rps: 1.0, path: ./a}]")
    folder = adapter_folder(tmp_path / "a")
    assert load_workload(path).adapters[0].rank == 16
    adapter_folder(folder, **config)
    assert words in refusal(path)
    with pytest.raises(InputError, match=r"must be|must hold|must have"):  # as for a registry
        read_adapter("a", folder, MODEL)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["model.layers.0.self_attn.q_proj", "self_attn.v_proj", "1.self_attn.q_proj"]},
        {"target_modules": r".*\.self_attn\.(q|v)_proj"},
        {"target_modules": r"(?!x).*_proj"},  # RE2 has no look-ahead: the tensors count
        {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
        {"target_modules": None},
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": None, "modules_to_save": None, "base_model_name_or_path": "/models/tiny"},
        {"base_model_name_or_path": "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"},
    ],
)
def test_a_folder_that_agrees_with_itself_is_read(tmp_path: Path, config: dict[str, Any]) -> None:
    found = PeftFiles.of(adapter_folder(tmp_path / "a", **config)).describe()
    assert (found.rank, found.target_modules) == (16, ("q_proj", "v_proj"))


@pytest.mark.parametrize("entry", ["rank: 16", "rank: 8", "target_modules: [q_proj]"])
def test_rank_and_layers_as_stated_are_those_of_the_folder(tmp_path: Path, entry: str) -> None:
    adapter_folder(tmp_path / "a")
    path = workload_file(tmp_path, f"adapters: [{{name: a, {entry}, rate_rps: 1.0, path: a}}]")
    key, _, value = entry.partition(": ")
    if value == "16":
        assert load_workload(path).adapters[0].rank == 16
        return
    message = refusal(path)
    assert f"w.yaml:5: adapters[0].{key}: must be" in message
    assert f"{tmp_path}/a/adapter_config.json" in message


def test_tables_and_registries_are_checked_by_their_folders(tmp_path: Path, run: Run) -> None:
    folder = adapter_folder(tmp_path / "a", rank=32)
    path = workload_file(tmp_path, "adapters: table.csv")
    (tmp_path / "table.csv").write_text("name,rank,rate_rps,path\na,,1,a\n")
    assert load_workload(path).adapters[0].rank == 32
    (tmp_path / "table.csv").write_text("name,rank,rate_rps,path\nb,8,1,\na,16,1,a\n")
    assert f"{tmp_path}/table.csv:3: rank: must be 32" in refusal(path)
    (tmp_path / "table.csv").write_text("name,rank,rate_rps,path\nb,,1,org/b\n")
    assert f"{tmp_path}/table.csv:2: rank: is required" in refusal(path)

    assert (
        run(
            "registry", "add", f"a={folder}", "--base-model", MODEL, "--registry", tmp_path / "r.db"
        ).exit_code
        == 0
    )
    path = workload_file(tmp_path, "adapters: {registry: r.db, rate_rps: 1.0}")
    assert load_workload(path).adapters[0].rank == 32
    adapter_folder(folder, rank=64)  # trained again, and not registered
    assert "adapter a: rank: must be 64" in refusal(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": 33}, "must be below the model's 32 layers"),
        ({"width": 2048}, "must go from 4096 to 4096 dimensions"),
        ({"rank": 8}, "adapter a: rank: must be 8"),
    ],
)
def test_a_plan_checks_folders_against_the_model(tmp_path: Path, fields: dict[str, int], words: str) -> None:
    folder = adapter_folder(tmp_path / "a", **fields)
    adapter = Adapter(
        name="a",
        rank=16 if "rank" in fields else PeftFiles.of(folder).describe().rank,
        rate_rps=0.1,
        path=str(folder),
    )
    lengths = {"prompt_tokens": Lengths(mean=100), "output_tokens": Lengths(mean=50)}
    workload = Workload(base_model=MODEL, adapters=[adapter], **lengths)
    with pytest.raises(InputError, match=words):
        plan(workload, gpus=1, profile="h100-80g/llama-3.1-8b/vllm-0.15.1")


def test_an_export_checks_the_folders_that_are_on_this_machine(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a", rank=16)
    made = plan_of(group("g", adapters=(("a", 16, 1.0, str(folder)),)))
    assert str(folder) in only_script(made)
    adapter_folder(folder, rank=32)
    with pytest.raises(InputError, match="plan: adapter a: rank: must be 32"):
        vllm_files(made)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("meta-llama/Llama-3.1-8B", False),
        ("NousResearch/Meta-Llama-3.1-8B-Instruct", False),
        ("unsloth/llama-3.1-8b-instruct-unsloth-bnb-4bit", False),
        ("NousResearch/Hermes-3-Llama-3.1-8B", False),
        ("acme/support-bot", False),
        ("/models/Qwen2.5-7B", False),
        ("tiny", False),
        ("Qwen/Qwen2.5-7B-Instruct", True),
        ("meta-llama/Llama-3.1-70B-Instruct", True),
        ("meta-llama/Meta-Llama-3-8B", True),
        ("mistralai/Mistral-7B-v0.1", True),
    ],
)
def test_another_model_is_told_by_family_version_and_size(name: str, other: bool) -> None:
    assert is_other_model(name, MODEL) == other


def test_16_adapter_folders_load_or_are_refused_with_the_reason(case: Callable[[str], Path]) -> None:
    refused = {
        "bin-only": "adapter_model.bin: is not supported",
        "dora": "use_dora",
        "modules-to-save": "modules_to_save",
        "pissa": "replaces the weights",
        "resized-vocab": "lm_head",
    }
    ranks = {"axolotl-rank-pattern": 32, "r128": 128}
    adapters = case("16") / "adapters"
    for folder in adapters.iterdir():
        if folder.name in refused:
            with pytest.raises(InputError, match=refused[folder.name]):
                PeftFiles.of(folder).describe()
        else:
            assert PeftFiles.of(folder).describe().rank == ranks.get(folder.name, 8)
    embedding = PeftFiles.of(adapters / "embed-target")
    found = embedding.describe()
    assert found.target_modules == ("q_proj", "v_proj", "embed_tokens")
    assert found.sizes[-1, 7] == (260, 64)
    with (
        pytest.raises(InputError, match=r"of q_proj, .*, down_proj only.*embed_tokens\.lora_embedding_A"),
        embedding.opened(),  # as the reference engine does, which does not adapt embeddings
    ):
        pass


def test_16_pickled_weights_are_converted_as_the_message_says(case: Callable[[str], Path]) -> None:
    pytest.importorskip("torch")
    folder = case("16") / "adapters" / "bin-only"
    with pytest.raises(InputError, match="convert it there") as caught:
        PeftFiles.of(folder).describe()
    code = str(caught.value).partition('python -c "')[2].rstrip('"')
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=120)
    assert PeftFiles.of(folder).describe().rank == 8


PATHS = {
    "s3://bucket/a": "url",
    "gs://bucket/a": "url",
    "hf://org/a": "url",
    "https://example.org/a": "url",
    "file:///srv/a": "url",
    "org/a": "hub",
    "a": "hub",
    "/srv/a": "folder",
    "./a": "folder",
    "../a": "folder",
    "~/a": "folder",
    "some where/a": "folder",
    "a/b/c": "folder",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_a_folder_a_hub_id_or_a_url(path: str) -> None:
    assert path_kind(path) == PATHS[path]


def test_paths_of_folders_are_relative_to_the_workload_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter_folder(tmp_path / "models" / "a")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w").mkdir()
    path = workload_file(tmp_path / "w", "adapters: [{name: a, rate_rps: 1.0, path: ../models/a}]")
    assert load_workload(path.relative_to(tmp_path)).adapters[0].path == str(tmp_path / "models" / "a")
    monkeypatch.setenv("HOME", str(tmp_path / "models"))
    assert placed_path("~/a", "", "path") == str(tmp_path / "models" / "a")
    for missing in ("./b", "../b", "x/y/z", "w.yaml/./w", str(path)):
        with pytest.raises(InputError, match="must be a folder, relative to"):
            placed_path(missing, path.parent, "path")
    assert placed_path("/elsewhere/a", path.parent, "path") == "/elsewhere/a"


def test_a_digest_does_not_depend_on_where_adapters_are(tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "two"):
        adapter_folder(tmp_path / name / "a")
        digests.add(
            load_workload(
                workload_file(tmp_path / name, "adapters: [{name: a, rate_rps: 1.0, path: ./a}]")
            ).digest()
        )
    assert len(digests) == 1


def test_11_adapters_at_urls_are_downloaded_before_a_script_starts(tmp_path: Path, run: Run) -> None:
    made = plan_of(group("g", adapters=(("x", 8, 1.0, "s3://bucket/x,1"), ("y", 8, 1.0, "/srv/y"))))
    made.to_json(tmp_path / "plan.json")
    done = run(
        "export", tmp_path / "plan.json", "--target", "vllm", "-o", tmp_path / "deploy", "--unverified"
    )
    assert done.exit_code == 0
    assert """aws s3 cp --recursive s3://bucket/x,1 "$ADAPTER_ROOT"/x`""" in done.stderr
    argv, _, _ = launched(tmp_path, only_script(made), ADAPTER_ROOT="/adapters")
    assert options(argv)["--lora-modules"] == ["x=/adapters/x", "y=/srv/y"]
    (tmp_path / "other").mkdir()
    argv, _, refused = launched(tmp_path / "other", only_script(made), ADAPTER_ROOT="/a=b")
    assert (argv, refused.returncode) == ([], 2)
    assert "must be without = and ," in refused.stderr


@pytest.mark.parametrize("path", ["./x", "../x", "a b/x", "a/b/c"])
def test_relative_paths_of_a_plan_are_not_exported(path: str) -> None:
    with pytest.raises(InputError, match="adapter x: path: must be absolute"):
        vllm_files(plan_of(group("g", adapters=(("x", 8, 1.0, path),))))


@pytest.mark.parametrize("word", ["x=s3://bucket/x", "x=https://h/x"])
def test_serve_takes_adapters_from_no_url(run: Run, word: str) -> None:
    pytest.importorskip("torch")
    assert "to which URLs are downloaded" in error_line(run("serve", "--model", "m", "--lora-modules", word))


def test_a_reference_of_a_registry_is_no_relative_path(tmp_path: Path, run: Run) -> None:
    facts = ("--rank", 8, "--base-model", MODEL, "--registry", tmp_path / "r.db")
    assert "must be a folder on this machine" in error_line(run("registry", "add", "x=./missing", *facts))
    assert run("registry", "add", "x=s3://bucket/x", *facts).exit_code == 0


@pytest.mark.long
def test_10_and_11_a_planned_script_starts_with_one_argument_per_adapter(
    case: Callable[[str], Path], run: Run
) -> None:
    folder = case("10")
    adapter_folder(folder / "loras" / "legal, v=2", rank=8)
    with (folder / "workload.yaml").open("a") as file:
        file.write('  - {name: legal, rate_rps: 0.1, path: "./loras/legal, v=2"}\n')
    assert run("plan", folder / "workload.yaml", "-o", folder / "plan.json", "--quiet").exit_code == 0
    assert run("export", folder / "plan.json", "--target", "vllm", "-o", folder / "deploy").exit_code == 0
    environment = {"PATH": f"{folder / 'fake'}:{os.environ['PATH']}", "ADAPTER_ROOT": "/adapters"}
    done = subprocess.run(
        ["sh", str(folder / "deploy" / "launch" / "gpu-0.sh")],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    words = [line[1:-1] for line in done.stdout.splitlines()]
    modules = words[words.index("--lora-modules") + 1 :]
    assert modules[:3] == [
        "acme/sql-lora-v1=/srv/loras/sql v1",
        "support:de=/adapters/support:de",
        "qwen3-0.6b:titlebreaker=/adapters/qwen3-0.6b:titlebreaker",
    ]
    assert json.loads(modules[3]) == {"name": "legal", "path": str(folder / "loras" / "legal, v=2")}
    assert "--max-lora-rank=64" in words


def with_engine(version: str, rules: str, **fields: Any) -> Plan:
    engine = PlanEngine(name="vllm", version=version, rules=rules, **fields)
    return plan_of(group("g", adapters=(("a", 8, 1.0, "org/a"),)), engine=engine)


@pytest.mark.parametrize(
    ("version", "rules", "fields", "flag"),
    [
        ("0.15.1", "vllm-0.14-async", {"target_modules": ("q_proj",)}, "--lora-target-modules"),
        ("0.18.1", "vllm-0.14-async", {"target_modules": LORA_MODULES}, "--lora-target-modules"),
        ("0.9.2", "vllm-0.12-async", {}, "--async-scheduling"),
        ("0.8.5", "vllm-0.32-sync", {}, "--no-async-scheduling"),
    ],
)
def test_18_a_flag_that_the_version_lacks_refuses_the_plan(
    version: str, rules: str, fields: dict[str, Any], flag: str
) -> None:
    first = flag_since(flag)
    with pytest.raises(InputError, match=rf"lacks {flag}: vLLM has it since {first}.*got '{version}'"):
        vllm_files(with_engine(version, rules, **fields))
    assert flag in only_script(with_engine("0.32.0", rules, **fields))


@pytest.mark.long
def test_18_the_case_is_refused(case: Callable[[str], Path], run: Run) -> None:
    folder = case("18")
    assert run("plan", folder / "w.yaml", "-o", folder / "plan.json", "--quiet").exit_code == 0
    line = error_line(run("export", folder / "plan.json", "--target", "vllm", "-o", folder / "deploy"))
    assert "lacks --lora-target-modules" in line
    assert not (folder / "deploy").exists()


def test_every_flag_of_a_script_is_in_the_table(tmp_path: Path) -> None:
    for enabled in (True, False):
        engine = PlanEngine(
            name="vllm",
            version="0.32.0",
            rules=f"vllm-0.{'12-async' if enabled else '32-sync'}",
            target_modules=("q_proj",),
            fully_sharded_loras=True,
        )
        part = group("g", adapters=(("a", 8, 1.0, "org/a"),), enable_prefix_caching=enabled)
        argv, environment, _ = launched(
            tmp_path, only_script(plan_of(part, engine=engine), runtime_updates=True)
        )
        assert set(options(argv)) <= RELEASES[-1].flags
        assert {name for name in environment if name.startswith("VLLM_")} <= RELEASES[-1].flags


def test_slots_of_rank_1_are_planned_as_the_version_has_them(tmp_path: Path) -> None:
    assert [vllm_rank(1, version) for version in ("0.8.5", "0.11.0", "0.11.1", "0.32.0", None)] == [
        8,
        8,
        1,
        1,
        1,
    ]
    assert "--lora-target-modules" in release_of("0.19.0rc1").flags
    lengths = {"prompt_tokens": Lengths(mean=100), "output_tokens": Lengths(mean=50)}
    adapters = [Adapter(name="a", rank=1, rate_rps=0.1)]
    for version, rank in (("h100-64g/llama-3.1-8b/vllm-0.8.5", 8), ("h100-80g/llama-3.1-8b/vllm-0.15.1", 1)):
        workload = Workload(base_model=MODEL, adapters=adapters, **lengths)
        made = plan(workload, gpus=1, profile=version, verify=False)
        assert made.groups[0].engine_args.max_lora_rank == rank
    fixed = workload.replace(engine={"max_lora_rank": 1})
    with pytest.raises(InputError, match=r"engine\.max_lora_rank: must be at least 8"):
        plan(fixed, gpus=1, profile="h100-64g/llama-3.1-8b/vllm-0.8.5")


@pytest.mark.parametrize("hidden", HIDDEN)
def test_39_names_and_paths_show_as_they_are(tmp_path: Path, hidden: str, run: Run) -> None:
    text = f"a{hidden}b"
    lengths = {"prompt_tokens": Lengths(mean=100), "output_tokens": Lengths(mean=50)}
    facts = {"name": "a", "base_model": "org/m", "rank": 8, "location": "s3://a"}
    makers: list[Callable[[], object]] = [
        lambda: Adapter(name=text, rank=8, rate_rps=1.0),
        lambda: Adapter(name="a", rank=8, rate_rps=1.0, path=text),
        lambda: Adapter(name="a", rank=8, rate_rps=1.0, pool=text),
        lambda: Pool(name=text, profile="p", count=1),
        lambda: Pool(name="p", profile=text, count=1),
        lambda: Workload(base_model=text, adapters=[Adapter(name="a", rank=8, rate_rps=1.0)], **lengths),
        lambda: group(text, adapters=(("a", 8, 1.0, None),)),
        lambda: group("g", adapters=((text, 8, 1.0, None),)),
        lambda: group("g", adapters=(("a", 8, 1.0, text),)),
        lambda: small_plan(base_model=text),
        lambda: small_plan(created_by=text),
        lambda: WorkloadFile(
            base_model="m", profile="p", adapters=[{"name": text, "rank": 8, "rate_rps": 1}]
        ),
        *(
            lambda key=key: RegisteredAdapter(**facts | {key: text})
            for key in ("name", "base_model", "location")
        ),  # type: ignore[misc]
    ]
    for make in makers:
        with pytest.raises(InputError, match=NOT_PRINTABLE) as caught:
            make()
        assert str(caught.value).isprintable()

    (tmp_path / "plan.json").write_text(
        small_plan().to_json().replace('"shared"', json.dumps(f"shared{hidden}"))
    )
    table = tmp_path / "table.csv"
    table.write_text(f"name,rank,rate_rps\n{text},8,1\n", encoding="utf-8")
    reference = ("--rank", 8, "--base-model", "m", "--registry", tmp_path / "r.db")
    commands: list[tuple[object, ...]] = [
        ("report", tmp_path / "plan.json", "-o", tmp_path / "r.html"),
        ("export", tmp_path / "plan.json", "--target", "vllm", "-o", tmp_path / "deploy"),
        ("plan", workload_file(tmp_path, "adapters: table.csv")),
        ("registry", "add", f"{text}=s3://a", *reference),
        ("registry", "add", f"a=s3://{text}", *reference),
    ]
    for command in commands:
        assert error_line(run(*command)).isprintable()
    assert not {path.name for path in tmp_path.iterdir()} & {"r.html", "deploy"}


def test_39_servers_take_no_such_path(run: Run) -> None:
    pytest.importorskip("torch")
    for hidden in HIDDEN:
        line = error_line(run("serve", "--model", "tiny-llama", "--lora-modules", f"a=/x{hidden}"))
        assert line.isprintable()
