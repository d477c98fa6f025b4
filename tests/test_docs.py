"""The documentation is true: generated pages are complete, links exist, command lines parse, programs run."""

import re
import runpy
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TEXT = frozenset(
    (".cfg", ".in", ".j2", ".json", ".md", ".out", ".py", ".svg", ".toml", ".txt", ".yaml", ".yml")
)
PAGES = tuple(
    sorted([ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "examples" / "README.md", *DOCS.rglob("*.md")])
)
OF_VLLM = {
    *("--async-scheduling", "--no-async-scheduling", "--fully-sharded-loras", "--lora-target-modules"),
    *("--save-result", "--save-detailed", "--quantization"),
}
OF_SGLANG = {
    *("--chunked-prefill-size", "--context-length", "--disable-radix-cache", "--max-loaded-loras"),
    *("--max-loras-per-batch", "--max-running-requests", "--mem-fraction-static"),
}
OF_LOAD_TOOLS = {
    *("--backend", "--base-url", "--constraint", "--dataset-name", "--endpoint-type", "--ignore-eos"),
    *("--streaming", "--tasks", "--tokenizer", "--use-server-token-count"),
}
"""Flags of GuideLLM, AIPerf, lm-eval and `vllm bench serve`."""
PROGRAMS = (
    "start/first-plan.md",
    "how-it-works/twin.md",
    "how-it-works/cluster.md",
    "how-it-works/surrogates.md",
    "guides/workload.md",
)


