"""Hostile files: of other kinds, damaged at random, in odd dialects, and in the place of outputs."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

from tests.fuzz.case import (
    DIGITS,
    EXPORT,
    MODEL,
    PLAN,
    PROFILE,
    SIMULATE,
    WORKLOAD,
    Case,
    Content,
    link_to_zeros,
    shown,
    with_value,
)

_MUTATIONS: Final = 60
"""Random changes of each kind of document."""


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as each:
        each.bind(os.path.relpath(path))  # an address has 107 characters at most


def link_to(target: str) -> Callable[[Path], None]:
    """Return a writer of a link in place of a file."""

    def write(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return write


OTHERS: Final[Mapping[str, Callable[[Path], None]]] = {
    "FIFO": os.mkfifo,
    "socket": _socket,
    "directory": Path.mkdir,
    "kernel log": link_to("/proc/kmsg"),
    "zeros": link_to_zeros,
    "nothing": link_to("absent"),
    "loop": lambda path: path.symlink_to(path.name),
}
"""Writers of files that cannot be read."""

FIELDS: Final[Mapping[str, Any]] = {
    "adapters": "{other}",
    "trace": {"file": "{other}", "format": "table"},
    "trace.jsonl": {"file": "{other}.jsonl"},
    "trace.parquet": {"file": "{other}.parquet"},
    "trace.json": {"file": "{other}.json"},
    "trace.ranks": {"file": "trace.csv", "ranks": "{other}"},
    "profile": "{other}",
    "previous_plan": "{other}",
    "scheduler": {"policy": "sjf", "predictor": {"kind": "learned", "file": "{other}"}},
    "requests": {"prompt_tokens": {"file": "{other}", "column": "a"}, "output_tokens": {"mean": 4}},
}
"""Values of fields that name a file, by field; what follows a dot tells values of one field apart."""

FLAGS: Final = (
    ("plan", "{other}"),
    ("plan", "workload.yaml", "--previous", "{other}"),
    ("simulate", "workload.yaml", "--profile", "./{other}", "--max-loras", "1"),
    ("simulate", "--plan", "{other}", "workload.yaml", "--duration", "9"),
    ("explain", "{other}"),
    ("export", "{other}", "--target", "vllm", "-o", "out"),
    ("report", "{other}", "-o", "out.html"),
    ("profiles", "./{other}"),
    ("validate", "{other}", "--workload", "workload.yaml"),
    ("bench", "--read", "{other}"),
    ("calibrate", "--steps", "{other}", "--base", PROFILE, "-o", "out.json"),
    ("calibrate", "--steps", "{other}.parquet", "--base", PROFILE, "-o", "out.json"),
    ("calibrate", "--runs", "{other}", "--base", PROFILE, "-o", "out.json"),
    ("calibrate", "--memory", "{other}", "--base", PROFILE, "-o", "out.json"),
    (
        "profile",
        "roofline",
        "--gpu",
        "h200",
        "--model-config",
        "{other}",
        "--base-model",
        "o/m",
        "-o",
        "o.json",
    ),
    ("profile", "compose", "--gpu", "h100-80g", "--model-config", "{other}", "-o", "o.json"),
    ("serve", "--model", "{other}", "--port", "0"),
    ("serve", "{other}"),
    ("registry", "list", "--registry", "{other}"),
    ("compare", "{other}"),
    ("tune", "{other}"),
    ("capacity", "{other}"),
    ("workload", "predictor", "{other}", "-o", "out.json"),
    ("train", "{other}"),
)
"""Command lines that read a file."""

TRACE: Final = "arrival_s,adapter,prompt_tokens,output_tokens\n0,a,1,1\n1,a,1,1\n"


def named(value: Any, other: str) -> Any:
    """Return a value with the name of the other file in every text."""
    return json.loads(json.dumps(value).replace("{other}", other))


def workload_with(field: str) -> dict[str, Any]:
    """Return a small workload with a value of `FIELDS`, of which the file is named other."""
    workload: dict[str, Any] = {
        **{"base_model": MODEL, "profile": PROFILE, "gpus": {"count": 2}},
        "requests": {"prompt_tokens": {"mean": 120, "std": 60}, "output_tokens": {"mean": 40, "std": 20}},
        "adapters": [{"name": "a", "rank": 8, "rate_rps": 0.1}],
    }
    key, _, part = field.partition(".")
    if key == "trace":
        del workload["requests"]
    if part == "ranks":
        del workload["adapters"]
    return workload | ({key: named(FIELDS[field], "other")} if field else {})


def _others(kind: str) -> dict[str, Content]:
    return {f"other{ending}": OTHERS[kind] for ending in ("", ".jsonl", ".json", ".parquet")}


def _unreadable() -> Iterator[Case]:
    for field, kind in product(FIELDS, OTHERS):
        files = {**_others(kind), "trace.csv": TRACE, "workload.yaml": json.dumps(workload_with(field))}
        yield Case(f"field {field} is a {kind}", ("plan", "workload.yaml"), files)
    for words, kind in product(FLAGS, OTHERS):
        files = {**_others(kind), "workload.yaml": json.dumps(workload_with(""))}
        yield Case(f"{' '.join(words)} is a {kind}", tuple(named(words, "other")), files)


_WRITERS: Final = (
    ("simulate", "workload.yaml", "--max-loras", "2", "--duration", "20", "--workers", "1", "--requests-out"),
    ("simulate", "workload.yaml", "--max-loras", "2", "--duration", "20", "--workers", "1", "--html"),
    ("plan", "workload.yaml", "--seeds", "1", "--time-limit", "2", "--quiet", "-o"),
    ("export", "plan.json", "--target", "vllm", "--unverified", "-o"),
    ("report", "plan.json", "-o"),
    ("compare", "workload.yaml", "--html"),
    ("profile", "roofline", "--gpu", "h200", "--model", "llama-3.1-8b", "-o"),
    ("profile", "compose", "--gpu", "h100-80g", "--model", "llama-3.1-8b", "-o"),
    ("workload", "preset", "chameleon-uu", "-o"),
    ("surrogate", "rules", PROFILE, "--svg"),
)


def _outputs() -> Iterator[Case]:
    """Yield command lines that cannot write their output."""
    paths: dict[str, tuple[str, dict[str, Content]]] = {
        **{kind: ("other", {"other": OTHERS[kind]}) for kind in ("FIFO", "socket", "directory", "loop")},
        **{
            path: (path, {})
            for path in ("/dev/full", "absent/x", "/proc/self/x", "x" * 300, "workload.yaml/x")
        },
        "what is read": ("same", {"same": _same_file}),
    }
    for words, (name, (path, files)) in product(_WRITERS, paths.items()):
        yield Case(f"{' '.join(words)} to {shown(name)}", (*words, path), files)


def _same_file(path: Path) -> None:
    """Link a name to the workload."""
    path.hardlink_to(path.with_name("workload.yaml"))


_SIZES: Final = ("0", "-5", "1e9", "1099511627776", "9" * 400, DIGITS, "true", "1.5", '"4"', "[]", "NaN")
_NUMBERS: Final = ("0", "-1", "1e400", "1e300", "NaN", "-Infinity", "true", '"x"', "[]", "9" * 400)
_FLAG_VALUES: Final = ("1", '"false"', "[]", "NaN")
_HEADS: Final = ("num_attention_heads", "num_key_value_heads", "head_dim")
_WIDTHS: Final = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_CONFIG_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys((*_HEADS, *_WIDTHS), _SIZES),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), _NUMBERS),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), _FLAG_VALUES
    ),
    "num_key_value_heads ": ("3", "8"),
    "head_dim ": ("3",),
    "rope_scaling": (
        *("3", '"x"', '{"rope_type": "yarn"}', '{"rope_type": []}', '{"rope_type": "linear", "factor": 0}'),
        *('{"rope_type": "linear", "factor": 1e400}', '{"rope_type": "linear", "factor": NaN}'),
        '{"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}',
        '{"rope_type": "llama3", "low_freq_factor": -1}',
        '{"rope_type": "llama3", "original_max_position_embeddings": 0}',
        '{"rope_type": "default", "rope_theta": 0}',
        '{"partial_rotary_factor": 0.5}',
    ),
    "rope_parameters": ("[1]", '{"rope_theta": 0}', '{"rope_theta": "x"}'),
    "dtype": ('"int4"', "3", "[]", '"../x"'),
    "torch_dtype": ('"float8"', "{}", "true"),
    "eos_token_id": ('"x"', "[true]", "1.5", "9" * 400, "[[1]]"),
    "layer_types": ("3", '"sliding_attention"', '["sliding_attention"]'),
    "hidden_act": ('"gelu"', "3", "[]"),
    "partial_rotary_factor": ("0.5", '"x"'),
    "quantization_config": ("{}", "3"),
    "model_type": ('"evil"', "null", "3", "[]"),
    "num_experts": ("8",),
}
CONFIGS: Final = tuple((key.strip(), value) for key, values in _CONFIG_FIELDS.items() for value in values)
"""Fields of a model's config.json with values that the engine refuses, as JSON."""

