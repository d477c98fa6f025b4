"""`capplan serve`: flags, and the process."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pyarrow.parquet as pq
import pytest

from capplan import server
from capplan.cli import options
from capplan.engine import StepRecord
from capplan.server import InstanceConfig, ServerLimits, ServerSettings
from tests.cli.conftest import Run, command, environment, error_line, run

pytestmark = pytest.mark.process

__all__ = ["run"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[InstanceConfig]:
    """Instances that would have been started."""
    instances: list[InstanceConfig] = []

    def start(instance: InstanceConfig, ready: Any) -> int:
        instances.append(instance)
        ready("http://127.0.0.1:1")
        return 0

    monkeypatch.setattr(server, "run_instance", start)
    return instances


def test_flags_become_settings(run: Run, started: list[InstanceConfig], tmp_path: Path) -> None:
    flags = (
        "--max-loras 4 --max-lora-rank 32 --max-num-seqs 16 --max-queue 8 --max-model-len 512 --dtype float32"
    )
    adapters = ["--lora-modules", "a=8", f"b={tmp_path}", "--lora-modules", "c=16"]
    result = run(
        "serve", "--model", "tiny-llama", *adapters, *flags.split(), "--port", 0, "--rules", "vllm-0.8"
    )
    assert result.exit_code == 0
    assert result.stdout == "serving tiny-llama and 3 adapters on http://127.0.0.1:1\n"
    [instance] = started
    assert instance.adapters == {"a": 8, "b": tmp_path, "c": 16}
    assert instance.server.max_requests == 24
    assert instance.server.host == "127.0.0.1"
    assert instance.server.drain_timeout_s == ServerSettings("tiny-llama").drain_timeout_s
    assert instance.server.limits == ServerLimits()
    wanted = {
        "max_loras": 4,
        "max_lora_rank": 32,
        "max_num_seqs": 16,
        "max_model_len": 512,
        "dtype": "float32",
    }
    assert {name: instance.engine[name] for name in wanted} == wanted
    assert instance.engine["rules"] == "vllm-0.8"
    assert instance.engine["max_adapters"] is None


def test_the_key_can_come_from_the_environment(
    run: Run, started: list[InstanceConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPPLAN_API_KEY", "secret")
    run("serve", "--model", "tiny-llama")
    monkeypatch.delenv("CAPPLAN_API_KEY")
    run("serve", "--model", "tiny-llama")
    assert [instance.server.api_key for instance in started] == ["secret", None]


POOL = ("--registry", "r.db", "--lora-root", ".", "--admin-api-key", "k", "--api-key", "x")


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.3:8000",
        "ftp://10.0.0.3",
        "http://",
        "http://:8000",
        "http://h:port",
        "http://[::1",
        "http://h/?x",
        "http://0.0.0.0:8000",
        "https://[::]:8000",
    ],
)
def test_a_server_url_that_other_servers_cannot_use_is_refused(
    run: Run, started: list[InstanceConfig], url: str
) -> None:
    result = run("serve", "--model", "tiny-llama", *POOL, "--server-url", url)
    assert (result.exit_code, started) == (2, [])
    assert result.stderr.startswith("error: --server-url: must be an http(s) URL")
    assert result.stderr.endswith(f"(got {url!r})\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "0:0::0"])
def test_a_server_of_a_pool_at_all_addresses_needs_a_url(
    run: Run, started: list[InstanceConfig], host: str
) -> None:
    flags = ("serve", "--model", "tiny-llama", *POOL, "--host", host)
    result = run(*flags)
    assert (result.exit_code, started) == (2, [])
    assert result.stderr.startswith("error: --server-url: is required if --host is a wildcard address")
    assert result.stderr.endswith(f"(got {host!r})\n")
    assert result.stderr.count("\n") == 1
    assert run(*flags, "--server-url", "http://[fd00::3]:8000/east").exit_code == 0
    assert run("serve", "--model", "tiny-llama", "--host", host, "--api-key", "x").exit_code == 0
    assert len(started) == 2


def test_lora_root_allows_further_adapters(run: Run, started: list[InstanceConfig], tmp_path: Path) -> None:
    run("serve", "--model", "tiny-llama", "--lora-root", tmp_path, "--admin-api-key", "admin")
    engine = started[0].engine
    assert engine["max_adapters"] > 100
    assert engine["max_lora_rank"] == 16


def test_a_public_host_without_a_key_is_warned_about(run: Run, started: list[InstanceConfig]) -> None:
    everywhere = ("serve", "--model", "tiny-llama", "--host", "0.0.0.0")
    assert "--api-key" in run(*everywhere).stderr
    assert "--api-key" not in run(*everywhere, "--api-key", "x").stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--model: is required"),
        ("--model no-such-model", "--model: must be a folder"),
        ("--model tiny-llama --lora-modules a", "--lora-modules: must be NAME=FOLDER or NAME=RANK"),
        ("--model tiny-llama --lora-modules a=8 a=9", "--lora-modules: must be unique"),
        ("--model tiny-llama --lora-modules a=900", "rank"),
        ("--model tiny-llama --lora-modules tiny-llama=8 --num-kv-blocks 8", "other names than the base"),
        ("--model tiny-llama --lora-modules \x1b[31m=8", "must be 1 to 256 printable characters"),
        ("--model tiny-llama --lora-modules a\udcff=8", "must be 1 to 256 printable characters"),
        ("--model tiny-llama --served-model-name \x9b31m", "--served-model-name: must be printable"),
        ("--model tiny-llama --max-header-bytes 0", "--max-header-bytes: must be >= 1"),
        ("--model tiny-llama --header-timeout-s nan", "--header-timeout-s: must be a finite number > 0"),
        ("--model tiny-llama --lora-modules a=no-such-folder", "no-such-folder"),
        ("--model tiny-llama --lora-modules a=16 --max-lora-rank 8", "at most max_lora_rank, 8"),
        ("--model tiny-llama --max-loras 0", "--max-loras: must be a whole number >= 1"),
        ("--model tiny-llama --max-queue -1", "--max-queue: must be >= 0"),
        ("--model tiny-llama --port 70000", "--port: must be a port"),
        ("--model tiny-llama --rules vllm", "rules: must be one of"),
        ("--model tiny-llama --scheduler lifo", "--scheduler: must be one of"),
        ("--model tiny-llama --scheduler {", "--scheduler:2: must be YAML"),
        ("--model tiny-llama --queues {classes:1}", "--queues"),
        ("--model tiny-llama --scheduler slora --cache lru", "--cache: must be none beside scheduler slora"),
        ("--model tiny-llama --scheduler sjf --rules slora", "--rules: does not go with --scheduler"),
        ("--model tiny-llama --cache lru --memory slots", "--memory: must be unified"),
        ("--model tiny-llama --lora-root no-such-folder", "--lora-root: must be a folder"),
        ("--model tiny-llama --lora-root .", "--lora-root: requires --admin-api-key"),
        ("--model tiny-llama --api-key x --admin-api-key x", "--admin-api-key: must be another key"),
        ("--model tiny-llama --lora-timeout-s 0", "--lora-timeout-s: must be"),
        ("--model tiny-llama --drain-timeout-s -1", "--drain-timeout-s: must be"),
        ("--model tiny-llama --host 203.0.113.1 --api-key x", "cannot be listened on"),
        ("--model tiny-llama --api-key=", "--api-key: must not be empty"),
        ("--model tiny-llama --cpu-affinity 0-99999", "--cpu-affinity: must name CPUs"),
        ("--model tiny-llama --steps-out no-such-folder/x.parquet", "no-such-folder"),
    ],
)
def test_invalid_flags_are_one_line_errors(run: Run, flags: str, message: str) -> None:
    assert message in error_line(run("serve", "--port", 0, *flags.split()))


def test_a_missing_extra_is_a_one_line_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "fastapi" else object())
    line = error_line(run("serve", "--model", "tiny-llama"))
    assert "pip install '.[engine]', in the checkout" in line
    assert "fastapi" in line


class Process:
    """A server process."""

    def __init__(self, *flags: object) -> None:
        arguments = command(["serve", "--model", "tiny-llama", "--port", 0, "--json", *flags])
        env = environment() | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.facts: dict[str, Any] = json.loads(line)

    def stream(self, **fields: Any) -> Any:
        asked = {"model": "a", "prompt": [1, 2, 3], "stream": True, "temperature": 0, "ignore_eos": True}
        body = json.dumps(asked | fields).encode()
        request = Request(f"{self.facts['url']}/v1/completions", body, {"Content-Type": "application/json"})
        return urlopen(request, timeout=60)

    def end(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out + err


@pytest.fixture
def server_process(tmp_path: Path) -> Iterator[Process]:
    adapters = ("--lora-modules", "a=8", "b=16", "--max-loras", 1, "--rules", "vllm-0.8")
    process = Process(*adapters, "--steps-out", tmp_path / "steps.parquet")
    yield process
    process.process.kill()
    process.process.communicate()


def test_a_process_serves_drains_and_writes_its_records(server_process: Process, tmp_path: Path) -> None:
    assert server_process.facts["model"] == "tiny-llama"
    assert server_process.facts["adapters"] == 2
    assert b"[DONE]" in server_process.stream(model="b", max_tokens=3).read()
    assert not (tmp_path / "steps.parquet").exists()
    with server_process.stream(max_tokens=300) as running:
        running.readline()
        server_process.process.send_signal(signal.SIGTERM)
        events = running.read().decode().split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    status, printed = server_process.end()
    assert status == 0
    assert "Traceback" not in printed
    table = pq.read_table(tmp_path / "steps.parquet")
    assert tuple(table.column_names) == StepRecord._fields
    assert table.num_rows == 303
    assert sum(table["loads"].to_pylist()) >= 2
    assert [path.name for path in tmp_path.iterdir()] == ["steps.parquet"]


@pytest.mark.parametrize("key", ["", " ", "\t\n"])
@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("CAPPLAN_API_KEY", ["serve", "--model", "tiny-llama"]),
        ("CAPPLAN_API_KEY", ["serve", "absent.json"]),
        ("CAPPLAN_ADMIN_API_KEY", ["serve", "--model", "tiny-llama"]),
        ("OPENAI_API_KEY", ["bench", "absent.yaml", "--url", "http://127.0.0.1:1"]),
        ("OPENAI_API_KEY", ["validate", "absent.json", "--workload", "absent.yaml"]),
        ("OPENAI_API_KEY", ["profile", "server", "http://127.0.0.1:1", "--model", "x", "-o", "absent"]),
    ],
)
def test_an_empty_key_in_the_environment_is_refused(
    run: Run,
    started: list[InstanceConfig],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    words: list[str],
    key: str,
) -> None:
    """The case of ../shared/cases/35-empty-env-key: the server would be open to everyone."""
    monkeypatch.setenv(variable, key)
    line = error_line(run(*words))
    assert line.startswith(f"error: {variable}: must not be empty")
    assert started == []


@pytest.mark.parametrize("key", ["secret\n", " secret", "sec\x1bret"])
def test_a_key_that_no_client_could_send_is_refused_and_not_shown(
    run: Run, started: list[InstanceConfig], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("CAPPLAN_API_KEY", key)
    line = error_line(run("serve", "--model", "tiny-llama"))
    assert line == "error: CAPPLAN_API_KEY: must be printable characters without spaces around them"
    given = error_line(run("serve", "--model", "tiny-llama", "--api-key", ""))
    assert given == "error: --api-key: must not be empty"
    run("serve", "--model", "tiny-llama", "--api-key", "right")  # takes precedence
    assert [instance.server.api_key for instance in started] == ["right"]