def test_the_command_line_reference_explains_every_flag_of_every_command() -> None:
    import typer

    from capplan.cli.app import app

    page = runpy.run_path(str(DOCS / "hooks.py"))["cli_page"]()
    sections = dict(re.findall(r"^## `(capplan [^`]+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))

    def check(command: object, path: str) -> None:
        for name, child in getattr(command, "commands", {}).items():
            check(child, f"{path} {name}")
        if not getattr(command, "commands", None):
            rows = dict(re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", sections[path], re.MULTILINE))
            flags = [flag for each in command.params for flag in each.opts if flag.startswith("--")]  # type: ignore[attr-defined]
            explained = " ".join(rows)
            assert [flag for flag in flags if flag != "--help" and flag not in explained] == []

    check(typer.main.get_command(app), "capplan")


@pytest.mark.parametrize("name", ["WorkloadFile", "Plan", "Profile"])
def test_every_key_of_a_document_is_described(name: str) -> None:
    import capplan.spec

    schema = getattr(capplan.spec, name).model_json_schema()
    parts = [schema, *schema["$defs"].values()]
    missing = [
        key
        for part in parts
        for key, value in part.get("properties", {}).items()
        if "description" not in value
    ]
    assert missing == []


def test_links_of_all_pages_exist() -> None:
    generated = {
        DOCS / "reference" / f"{name}.md" for name in ("cli", "workload", "plan", "profile", "routers")
    }
    gallery = DOCS / "start" / "gallery.md"
    shown = slugs(runpy.run_path(str(DOCS / "hooks.py"))["gallery_page"]())
    missing = []
    for page in (*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"):
        for target, _, anchor in re.findall(
            r"\]\(([^)#\s]*)(#([^)\s]+))?\)", page.read_text(encoding="utf-8")
        ):
            path = (page.parent / target).resolve() if target else page
            if "://" in target or path in generated or (path == gallery and (not anchor or anchor in shown)):
                continue
            if not path.exists() or (anchor and anchor not in anchors(path)):
                missing.append((page.name, target, anchor))
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    return slugs(page.read_text(encoding="utf-8"))


def slugs(text: str) -> set[str]:
    """Return the anchors of headings, as the site makes them."""
    from markdown.extensions.toc import slugify

    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {slugify(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each).replace("`", ""), "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_command_lines_of_a_page_are_those_of_the_programs(page: Path) -> None:
    import typer

    from capplan.cli.app import app

    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^\$ (?:[A-Z_]+=\S+ )*capplan ([^|>&\n]*)", text, re.MULTILINE):
        path, command, words = called(app, shlex.split(line, comments=True))
        try:
            command.make_context(path, words)
        except typer.TyperException as error:
            pytest.fail(f"{line}: {error.format_message()}")
    for line in re.findall(r"`capplan ([a-z][^`]*)`", text):
        _, command, words = called(app, line.split())
        known = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)} | {"--help"}
        given = {word.strip("[],").partition("=")[0] for word in words if word.strip("[").startswith("-")}
        assert {flag for flag in given if re.fullmatch(r"--?[a-z][a-z-]*", flag)} <= known, line
    for module, line in re.findall(r"python -m ((?:benchmarks|capplan|tests)[\w.]*)([^|>&`\n]*)", text):
        sources = [ROOT / "benchmarks" / "common.py", *module_files(module)]
        code = "".join(file.read_text(encoding="utf-8") for file in sources)
        assert [flag for flag in re.findall(r"(?<= )--[a-z-]+", line) if f'"{flag}"' not in code] == [], (
            module
        )


def called(app: object, words: list[str]) -> tuple[str, Any, list[str]]:
    """Return a command by the first words of a line, its path, and the other words."""
    import typer

    command, path = typer.main.get_command(app), "capplan"  # type: ignore[arg-type]
    while words and words[0] in getattr(command, "commands", {}):
        command, path, words = command.commands[words[0]], f"{path} {words[0]}", words[1:]  # type: ignore[attr-defined]
    assert path != "capplan" or words[:1] in (["COMMAND"], ["--version"]), words
    return path, command, words


def module_files(module: str) -> list[Path]:
    """Return the sources of a program: its module, or all of its package."""
    stem = ROOT.joinpath(*module.split("."))
    files = [stem.with_suffix(".py")] if stem.with_suffix(".py").is_file() else sorted(stem.rglob("*.py"))
    assert files, module
    return files


def test_every_flag_in_the_pages_is_one_of_some_program() -> None:
    import typer

    from capplan.cli.app import app

    def flags(command: Any) -> set[str]:
        own = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
        return own.union(*map(flags, getattr(command, "commands", {}).values()))

    folders = ("benchmarks", "profiling", "tests/fuzz", "tests/equal")
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py")]
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    known = (
        flags(typer.main.get_command(app))
        | set(re.findall(r'"(--[a-z-]+)"', code))
        | OF_VLLM
        | OF_SGLANG
        | OF_LOAD_TOOLS
        | {"--flag", "--rm"}
    )
    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text(encoding="utf-8")))
        assert named - known == set(), page


def test_the_errors_of_composed_profiles_are_those_of_their_fit() -> None:
    from capplan.models.compose._profile import CARRIED_STD_ERROR, composition_terms

    terms = composition_terms()
    left_out = [each.error_percent for each in terms.left_out]
    page = (DOCS / "guides" / "calibrate.md").read_text(encoding="utf-8")
    assert f"mean ITL {terms.error_percent:.1f} % off on measured engines" in page
    assert f"{min(left_out):.1f} to {max(left_out):.1f} % on GPUs, models and `tp` left out" in page
    assert f"with a standard error of {100 * CARRIED_STD_ERROR:.0f} %" in page


def test_the_gpus_of_composed_profiles_are_those_with_operators() -> None:
    from capplan.models.compose import SYSTEMS

    page = (DOCS / "how-it-works" / "compose.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| 1, 2, 4, 8 \|$", page, re.MULTILINE)
    assert rows == [(each.sheet_key, each.key) for each in (SYSTEMS[i] for i in (0, 1, 2, 4, 3, 5))]


def test_the_readme_counts_the_profiles_that_ship() -> None:
    from capplan import list_profiles, load_profile

    kinds = {name: load_profile(name).provenance.kind.value for name in list_profiles()}
    composed = [name for name, kind in kinds.items() if kind == "composed"]
    published = [name for name, kind in kinds.items() if kind == "published"]
    assert (len(published), len(kinds)) == (3, len(composed) + 3)
    words = "Three are fitted to runs on an H100 cluster; over 100 of seven more GPUs are composed"
    assert words in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(composed) > 100
    assert len({name.split("/")[0] for name in composed} - {name.split("/")[0] for name in published}) == 7


def test_the_guide_to_deploying_names_every_flag_of_a_script() -> None:
    from capplan.deploy import export
    from tests.cli.examples import small_plan

    files = export(small_plan(), "vllm", port=8000, runtime_updates=True)
    scripts = "".join(text for name, text in files.items() if name.endswith(".sh"))
    page = (DOCS / "guides" / "deploy.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z][a-z-]+", scripts)) | set(re.findall(r"VLLM_[A-Z_]+(?==)", scripts))
    assert {name for name in named if f"`{name}" not in page} == set()