LLAMA: Final[Mapping[str, Any]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 512},
}


def _configs() -> Iterator[Case]:
    words = ("serve", "--model", "config.json", "--port", "0", "--max-model-len", "128")
    for number, (key, value) in enumerate(CONFIGS):
        yield Case(
            f"engine {key} {shown(value)} #{number}", words, {"config.json": with_value(LLAMA, key, value)}
        )


REPLACEMENTS: Final = (
    *(-1, 0, 1, 2, 2**31 - 1, 2**31, -(2**63), 10**400, 1e38, 1e308, 0.5, True, None, "", "1", [], [0], {}),
    *("NaN", "[1, 2]", "[" * 5000, [[0]] * 9, "\u202e", "\x1b[31m", "../../x", "x" * 10_000),
)


def mutated(document: Any, rng: random.Random) -> str:
    """Return a document as JSON with one node at a random place replaced by a random value."""
    changed = copy.deepcopy(document)
    places: list[tuple[Any, Any]] = []

    def collect(part: Any) -> None:
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], dict | list):
                collect(part[key])

    collect(changed)
    part, key = rng.choice(places)
    part[key] = copy.deepcopy(rng.choice(REPLACEMENTS))
    return json.dumps(changed)


@cache
def trained_predictor() -> bytes:
    """Return the file of a learned predictor."""
    import numpy as np

    from capplan.models.training import PredictorOptions, train_predictor
    from capplan.workload import Requests

    rng = np.random.default_rng(1)
    adapters, prompts, hours = rng.integers(0, 4, 3000), rng.integers(1, 200, 3000), rng.integers(0, 24, 3000)
    requests = Requests(
        (np.arange(3000, dtype=np.int64) * 24 + hours) * 3_600_000_000_000,
        adapters.astype(np.int32),
        prompts.astype(np.int32),
        (10 + 90 * adapters + prompts + 5 * hours).astype(np.int32),
    )
    return train_predictor(requests, ["a", "b", "c"], PredictorOptions(trees=8)).content


