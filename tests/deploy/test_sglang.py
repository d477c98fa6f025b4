import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from capplan import InputError, Plan
from capplan.deploy import EXPORTERS, TOP_NAMES, export, vllm_files
from capplan.spec import ALL_MODULES, Cache, Group, PlanBase, PlanEngine
from tests.cli.examples import MODEL, group, plan_of, small_plan
from tests.deploy.test_vllm import HOSTILE, launched, parsed

HERE = Path(__file__).parent
ENGINE = PlanEngine(name="vllm", version="0.32.0", rules="vllm-0.32-async")
ONE = (("a", 8, 1.0, "/p/a"),)


def words_of(folder: Path, plan: Plan, script: str = "launch/g.sh") -> list[str]:
    """Return the arguments with which a script starts SGLang."""
    text = export(plan, "sglang")[script]
    argv, _, done = launched(folder, text, program="python3", ADAPTER_ROOT="/adapters")
    assert done.returncode == 0, done.stderr
    assert argv[:2] == ["-m", "sglang.launch_server"]
    return argv[2:]


def based(part: Group) -> Group:
    return part.replace(base=PlanBase(rate_rps=1.0, share=1.0))


def test_files_are_those_of_the_vllm_target() -> None:
    files, others = export(small_plan(), "sglang", port=9000), vllm_files(small_plan(), port=9000)
    assert files.keys() == others.keys()
    assert EXPORTERS["sglang"].top_names == TOP_NAMES
    same = ("plan.json", "routing.json")
    assert {name: files[name] for name in same} == {name: others[name] for name in same}


def test_every_setting_of_the_group_is_a_flag(tmp_path: Path) -> None:
    args = small_plan().groups[1].engine_args
    assert parsed(words_of(tmp_path, small_plan(), "launch/g1.sh")) == {
        "--model-path": [MODEL],
        "--host": ["127.0.0.1"],
        "--port": ["8002"],
        "--tp-size": ["1"],
        "--enable-lora": [],
        "--max-loras-per-batch": [str(args.max_loras)],
        "--max-loaded-loras": ["2"],
        "--max-lora-rank": ["32"],
        "--max-running-requests": [str(args.max_num_seqs)],
        "--chunked-prefill-size": [str(args.max_num_batched_tokens)],
        "--mem-fraction-static": ["0.9"],
        "--context-length": [str(args.max_model_len)],
        "--lora-paths": ["b=/models/b", "shared=/adapters/shared"],
    }


def test_requests_of_the_base_model_take_a_slot_of_their_own(tmp_path: Path) -> None:
    part = group("g", adapters=ONE, max_loras=2)
    assert parsed(words_of(tmp_path, plan_of(part)))["--max-loras-per-batch"] == ["2"]
    given = parsed(words_of(tmp_path, plan_of(based(part))))
    assert given["--max-loras-per-batch"] == ["3"]
    assert given["--max-loaded-loras"] == ["3"]


@pytest.mark.parametrize(("max_cpu_loras", "loaded"), [(None, "7"), (3, "7"), (9, "9")])
def test_host_memory_holds_all_that_are_loaded(
    tmp_path: Path, max_cpu_loras: int | None, loaded: str
) -> None:
    many = tuple((f"a{i}", 8, 1.0, "/p") for i in range(7))
    part = group("g", adapters=many, max_cpu_loras=max_cpu_loras)
    assert parsed(words_of(tmp_path, plan_of(part)))["--max-loaded-loras"] == [loaded]


def test_layers_are_named_if_the_plan_restricts_them_or_no_adapter_tells(tmp_path: Path) -> None:
    part = group("g", adapters=ONE)
    assert "--lora-target-modules" not in parsed(words_of(tmp_path, plan_of(part, engine=ENGINE)))
    few = ENGINE.replace(target_modules=("q_proj", "down_proj"))
    given = parsed(words_of(tmp_path, plan_of(part, engine=few)))
    assert given["--lora-target-modules"] == ["q_proj", "down_proj"]
    empty = based(part).replace(adapters=())
    assert parsed(words_of(tmp_path, plan_of(empty)))["--lora-target-modules"] == ["all"]


def test_a_group_of_the_base_model_is_an_engine_without_lora(tmp_path: Path) -> None:
    part = based(group("g", adapters=ONE))
    args = part.engine_args.replace(max_loras=0, max_lora_rank=0)
    words = words_of(tmp_path, plan_of(part.replace(adapters=(), engine_args=args)))
    assert not [word for word in words if "lora" in word.lower().replace(MODEL.lower(), "")]


def test_weights_kv_and_prefixes_are_flags_by_the_names_of_sglang(tmp_path: Path) -> None:
    part = group("g", adapters=ONE, enable_prefix_caching=False)
    engine = ENGINE.replace(quantization="fp8", kv_cache_dtype="fp8")
    given = parsed(words_of(tmp_path, plan_of(part, engine=engine)))
    assert given["--quantization"] == ["fp8"]
    assert given["--kv-cache-dtype"] == ["fp8_e4m3"]
    assert given["--disable-radix-cache"] == []
    with pytest.raises(InputError, match="engine quantization: must be fp8 or absent"):
        export(plan_of(part, engine=engine.replace(quantization="int4")), "sglang")


