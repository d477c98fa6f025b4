import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import capplan
from capplan import InfeasibleError, InputError
from capplan.cli.app import _COMMANDS, app
from capplan.spec import FORECASTS
from tests.cli.conftest import ROOT, Process, Run, command, environment, error_line

RUNNER = "from typer.testing import CliRunner; from capplan.cli.app import app; CliRunner()"
COMMANDS = tuple(dict.fromkeys(path.split()[0] for path in _COMMANDS))


@pytest.mark.parametrize("arguments", [("--help",), *((name, "--help") for name in COMMANDS)])
def test_help_is_at_hand(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert "Usage: capplan" in result.stdout


def test_help_lists_every_command(run: Run) -> None:
    text = run("--help").stdout
    assert all(f" {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", ["serve", "simulate"])
def test_help_of_forecast_names_every_forecast(name: str) -> None:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    (option,) = (each for each in commands[name].params if each.name == "forecast")
    assert all(forecast in option.help for forecast in FORECASTS)


def test_help_lines_are_those_of_the_commands() -> None:
    def lines(group: Any, path: str) -> Iterator[tuple[str, str]]:
        for name, child in group.commands.items():
            yield f"{path}{name}", child.help.split("\n")[0]
            yield from lines(child, f"{path}{name} ") if hasattr(child, "commands") else ()

    found = dict(lines(typer.main.get_command(app), ""))
    assert found == _COMMANDS, "_COMMANDS has the first lines of the commands' docstrings"


def test_version_is_the_package_version(run: Run) -> None:
    assert run("--version").stdout == f"capplan {capplan.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message", "command"),
    [
        ("simulte w.yaml", "capplan: no such command 'simulte'. Did you mean 'simulate'?", "capplan"),
        ("registry ad", "capplan registry: no such command 'ad'", "capplan registry"),
        ("--bogus", "--bogus: is not an option of capplan", "capplan"),
        ("--max-adapters x plan", "--max-adapters: must be integer", "capplan"),
        (
            "plan w.yaml --gpu 3",
            "--gpu: is not an option of capplan plan; did you mean --gpus",
            "capplan plan",
        ),
        ("plan", "WORKLOAD: is required", "capplan plan"),
        ("plan w --gpus x", "--gpus: must be integer", "capplan plan"),
        ("plan w --gpus", "--gpus: requires an argument", "capplan"),
        ("plan w --quiet=3", "--quiet: does not take a value", "capplan"),
        ("profiles a b", "capplan profiles: got unexpected extra argument", "capplan profiles"),
        ("schema plans", "plan|workload|profile: 'plans' is not one of 'plan'", "capplan schema"),
        ("simulate w --gpus-per-link 0", "--gpus-per-link: must be greater than", "capplan simulate"),
        ("calibrate", "--output: is required", "capplan calibrate"),
    ],
)
def test_wrong_usage_is_one_line_with_the_next_step(run: Run, words: str, message: str, command: str) -> None:
    line = error_line(run(*words.split()))
    assert line.startswith(f"error: {message}")
    assert f"; `{command} --help` shows what it takes" in line


def test_an_input_error_is_one_line(run: Run, tmp_path: Path) -> None:
    assert "absent.json: cannot be read: No such file" in error_line(run("explain", tmp_path / "absent.json"))