def _mutations() -> Iterator[Case]:
    """Yield documents with a node replaced at random."""

    def writer(number: int, source: Callable[[Path], Any]) -> Callable[[Path], None]:
        return lambda path: _write(path, mutated(source(path), random.Random(number)))

    def predictor(_: Path) -> Any:
        return json.loads(trained_predictor())

    def present(path: Path) -> Any:
        return json.loads(path.read_text())

    learned = json.dumps(WORKLOAD | {"scheduler": named(FIELDS["scheduler"], "other")})
    for number in range(_MUTATIONS):
        files = {"workload.yaml": learned, "other": writer(number, predictor)}
        yield Case(f"predictor mutated #{number}", SIMULATE, files)
        yield Case(f"workload.yaml mutated #{number}", SIMULATE, {"workload.yaml": writer(number, present)})
        words = (EXPORT, ("explain", "plan.json"), ("report", "plan.json", "-o", "out.html"))[number % 3]
        yield Case(f"plan.json mutated #{number}", words, {"plan.json": writer(number, present)})
        yield Case(f"profile.json mutated #{number}", SIMULATE, {"profile.json": writer(number, present)})


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


_TIMES: Final = {
    "milliseconds": "0\n1700\n2300",
    "microseconds": "0\n1700000\n2300000",
    "seconds since 1970": "1700000000\n1700000001.5\n1700000002",
    "nanoseconds since 1970": "1700000000000000000\n1700000001000000000",
    "dates": "2023-11-16 18:15:46.6805900\n2023-11-16 18:15:47",
    "dates with zones": "2023-11-16T18:15:46+14:00\n2023-11-16T18:15:46-12:00",
    "dates of year 9999": "9999-12-31 23:59:59\n9999-12-31 23:59:59",
    "decimal commas": '"0,5"\n"1,5"',
    "clock times": "00:00:00\n00:00:01",
    "hexadecimal": "0x0\n0x1",
    "all equal": "5\n5\n5",
    "huge steps": "0\n1e15",
    "subnormal": "0\n5e-324",
}
_FORMATS: Final = (
    "",
    "format: azure",
    "format: mooncake",
    "format: vllm",
    "time_unit: ms",
    "time_unit: fortnights",
)