def test_pages_list_the_routers_targets_and_step_forms() -> None:
    from capplan.deploy import EXPORTERS
    from capplan.models._step_latency import FORMS
    from capplan.spec import ROUTER_NAMES

    def missing(page: str, names: Iterable[str]) -> list[str]:
        text = (DOCS / page).read_text(encoding="utf-8")
        return [name for name in names if f"`{name}`" not in text and f"--target {name}" not in text]

    assert missing("how-it-works/cluster.md", ROUTER_NAMES) == []
    assert missing("guides/deploy.md", EXPORTERS) == []
    assert missing("how-it-works/calibration.md", [form.name for form in FORMS]) == []


def test_install_lists_the_targets_of_the_makefile() -> None:
    targets = set(
        re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    page = (DOCS / "start" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `make ([a-z-]+)` \|", page, re.MULTILINE)) <= targets
    assert {"plan", "test", "test-all", "test-newest"} <= targets


def test_the_defaults_in_the_guide_to_workload_files_are_those_of_the_schema() -> None:
    from capplan.spec import WorkloadFile

    schema = WorkloadFile.model_json_schema()
    known: dict[str, list[object]] = {}
    for part in (schema, *schema["$defs"].values()):
        for key, value in part.get("properties", {}).items():
            found = value.get("default")
            known.setdefault(key, []).extend(found.values() if isinstance(found, dict) else [found])
    page = (DOCS / "guides" / "workload.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| (?:`([\w.-]+)`|([\d.]+)) \|$", page, re.MULTILINE)
    stated = [(key, word or number) for key, word, number in rows if set(known.get(key, ())) - {None}]
    assert len(stated) > 20
    assert [(k, d) for k, d in stated if yaml.safe_load(d) not in known[k]] == []


def test_the_limits_of_the_security_page_are_the_defaults_of_their_flags() -> None:
    import typer

    from capplan.cli.app import app

    root: Any = typer.main.get_command(app)
    params = [*root.commands["serve"].params, *root.params]
    defaults = {flag: each.default for each in params for flag in each.opts}
    units = {"": 1, "s": 1, "KiB": 2**10, "MiB": 2**20, "days": 86_400}
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| ([\d,]+) ?(\w*) \| `(--[a-z-]+)`", page, re.MULTILINE)
    assert len(rows) > 10
    for number, unit, flag in rows:
        assert float(number.replace(",", "")) * units[unit] == defaults[flag], flag


def test_the_command_line_reference_names_environment_variables() -> None:
    page = runpy.run_path(str(DOCS / "hooks.py"))["cli_page"]()
    (row,) = re.findall(r"^\| `--admin-api-key[^|]*\|([^|]*)\|", page, re.MULTILINE)
    assert "`CAPPLAN_ADMIN_API_KEY`" in row


def test_no_tracked_file_has_a_merge_conflict() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    marker = re.compile(r"^(<<<<<<<|=======|>>>>>>>)( |$)", re.MULTILINE)
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in TEXT and path.is_file() and marker.search(path.read_text(encoding="utf-8")):
            found.append(name)
    assert found == []


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_programs_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        if "workers=" not in block:  # worker processes need a main module
            exec(block, names)
