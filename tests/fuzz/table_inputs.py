"""Hostile tables, traces, results of load tests, and architectures of models."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

from tests.fuzz.case import (
    COMPOSE,
    DIGITS,
    ROOFLINE,
    SIMULATE,
    STEPS,
    WORKLOAD,
    Case,
    Content,
    link_to_zeros,
    shown,
    sparse_file,
    step_row,
    with_value,
)

_OURS: Final = ("arrival_s", "prompt_tokens", "output_tokens", "adapter", "x")
_STEP_CELLS: Final = ("1e308", "-1", "nan", "inf", "9" * 400, "", "x", "1e-320", '"', "0")


def cases() -> Iterator[Case]:
    """Yield the cases of all tables."""
    yield from _tables()
    yield from _traces()
    yield from _results()


def _tables() -> Iterator[Case]:
    words = ("calibrate", "--steps", "steps.csv", "--base", "./profile.json", "-o", "out.json", "--quiet")
    for column in ("step_ms", "kv_tokens", "a_max"):
        for cell in _STEP_CELLS:
            rows = [step_row("", "1")] * 3 + [step_row(column, cell)] * 20
            yield Case(f"steps.csv {column} {shown(cell)}", words, {"steps.csv": "\n".join([STEPS, *rows])})
    for name, content in {
        "empty": "",
        "header only": STEPS,
        "one row": f"{STEPS}\n{step_row('', '1')}",
        "a header of 100,000 columns": ",".join(f"c{i}" for i in range(100_000)),
        "the same column twice": f"{STEPS},step_ms\n{step_row('', '1')},2",
        "ragged rows": f"{STEPS}\n{step_row('', '1')},1,2,3\n1",
        "an open quote": f'{STEPS}\n"1',
        "a line of 64 MiB": "1," * 2**25,
        "zeros": b"\0" * 2**20,
        "8 GiB of zeros": sparse_file,
        "a link to /dev/zero": link_to_zeros,
    }.items():
        yield Case(f"steps.csv {name}", words, {"steps.csv": content})
        adapters = with_value(WORKLOAD, "adapters", '"a.csv"')
        yield Case(f"adapters.csv {name}", SIMULATE, {"a.csv": content, "workload.yaml": adapters})
    rates = ("1e308", "-1", "nan", "inf", DIGITS, "", "0x10", "1_000")
    for rate in rates:
        files = {
            "a.csv": f"name,rank,rate_rps\na,8,{rate}\n",
            "workload.yaml": with_value(WORKLOAD, "adapters", '"a.csv"'),
        }
        yield Case(f"adapters.csv rate {shown(rate)}", SIMULATE, files)
    for name in ("--api-key", "\x1b[31m", "a\0b", "=", "x" * 5000, "../../etc", "{i}"):
        files = {
            "a.csv": f"name,rank,rate_rps\n{name},8,1\n",
            "workload.yaml": with_value(WORKLOAD, "adapters", '"a.csv"'),
        }
        yield Case(f"adapters.csv name {shown(name)}", SIMULATE, files)


def parquet_of(rows: int) -> Callable[[Path], None]:
    """Return a writer of a small Parquet file with many equal requests, by run-length encoding."""

    def write(file: Path) -> None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        part = 10_000_000
        schema = pa.schema(
            [
                ("arrival_s", pa.float64()),
                ("adapter", pa.string()),
                ("prompt_tokens", pa.int32()),
                ("output_tokens", pa.int32()),
            ]
        )
        table = pa.table(
            [
                pa.array(np.zeros(part)),
                pa.DictionaryArray.from_arrays(pa.array(np.zeros(part, np.int32)), ["legal"]).cast(
                    pa.string()
                ),
                pa.array(np.ones(part, np.int32)),
                pa.array(np.ones(part, np.int32)),
            ],
            schema=schema,
        )
        with pq.ParquetWriter(file, schema, compression="zstd") as out:
            for _ in range(rows // part):
                out.write_table(table)

    return write


def _traced(entry: str) -> str:
    document = {key: value for key, value in WORKLOAD.items() if key not in ("requests", "adapters")}
    names = [{"name": "legal", "rank": 8, "rate_rps": 0.0}, {"name": "a", "rank": 8, "rate_rps": 1.0}]
    return with_value(document | {"adapters": names}, "trace", entry)


_HEAD: Final = "arrival_s,adapter,prompt_tokens,output_tokens\n"


def _traces() -> Iterator[Case]:
    texts: dict[str, Content] = {
        "arrival 1e308": _HEAD + "0,a,1,1\n1e308,a,1,1\n",
        "arrival nan": _HEAD + "nan,a,1,1\n",
        "arrival -1": _HEAD + "-1,a,1,1\n",
        "arrivals that descend": _HEAD + "2,a,1,1\n1,a,1,1\n",
        "a length of 2**63": _HEAD + f"0,a,{2**63},1\n1,a,1,1\n",
        "a length of 5,000 digits": _HEAD + f"0,a,{DIGITS},1\n1,a,1,1\n",
        "an unknown adapter": _HEAD + "0,zz,1,1\n1,a,1,1\n",
        "an escape as adapter": _HEAD + "0,\x1b[31m,1,1\n1,a,1,1\n",
        "no rows": _HEAD,
        "one row at 0": _HEAD + "0,a,1,1\n",
        "100,000 adapters": _HEAD + "".join(f"{i},n{i},1,1\n" for i in range(100_000)),
        "a line of 64 MiB": _HEAD + "1" * 2**26,
        "8 GiB of zeros": sparse_file,
        "zeros without end": link_to_zeros,
        "an open quote": _HEAD + '"0,a,1,1\n',
        "cut archive": gzip.compress((_HEAD + "0,a,1,1\n" * 9999).encode())[:-30],
        "UTF-16": (_HEAD + "0,a,1,1\n").encode("utf-16"),
        **{
            f"separator {shown(sign)} {shown(number)}": _HEAD.replace(",", sign)
            + sign.join((number, "a", "1", number))
            for sign, number in product(
                ";\t|\x01", ("0,5", "1,000", "1.000,5", "1,5e3", "nan", DIGITS, "2026-01-01")
            )
        },
    }
    for name, content in texts.items():
        yield Case(
            f"trace.csv {name}", SIMULATE, {"t.csv": content, "workload.yaml": _traced("{file: t.csv}")}
        )
    lines = {
        "nested": "[" * 100_000,
        "digits": '{"timestamp": ' + DIGITS + ', "input_length": 1, "output_length": 1}',
        "400 digits": '{"timestamp": ' + "9" * 400 + ', "input_length": 1, "output_length": 1}',
        "infinity": '{"timestamp": 1e999, "input_length": 1, "output_length": 1}',
        "a list": "[1]",
        "booleans": '{"timestamp": true, "input_length": true, "output_length": true}',
        "zeros": b"\0" * 2**20,
    }
    for name, content in lines.items():
        for ending in ("jsonl", "json"):
            files = {f"t.{ending}": content, "workload.yaml": _traced(f"{{file: t.{ending}}}")}
            yield Case(f"trace.{ending} {name}", SIMULATE, files)
    for name, values in {
        "1e308": "1e308",
        "digits": "9" * 400,
        "text": '"x"',
        "null": "null",
        "object": "{}",
    }.items():
        result = f'{{"start_times": [0, {values}], "input_lens": [1, 1], "output_lens": [1, 1]}}'
        yield Case(
            f"trace.json start {name}",
            SIMULATE,
            {"t.json": result, "workload.yaml": _traced("{file: t.json}")},
        )
        columns = f'"start_times": [0, 1], "input_lens": [1, {values}], "output_lens": [1, 1]'
        result = f'{{{columns}, "errors": {values}}}'
        yield Case(
            f"trace.json length {name}",
            SIMULATE,
            {"t.json": result, "workload.yaml": _traced("{file: t.json}")},
        )
    for name, content in {
        "110 million rows": parquet_of(110_000_000),
        "text": "PAR1",
        "zeros": b"PAR1" + b"\0" * 1000 + b"PAR1",
    }.items():
        yield Case(
            f"trace.parquet {name}",
            SIMULATE,
            {"t.parquet": content, "workload.yaml": _traced("{file: t.parquet}")},
        )
    small = {"t.csv": _HEAD + "0,a,1,1\n1,a,1,1\n"}
    for entry in (
        "duration_s: 1e308",
        "duration_s: 1e-300",
        "rate_rps: 1e308",
        "rate_rps: 1e-300",
        f"seed: {DIGITS}",
        "format: azure",
        "format: mooncake",
        "ranks: /dev/zero",
        *(f"time_unit: {unit}" for unit in ("s", "ms", "us", "ns", "h", DIGITS)),
        *(f"columns: {{{ours}: {theirs}}}" for ours, theirs in product(_OURS, ("adapter", "x", DIGITS))),
    ):
        yield Case(
            f"trace {shown(entry)}",
            SIMULATE,
            {**small, "workload.yaml": _traced(f"{{file: t.csv, {entry}}}")},
        )


def _results() -> Iterator[Case]:
    """Yield results of load tests and architectures of models."""
    result = {"duration": 1.0, "completed": 1, "total_input_tokens": 1, "total_output_tokens": 1}
    for key in (*result, "num_prompts", "failed", "mean_ttft_ms", "ttfts", "itls", "date"):
        for number, value in enumerate(
            ("1e308", "1e-320", DIGITS, "-1", '"x"', "[1e308, 1e308]", "{}", "null", "true")
        ):
            text = with_value(result, key, value)
            yield Case(
                f"result.json {key} {shown(value)} #{number}",
                ("bench", "--read", "result.json"),
                {"result.json": text},
            )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "layer_types": None,
        "quantization_config": None,
    }
    values = ("0", "1e9", "9223372036854775808", "9" * 400, DIGITS, '"x"', "true", "[]")
    for words, (key, (number, value)) in product((ROOFLINE, COMPOSE), product(config, enumerate(values))):
        name = f"{words[1]} config.json {key} {shown(value)} #{number}"
        yield Case(name, words, {"config.json": with_value(config, key, value)})