def test_debug_shows_the_traceback_before_the_line(run: Run, tmp_path: Path) -> None:
    result = run("--debug", "explain", tmp_path / "absent.json")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (InputError("must be so", 3, "key"), 2, "error: key: must be so (got 3)"),
        (InfeasibleError("memory: too\nsmall", "memory"), 3, "error: memory: too small"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_kind_of_end_has_its_status(error: BaseException, status: int, text: str) -> None:
    program = (
        "import sys, pickle\n"
        "from capplan import datasets\n"
        "from capplan.errors import *\n"
        f"def fail(): raise {error!r}\n"
        "datasets.list_profiles = fail\n"
        "from capplan.cli import main\n"
        "sys.argv[1:] = ['profiles']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"{text}\n")


@pytest.mark.parametrize("words", [["schema", "plan"], ["explain"]], ids=["document", "table"])
def test_a_reader_that_goes_away_is_no_error(words: list[str], plan_json: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    given = [*words, plan_json] if words == ["explain"] else words
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            command(given), env=environment(), stdout=closed, stderr=subprocess.PIPE, timeout=120
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("words", ["profiles", "schema plan", "--help", "--version"])
@pytest.mark.parametrize(("redirection", "reason"), [(">/dev/full", "No space left"), (">&-", "is closed")])
def test_output_that_cannot_be_written_is_one_line(words: str, redirection: str, reason: str) -> None:
    line = f"exec {sys.executable} -m capplan {words} {redirection}"
    done = subprocess.run(["sh", "-c", line], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_a_name_that_the_system_refuses_is_one_line() -> None:
    words = ["profile", "kernels", "-o", "x" * 5000, "--quiet"]
    done = subprocess.run(command(words), env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: xxx")
    assert done.stderr.endswith("cannot be used: File name too long\n")
    assert len(done.stderr) < 2000


def test_nowhere_to_write_an_error_is_no_traceback(tmp_path: Path) -> None:
    line = f"exec {sys.executable} -m capplan profiles {tmp_path}/absent.json 2>&-"
    done = subprocess.run(["sh", "-c", line], env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    "statement",
    [
        "import capplan.cli",
        f"{RUNNER}.invoke(app, ['--help'])",
        f"{RUNNER}.invoke(app, ['schema', 'plan'])",
        f"{RUNNER}; [CliRunner().invoke(app, [*name.split(), '--help']) for name in {list(_COMMANDS)}]",
    ],
)
def test_asking_for_help_loads_no_heavy_library(statement: str) -> None:
    heavy = ("numba", "pandas", "sklearn", "torch", "xgboost", "optuna")
    program = f"{statement}\nimport sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_and_the_function_are_one_command_line(process: Process, run: Run) -> None:
    done = process("schema", "workload")
    assert (done.returncode, done.stdout) == (0, run("schema", "workload").stdout)


@pytest.mark.parametrize("entry", ["module", "script"])
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_ctrl_c_is_one_line_from_the_first_import_on(tmp_path: Path, entry: str, delay_s: float) -> None:
    """The case of ../shared/cases/37-sigint-start, from the first line of capplan's own code on."""
    marker = tmp_path / "marker"
    # A hook that tells when the package is imported; the signal then comes after a delay.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'capplan.cli':\n"
        f"            open({str(marker)!r}, 'w').close()\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    script = tmp_path / "capplan"
    script.write_text("import sys\nfrom capplan.__main__ import main\nsys.exit(main())\n")  # as pip writes it
    words = ["-m", "capplan"] if entry == "module" else [str(script)]
    workload = ROOT / "examples" / "chat-96" / "workload.yaml"
    process = subprocess.Popen(
        [sys.executable, *words, "plan", str(workload), "-o", str(tmp_path / "plan.json")],
        env={**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    lines = [line for line in err.splitlines() if not line.startswith("compiling the ")]
    assert (process.returncode, out, lines) == (130, "", ["interrupted"])
    assert not (tmp_path / "plan.json").exists()


def test_an_interrupt_that_a_module_suppresses_on_import_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'numba':\n"
        "            try:\n"
        "                signal.raise_signal(signal.SIGINT)\n"
        "            except BaseException:\n"
        "                pass\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    workload = ROOT / "examples" / "chat-96" / "workload.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "capplan", "plan", str(workload), "-o", str(tmp_path / "plan.json")],
        env={**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (130, "", "interrupted")
    assert not (tmp_path / "plan.json").exists()


def test_the_installed_command_starts_where_ctrl_c_is_handled() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"capplan": "capplan.__main__:main"}


def test_a_job_whose_shell_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    program = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "import sys; sys.argv = ['capplan', '--version']\n"
        "from capplan.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: print(signal.getsignal(signal.SIGINT).name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "SIG_IGN"