def _traces() -> Iterator[Case]:
    document = json.dumps(workload_with("trace"))
    for (name, times), form in product(_TIMES.items(), _FORMATS):
        rows = "".join(f"{time},a,10,10\n" for time in times.split("\n"))
        entry = json.dumps(FIELDS["trace"]).replace("{other}", "other")
        text = document.replace(entry, f"{{file: t.csv, {form}}}" if form else "{file: t.csv}")
        files = {"t.csv": f"arrival_s,adapter,prompt_tokens,output_tokens\n{rows}", "workload.yaml": text}
        yield Case(f"trace of {name}, {form or 'no format'}", SIMULATE, files)


_YAML: Final = (
    *("a: &a {b: 1}\n<<: *a\n", "<<: 3\n", "<<: [3]\n", "<<: *absent\n", "a: &a [*a]\n", "a: &a {<<: *a}\n"),
    *("<<: {<<: {<<: {x: 1}}}\n", "<<: [{x: 1}, {x: 2}]\n", "<<: {base_model: x}\n<<: {base_model: y}\n"),
    *("? [a, b]\n: 1\n", "? {a: 1}\n: 1\n", "a: !!binary YQ==\n", "a: !!set {b}\n", "%YAML 1.1\n---\na: 1\n"),
    *(
        "%TAG ! tag:x,2000:\n---\na: !x 1\n",
        "--- a\n--- b\n",
        "a: 0o17\n",
        "a: 017\n",
        "a: 1:30:00\n",
        "a: yes\n",
    ),
    *(
        "a: 2001-01-01\n",
        "\ufeffa: 1\n",
        "a:\t1\n",
        "\ta: 1\n",
        "a: |\n  x\n b: 1\n",
        "a: 'x\n",
        "a: \u2028 b\n",
    ),
    *("a: >-\n" + "  x\n" * 100_000, "a: " + "- " * 10_000, "- " * 5000, "a: {" * 500, "'\\x00': 1\n"),
    *("base_model: \u202etxt\n", "y: 1\ny: 2\n", "~: 1\n", "1: 2\n", "=: 1\n", "a: ." + "1" * 100_000 + "\n"),
)
_HEAD: Final = "name,rank,rate_rps\n"
_CSV: Final[Mapping[str, str | bytes]] = {
    "a BOM": "\ufeff" + _HEAD + "a,8,1\n",
    "semicolons": _HEAD.replace(",", ";") + "a;8;1\n",
    "semicolons and decimal commas": _HEAD.replace(",", ";") + "a;8;0,5\n",
    "tabs": _HEAD.replace(",", "\t") + "a\t8\t1\n",
    "carriage returns": (_HEAD + "a,8,1\n").replace("\n", "\r"),
    "UTF-16": (_HEAD + "a,8,1\n").encode("utf-16"),
    "Latin-1": (_HEAD + "größe,8,1\n").encode("latin-1"),
    "sep=": "sep=;\n" + _HEAD.replace(",", ";") + "a;8;1\n",
    "trailing commas": _HEAD.replace("\n", ",,\n") + "a,8,1,,\n",
    "blank lines": "\n\n" + _HEAD + "\n\na,8,1\n\n",
    "spaces in the header": "name, rank, rate_rps\na, 8, 1\n",
    "capitals": "Name,Rank,Rate_RPS\na,8,1\n",
    "quoted line breaks": _HEAD + '"a\nb",8,1\n',
    "a formula": _HEAD + "=cmd|' /C calc'!A0,8,1\n",
    "thousands": _HEAD + 'a,8,"1,000"\n',
    "per cent": _HEAD + "a,8,50%\n",
    "a rank of 8.0": _HEAD + "a,8.0,1\n",
    "TRUE": _HEAD + "a,TRUE,TRUE\n",
    "NULs": _HEAD + "a\0,8,1\n",
    "a total": _HEAD + "a,8,1\nTotal,,1\n",
    "bidirectional names": _HEAD + "\u202ea,8,1\n",
    "zero-width names": _HEAD + "a\u200bb,8,1\n",
    "a path in another folder": "name,rank,rate_rps,path\na,8,1,../../../etc\n",
}