def test_port_and_further_flags_come_from_the_caller(tmp_path: Path) -> None:
    script = export(small_plan(), "sglang")["launch/g0-1.sh"]
    argv, _, _ = launched(
        tmp_path, script, "--api-key", "a b", program="python3", PORT="1234", ADAPTER_ROOT="/with =,space"
    )
    given = parsed(argv[2:])
    assert given["--port"] == ["1234"]
    assert given["--api-key"] == ["a b"]
    assert given["--lora-paths"] == ["a=/with =,space/a", "shared=/with =,space/shared"]


def test_a_missing_adapter_root_is_an_error(tmp_path: Path) -> None:
    script = export(small_plan(), "sglang")["launch/g0-1.sh"]
    argv, _, done = launched(tmp_path, script, program="python3")
    assert argv == []
    assert "ADAPTER_ROOT: must name the directory" in done.stderr


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_plan_is_quoted(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = text.replace(" ", "_")
    part = group("g", adapters=((name, 8, 1.0, f"/p/{text}"), (f"{name}2", 8, 1.0, None)))
    words = words_of(tmp_path, plan_of(part))
    assert parsed(words)["--lora-paths"] == [f"{name}=/p/{text}", f"{name}2=/adapters/{name}2"]
    assert not (tmp_path / "pwned").exists()


def test_a_line_break_in_a_comment_starts_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = ENGINE.model_copy(update={"kv_cache_dtype": "x\ntouch pwned"})
    part = group("g", adapters=ONE).model_copy(update={"profile": "x\ntouch pwned"})
    plan = plan_of(group("g", adapters=ONE)).model_copy(update={"groups": (part,), "engine": engine})
    words_of(tmp_path, plan)
    assert not (tmp_path / "pwned").exists()


def test_every_flag_has_its_reason_and_every_loss_is_in_the_script() -> None:
    part = group("g", adapters=ONE).replace(cache=Cache(policy="gdsf"))
    plan = plan_of(part, engine=ENGINE.replace(fully_sharded_loras=True))
    comments = [line for line in export(plan, "sglang")["launch/g.sh"].splitlines() if line[:1] == "#"]
    assert "# --max-loras-per-batch=2: adapter slots of the plan" in "\n".join(comments)
    assert "# Its scheduler, queues and cache policy are left out." in comments
    losses = EXPORTERS["sglang"].losses(plan)
    assert len(losses) == 3
    assert "not by vllm-0.32-async, which the twin followed" in losses[0].text
    assert f"as model {MODEL}:ADAPTER" in losses[1].text
    for loss in losses:
        assert f"# Differs from the plan: {loss.text}." in comments
        assert (loss.router, loss.everywhere) == (None, False)


def test_a_plan_without_adapter_slots_is_refused() -> None:
    engine = PlanEngine(name="s-lora", version="c1ddf48", rules="slora")
    with pytest.raises(InputError, match="must be an engine with adapter slots, which SGLang has"):
        export(plan_of(group("g", adapters=ONE), engine=engine), "sglang")


@pytest.mark.oracle
def test_sglang_reads_the_command_lines_as_they_are_meant(tmp_path: Path) -> None:
    python = os.environ.get("CAPPLAN_SGLANG_PYTHON")
    if not python:
        pytest.skip("CAPPLAN_SGLANG_PYTHON names no Python that has sglang (tests/deploy/README.md)")
    part = group("g", adapters=(("a", 8, 1.0, "/p/x=1"), ("b", 8, 1.0, "/p,q"), ("c:d", 8, 1.0, "/p/ ")))
    engine = ENGINE.replace(quantization="fp8", kv_cache_dtype="fp8")
    restricted = group("g", adapters=ONE, enable_prefix_caching=False)
    plans = [
        plan_of(part),
        plan_of(based(part)),
        plan_of(based(part).replace(adapters=())),
        plan_of(restricted, engine=engine),
        plan_of(restricted, engine=engine.replace(target_modules=ALL_MODULES)),
    ]
    lines = [words_of(tmp_path, plan) for plan in plans]
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    done = subprocess.run(
        [python, HERE / "parse_sglang.py", tmp_path / "lines.json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plain, with_base, empty, small, few = json.loads(done.stdout.splitlines()[-1])
    args = part.engine_args
    expected: dict[str, Any] = {
        "model_path": MODEL,
        "port": 8000,
        "tp_size": 1,
        "enable_lora": True,
        "max_loras_per_batch": 2,
        "max_loaded_loras": 3,
        "max_lora_rank": 16,
        "max_running_requests": args.max_num_seqs,
        "chunked_prefill_size": args.max_num_batched_tokens,
        "mem_fraction_static": 0.9,
        "context_length": args.max_model_len,
        "disable_radix_cache": False,
        "quantization": None,
        "kv_cache_dtype": "auto",
        "lora_target_modules": None,
        "lora_paths": {"a": "/p/x=1", "b": "/p,q", "c:d": "/p/ "},
    }
    assert plain == expected
    assert with_base == {**expected, "max_loras_per_batch": 3}
    assert (empty["lora_paths"], empty["lora_target_modules"]) == ({}, ["all"])
    assert (small["quantization"], small["kv_cache_dtype"]) == ("fp8", "fp8_e4m3")
    assert small["disable_radix_cache"] is True
    assert few["lora_target_modules"] == sorted(ALL_MODULES)
