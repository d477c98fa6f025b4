"""Good inputs have no finding at all."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from capplan import InputError, Plan
from capplan.deploy import EXPORTERS, export
from capplan.deploy.lint import lint
from capplan.deploy.lint._lint import read_input
from capplan.deploy.lint._parts import Server
from capplan.spec import PlanBase
from capplan.workload import presets
from tests.cli.examples import MODEL, group, plan_of, small_plan
from tests.deploy.lint.inputs import (
    adapter,
    chart,
    crd,
    documents,
    dynamo,
    kserve,
    lora_adapter,
    one_group,
    pod,
    ray,
    serve,
    sglang,
    workload,
    write,
)
from tests.deploy.test_crds import queued

ROOT = Path(__file__).resolve().parents[3]
PROFILE = "h100-64g/llama-3.1-8b/vllm-0.8.5"
SETTINGS = {"ray": {"adapters-path": "s3://bucket/adapters"}}


def mixed_plan() -> Plan:
    """Return a plan with adapters of every source, base traffic, and a group of two GPUs without slots."""
    adapters = (("hub", 8, 1.0, "org/adapter"), ("root", 320, 1.0, None), ("folder", 8, 1.0, "/srv/folder"))
    base = PlanBase(rate_rps=1.0, share=0.5)
    first = group("first", adapters, max_lora_rank=320, max_loras=1).replace(base=base)
    without_slots = first.engine_args.replace(max_loras=0, max_lora_rank=0)
    second = first.replace(id="second", adapters=(), engine_args=without_slots, tp=2)
    return plan_of(first, second)


def newest_plan() -> Plan:
    """Return a plan for a version of vLLM whose flags all exist, with every optional one."""
    engine = small_plan().engine.replace(
        version="0.32.0",
        rules="vllm-0.32-sync",
        target_modules=("q_proj", "v_proj"),
        fully_sharded_loras=True,
        quantization="fp8",
        kv_cache_dtype="fp8",
    )
    many = tuple((f"a{i}", 1, 1.0, None) for i in range(40))
    return plan_of(group("g", many, replicas=2, max_lora_rank=1, enable_prefix_caching=False), engine=engine)


def queued_plan() -> Plan:
    """Return a plan with queues, which llm-d has as objectives."""
    return plan_of(queued("g"))


PLANS: dict[str, Callable[[], Plan]] = {
    "small": small_plan,
    "mixed": mixed_plan,
    "newest": newest_plan,
    "s3": lambda: one_group(("a", 8, "s3://bucket/a"), ("b", 16, "s3://bucket/b")),
}


def exported(folder: Path, plan: Plan, target: str) -> Path:
    """Write an export."""
    for name, text in export(plan, target, settings=SETTINGS.get(target)).items():
        write(folder, text, name)
    return folder


def findings(*paths: Path | str, **options: Any) -> list[str]:
    return [f"{each.id} {each.reason}" for each in lint(*paths, **options)]


SERVING = [target for target, exporter in EXPORTERS.items() if exporter.serves]
EXPORTS = [
    (name, target) for name in PLANS for target in SERVING if (name, target) != ("s3", "production-stack")
]


@pytest.mark.parametrize(("name", "target"), EXPORTS, ids=["-".join(each) for each in EXPORTS])
def test_an_export_has_no_finding(name: str, target: str, tmp_path: Path) -> None:
    plan = PLANS[name]()
    folder = exported(tmp_path, plan, target)
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "gateway"]
    assert findings(folder) == []
    assert findings(*files) == []
    assert findings(*files, plan=plan) == []


@pytest.mark.parametrize("target", SERVING)
def test_every_server_of_an_export_is_read(target: str, tmp_path: Path) -> None:
    """No finding means something only if the servers were seen."""
    plan = small_plan()
    parts = read_input(exported(tmp_path, plan, target))
    servers = [part for part in parts if isinstance(part, Server)]
    # One for each group, or for each of its replicas.
    assert len(servers) in (len(plan.groups), sum(each.replicas for each in plan.groups))
    assert all(each.has_lora for each in servers)
    assert {each.gpus for each in servers} <= {1, None}


def test_an_example_has_no_finding() -> None:
    assert findings(ROOT / "examples" / "chat-96" / "workload.yaml") == []


def test_an_example_without_objectives_has_that_warning_alone() -> None:
    assert [each.id for each in lint(ROOT / "examples" / "support-12" / "workload.yaml")] == ["CAP602"]


WITHOUT_TRACE = [name for name, each in presets().items() if each.slo and not each.file]


@pytest.mark.parametrize("name", WITHOUT_TRACE[::8])
def test_a_preset_with_objectives_has_no_finding(name: str, tmp_path: Path) -> None:
    assert findings(write(tmp_path, presets()[name].yaml(PROFILE))) == []


def _good(folder: Path) -> Iterator[tuple[Path, Plan | None]]:
    """Yield hand-written inputs, with a plan that they follow."""
    plan = one_group(("a", 16, None))
    lora = "--enable-lora --max-loras 2 --lora-modules a=/adapters/a"
    image = "vllm/vllm-openai:v0.8.5"
    yield write(folder / "1", serve(lora)), plan
    yield write(folder / "2", serve("--enable-lora --max_loras=4 --max_cpu_loras=8 -tp 2")), None
    yield write(folder / "3", f"docker run --gpus all {image} --model {MODEL} {lora}\n"), plan
    yield write(folder / "4", f"Start it:\n\n    $ vllm serve {MODEL} \\\n        {lora} &\n"), plan
    yield write(folder / "5", sglang("--lora-paths a=/a b=/b")), None
    yield write(folder / "6", sglang("--max-lora-rank 16 --lora-target-modules all")), None
    yield documents(folder / "7", pod("--enable-lora", "--max-lora-rank=8", image=image)), plan
    yield documents(folder / "8", pod("-tp", "4", "-dp", "2", gpus=8)), None
    yield documents(folder / "9", kserve(maxAdapters=1, maxRank=16, maxCpuAdapters=2)), None
    yield documents(folder / "10", crd("model.aibrix.ai/v1alpha1", "ModelAdapter", replicas=1)), None
    yield documents(folder / "11", lora_adapter("x"), lora_adapter("y", "b")), None
    yield documents(folder / "12", chart(), lora_adapter("base")), None
    yield documents(folder / "13", ray()), plan
    yield documents(folder / "14", *dynamo("--max-loras", "2", "--max-cpu-loras", "3")), None
    yield write(folder / "15", workload()), None
    yield adapter(folder), one_group(("a", 4, None))
    yield adapter(folder, "other"), plan
    yield write(folder / "16", serve(f"--enable-lora --lora-modules a={folder / 'a'}")), None
    yield write(folder / "17", serve("--lora-modules", """'{"name": "a", "path": "/x=y"}'""")), plan


@pytest.mark.parametrize("number", range(19))
def test_a_good_input_has_no_finding(number: int, tmp_path: Path) -> None:
    path, plan = list(_good(tmp_path))[number]
    assert findings(path, plan=plan) == []


def test_queues_are_not_verified_and_nothing_else(tmp_path: Path) -> None:
    folder = exported(tmp_path, queued_plan(), "llm-d")
    assert {each.id for each in lint(folder)} == {"CAP101"}


UNKNOWN = {
    "prose": "Some text about LoRA.\n",
    "empty": "",
    "json": '{"a": 1}',
    "yaml": "a: 1\n",
    "python": "import vllm\n",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_kind_is_refused_with_what_is_understood(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, UNKNOWN[name], "workload.yaml")
    for each in (path, tmp_path):
        with pytest.raises(InputError, match="is not understood: must be a workload"):
            lint(each)


def test_a_missing_file_and_an_unreachable_server_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        lint(tmp_path / "missing")
    with pytest.raises(InputError, match="cannot be reached"):
        lint("http://127.0.0.1:9")