def _texts() -> Iterator[Case]:
    """Yield workloads and tables of adapters in odd dialects."""
    whole = json.dumps(WORKLOAD)[1:-1].replace(", ", ",\n ")
    for number, text in enumerate(_YAML):
        yield Case(f"YAML {shown(text)} #{number}", SIMULATE, {"workload.yaml": text})
        merged = f"x: &x {{{whole}}}\n<<: *x\n{text}"
        yield Case(f"YAML beside a workload {shown(text)} #{number}", SIMULATE, {"workload.yaml": merged})
    for name, content in _CSV.items():
        workload = with_value(WORKLOAD, "adapters", '"a.csv"')
        yield Case(f"adapters in CSV with {name}", SIMULATE, {"a.csv": content, "workload.yaml": workload})


_URLS: Final = (
    *(
        "sqlite:////dev/zero",
        "sqlite:///workload.yaml",
        "sqlite:///absent.db",
        "sqlite://",
        "sqlite:///:memory:",
    ),
    *("sqlite:///file:x?mode=memory&uri=true", "sqlite:///r.db?timeout=1e308", "sqlite:///" + "x" * 5000),
    *(
        "mysql://u:secret@127.0.0.1:1/d?local_infile=1",
        "mysql+pymysql://127.0.0.1:1/d?read_default_file=/etc/passwd",
    ),
    *("postgresql://u:secret@127.0.0.1:1/d", "postgresql://127.0.0.1:1/d?passfile=/etc/passwd"),
    *(
        "postgresql+psycopg://127.0.0.1:1/d?service=x",
        "postgresql://127.0.0.1:1/d?host=/tmp&sslkey=/etc/shadow",
    ),
    *(
        "oracle://127.0.0.1/d",
        "file:///etc/passwd",
        "http://127.0.0.1:1/",
        "x://",
        "://",
        "r.db\n",
        "\u202e.db",
    ),
)
_TABLES: Final = {
    "a view without end": "CREATE VIEW adapters AS WITH RECURSIVE n(i) AS "
    "(SELECT 1 UNION ALL SELECT i+1 FROM n) SELECT i AS name FROM n",
    "other columns": "CREATE TABLE adapters (x)",
    "no tables": "",
    "a blob as name": "CREATE TABLE adapters (name, entry); INSERT INTO adapters VALUES (zeroblob(9), x'00')",
    "a large blob": "CREATE TABLE adapters (name, entry); INSERT INTO adapters VALUES (1, zeroblob(2e8))",
    "an unknown version": "PRAGMA user_version = 999; CREATE TABLE adapters (name)",
}


