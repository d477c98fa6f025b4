import ast
import json
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import capplan
from tests.conftest import ROOT, output_of_python

HEAVY = ("numba", "pandas", "sklearn", "torch", "xgboost")


def loaded_after(statement: str) -> list[str]:
    """Return which heavy libraries a fresh interpreter has loaded after the statement."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    result: list[str] = json.loads(output_of_python("-c", program).splitlines()[-1])
    return result


def test_importing_capplan_loads_no_heavy_library() -> None:
    assert loaded_after("import capplan") == []


def test_listing_the_public_names_loads_no_heavy_library() -> None:
    assert loaded_after("import capplan; dir(capplan); capplan.__version__; capplan.errors") == []


def test_loaded_after_sees_a_heavy_library() -> None:
    assert "pandas" in loaded_after("import pandas")


@pytest.mark.parametrize("statement", ["from capplan import simulate", "from capplan import plan"])
def test_planning_and_simulating_load_no_torch(statement: str) -> None:
    assert "torch" not in loaded_after(statement)


@pytest.mark.parametrize("name", capplan.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(capplan, name) is not None


def test_dir_is_the_public_surface() -> None:
    assert sorted(dir(capplan)) == sorted(capplan.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulatte'"):
        capplan.simulatte  # type: ignore[attr-defined]  # noqa: B018


def test_the_module_runs_from_a_bare_checkout() -> None:
    assert "plan" in output_of_python("-m", "capplan", "--help")


PROGRAM = """
from capplan import Adapter, EngineConfig, InfeasibleError, Lengths, Slo, Workload, export, plan, simulate

workload = Workload(
    base_model="meta-llama/Llama-3.1-8B-Instruct",
    adapters=[Adapter(name=f"a{i}", rank=8, rate_rps=0.2) for i in range(64)],
    prompt_tokens=Lengths(mean=223, std=245),
    output_tokens=Lengths(mean=194),
    slo=Slo(ttft_p99_s=5.0),
    engine=EngineConfig(max_loras=8),
)
result = simulate(workload, "h100-64g/llama-3.1-8b/vllm-0.8.5", a_max=32)
throughput: float = result.throughput_tok_s
try:
    answer = plan(workload, gpus=4, profile="h100-64g/llama-3.1-8b/vllm-0.8.5")
except InfeasibleError as error:
    raise SystemExit(error.reason) from None
slots: int = answer.groups[0].engine_args.max_loras
files: dict[str, str] = export(answer)
"""


@pytest.mark.long
def test_a_program_passes_strict_mypy_without_plugins(tmp_path: Path) -> None:
    """Editors and other type checkers have no plugin of pydantic."""
    program, config = tmp_path / "program.py", tmp_path / "mypy.ini"
    program.write_text(PROGRAM)
    config.write_text("[mypy]\nstrict = True\nfollow_imports = silent\nignore_missing_imports = True\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir"]
    cache = ROOT / ".mypy_cache" / "plain"
    done = subprocess.run(
        [*command, str(cache), str(program)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout


def modules() -> dict[str, Path]:
    folders = os.walk(ROOT / "capplan", followlinks=True)
    files = [Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")]
    named = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    return {name.removesuffix(".__init__"): path for name, path in zip(named, files, strict=True)}


def rooms(face: Path) -> dict[str, str]:
    """Names of a face with the rooms that they are from, relative to the package."""
    stub = face.with_suffix(".pyi")
    tree = ast.parse(stub.read_text(encoding="utf-8")) if stub.is_file() else ast.Module([], [])
    froms = [each for each in tree.body if isinstance(each, ast.ImportFrom)]
    return {name.name: str(each.module) for each in froms for name in each.names}


def test_no_imports_go_round_in_a_circle() -> None:
    """Imports for types only and inside functions count, and names of faces lead to their rooms."""
    found = modules()
    faces = {name: rooms(path) for name, path in found.items() if path.name == "__init__.py"}
    graph: dict[str, set[str]] = {name: set() for name in found}
    for name, path in found.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in found:
                for each in node.names:
                    room = faces.get(node.module, {}).get(each.name, each.name)
                    target = f"{node.module}.{room}"
                    graph[name].add(target if target in found else node.module)
    order = TopologicalSorter({name: targets - {name} for name, targets in graph.items()})
    order.prepare()  # raises CycleError, which names the circle