def _registries() -> Iterator[Case]:
    def database(statements: str) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            with sqlite3.connect(path) as made:
                made.executescript(statements)
            made.close()

        return write

    texts: dict[str, tuple[str, dict[str, Content]]] = {
        **{shown(url): (url, {}) for url in _URLS},
        **{name: ("r.db", {"r.db": database(statements)}) for name, statements in _TABLES.items()},
        "text": ("r.db", {"r.db": "text"}),
        "half a header": ("r.db", {"r.db": b"SQLite format 3\0" + b"\xff" * 84}),
    }
    for name, (url, files) in texts.items():
        workload = json.dumps(WORKLOAD | {"adapters": {"registry": url}})
        yield Case(f"workload's registry {name}", SIMULATE, {**files, "workload.yaml": workload})
        yield Case(f"registry list {name}", ("registry", "list", "--registry", url), files)


_PEFT: Final[Mapping[str, tuple[str, ...]]] = {
    "r": ("-1", "0", "1e9", '"8"', "null", DIGITS, "true", "[8]"),
    "lora_alpha": ("NaN", "1e400", '"x"', "-1"),
    "rank_pattern": ('{"(a+)+$": 8}', '{"q_proj": 1e9}', '{"q_proj": "x"}', "[]", "3"),
    "peft_type": ('"IA3"', "null", "3"),
    "use_dora": ("true", '"yes"'),
    "modules_to_save": ('["lm_head"]', "3"),
    "bias": ('"all"', "3"),
    "base_model_name_or_path": ('"other/model"', "3", '"\\u202e"', '"' + "x" * 100_000 + '"'),
    "layers_to_transform": ("[999]", '"x"'),
    "target_modules": ("[]", '"(((((a+)+)+)+)+$"', "null", "3"),
}
_WEIGHTS: Final[Mapping[str, Content]] = {
    "empty": b"",
    "a header of 2**63 bytes": (2**63).to_bytes(8, "little"),
    "a header of zeros": (64).to_bytes(8, "little") + bytes(64),
    "nested": (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "pickle": b"\x80\x04cos\nsystem\n(S'id'\ntR.",
    **OTHERS,
}


def _adapters() -> Iterator[Case]:
    fields = {"r": 8, "lora_alpha": 16, "peft_type": "LORA", "target_modules": ["q_proj"]}
    adapter = {
        "name": "a",
        "rank": 8,
        "rate_rps": 0.1,
        "path": "lora",
        "target_modules": "adapter_config.json",
    }
    workload = json.dumps(WORKLOAD | {"adapters": [adapter]})
    listed = ("registry", "add", "a=lora", "--registry", "r.db")

    def folder(config: str, weights: Content = b"") -> Callable[[Path], None]:
        def write(path: Path) -> None:
            path.mkdir()
            _write(path / "adapter_config.json", config)
            file = path / "adapter_model.safetensors"
            if callable(weights):
                weights(file)
            else:
                file.write_bytes(weights if isinstance(weights, bytes) else weights.encode())

        return write

    for key, values in _PEFT.items():
        for number, value in enumerate(values):
            config = with_value(fields, key, value)
            files: dict[str, Content] = {"lora": folder(config), "workload.yaml": workload}
            for words in (SIMULATE, listed):
                yield Case(f"{words[0]} adapter {key} {shown(value)} #{number}", words, files)
    for name, weights in _WEIGHTS.items():
        files = {"lora": folder(json.dumps(fields), weights), "workload.yaml": workload}
        for words in (PLAN, listed):
            yield Case(f"{words[0]} adapter whose weights are {name}", words, files)


def cases() -> Iterator[Case]:
    """Yield the cases of all files."""
    for make in (_unreadable, _outputs, _configs, _mutations, _traces, _texts, _registries, _adapters):
        yield from make()
