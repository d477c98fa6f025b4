"""Hostile workloads, plans and profiles: values of single fields, and broken documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.fuzz.case import (
    DIGITS,
    EXPORT,
    PLAN,
    ROOFLINE,
    SIMULATE,
    WORKLOAD,
    Case,
    Content,
    link_to_zeros,
    shown,
    sparse_file,
    with_value,
)

LARGE: Final = ("1e308", "1e-300", "9" * 400, "1e15", ".nan")
COUNTS: Final = ("1000000000", "9223372036854775808", DIGITS, "1e9", "-1")

_SIMULATED: Final[Mapping[str, Sequence[str]]] = {
    "requests.prompt_tokens.mean": LARGE,
    "requests.prompt_tokens.std": LARGE,
    "requests.output_tokens.mean": LARGE,
    "requests.output_tokens.std": LARGE,
    "requests.prompt_tokens": (
        "{values: [1, 2], counts: [1e308, 1e308]}",
        "{values: [1, 2], counts: [1e-320, 1e-320]}",
        "{edges: [1, 16777216], counts: [1]}",
        "{edges: [1, 2, 16777217], counts: [1e-300, 1e300]}",
        "{values: [1, 9223372036854775808], counts: [1, 1]}",
        "{file: workload.yaml, column: a}",
        "{file: /dev/zero, column: a}",
    ),
    "requests.arrivals.cv": ("50", "0.01", *LARGE),
    "requests.arrivals.modulation.amplitude": LARGE,
    "requests.arrivals.modulation": (
        "{kind: steps, steps: [[0, 1e308], [1, 1e308]]}",
        "{kind: steps, steps: [[0, 1e-308]], period_s: 1e-300}",
        "{kind: diurnal, amplitude: 1, period_s: 1e-300}",
        "{kind: diurnal, amplitude: 1, period_s: 1e300}",
        "{kind: burst, factor: 1e308, every_s: 2, length_s: 1}",
        "{kind: burst, factor: 2, every_s: 1e308, length_s: 1e308}",
        "{kind: shifting_skew, from_rank: 16, to_rank: 8, over_s: 1e-308}",
        "{kind: shifting_skew, from_rank: 16, to_rank: 8, over_s: 1e308}",
    ),
    "requests.arrivals": (
        "{process: unpredictable, every_s: 1e-300}",
        "{process: unpredictable, every_s: 1e-4, factor: 1e308, clip: 1e308}",
        "{process: unpredictable, sigma: 5, clip: 1e308, factor: 1e308}",
        "{process: unpredictable, lognormal_gaps: published_client}",
        "{process: lognormal, cv: 50}",
        "{process: weibull, cv: 50}",
    ),
    "requests.stickiness.last": COUNTS,
    "requests.length_correlation": ("0.9999999999999999", "-0.9999999999999999", *LARGE),
    "requests.shared_prefix_tokens": COUNTS,
    "base.rate_rps": LARGE,
    "adapters.0.rate_rps": LARGE,
    "adapters.0.count": (*COUNTS, "100000"),
    "adapters.0.rank": COUNTS,
    "adapters.1.popularity.zipf": ("50", *LARGE),
    "adapters.1.popularity": ("{power_law: 1e-300}", "{exponential: 50}", "{power_law: 1e-5}"),
    "adapters.1.total_rate_rps": LARGE,
    "adapters.1.count": (*COUNTS, "100000"),
    "adapters.2.max_replicas": COUNTS,
    "adapters.2.name": ('"\\u001b[31m"', '"--api-key"', '"\\u0000"', '"' + "x" * 5000 + '"', "[[[[]]]]"),
    "engine.max_num_seqs": COUNTS,
    "engine.max_num_batched_tokens": COUNTS,
    "engine.max_model_len": COUNTS,
    "engine.max_loras": COUNTS,
    "engine.max_cpu_loras": COUNTS,
    "engine.gpu_memory_utilization": ("1e-300", *LARGE),
    "base_model": ('""', '"--trust-remote-code"', '"\\u001b[2J"', "3", "[]", '"' + "m" * 100_000 + '"'),
    "profile": ("/dev/zero", "./workload.yaml", '"../" ', '"' + "p" * 5000 + '.json"', '"./\\u0000.json"'),
}
"""Values of fields that a simulation reads, as YAML."""

_PLANNED: Final[Mapping[str, Sequence[str]]] = {
    "gpus.count": (*COUNTS, "10001"),
    "slo.ttft_p99_s": LARGE,
    "slo.served_fraction": LARGE,
    "slo": ("{tpt_over_base: 1e308, attainment: 1e-300}", "{tpot_p99_ms: 1e-300}", "{itl_mean_ms: 1e-300}"),
    "headroom": ("0.9999999999999999", *LARGE),
    "adapters.0.rate_rps": LARGE,
    "adapters.1.total_rate_rps": LARGE,
    "base.rate_rps": LARGE,
    "requests.output_tokens.std": LARGE,
    "adapters.0.count": ("100001", "1000000"),
    "engine.max_num_seqs": COUNTS,
    "move_cost": LARGE,
    "queues": ("{max_queues: 1000000000}", "{percentile: 0.9999999999999999}", "{size: output_only}"),
    "scheduler": (
        "chamelion",
        "{policy: chameleon, refresh_s: 1e-300}",
        "{policy: sjf, ageing_s: 1e308, predictor: {kind: classes, accuracy: 1e-300}}",
        "{policy: static, admit_every: 9007199254740993}",
        '{policy: sjf, predictor: {kind: learned, file: "/dev/zero"}}',
    ),
    "cache": (
        "{policy: chameleon, weights: {size: 1e308, frequency: 1e308}}",
        "{policy: gdsf, prefetch: histogram}",
        "{policy: lru, weights: {size: 1}}",
    ),
    "previous_plan": ("/dev/zero", "./workload.yaml", '"absent.json"', '"' + "p" * 5000 + '"'),
    "objective": ("min_cost", "max_throughput", "3"),
    "pools": (
        "[{name: p, profile: ./profile.json, count: 1000000000}]",
        "[{name: p, profile: ./profile.json, usd_per_hour: 1e308}]",
        "[{name: --x, profile: ./profile.json}]",
    ),
}
"""Values of fields that a plan reads, as YAML."""

_PLAN_FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "groups.0.replicas": (*COUNTS, "10001"),
    "groups.0.tp": COUNTS,
    "groups.0.id": ('"--help"', '"../../etc"', '"\\u001b[31m"', '""', DIGITS),
    "groups.0.adapters.0.rate_rps": ("1e308", "-1", DIGITS, "1e-320"),
    "groups.0.adapters.0.share": ("1e308", "1e-320", DIGITS, "2"),
    "groups.0.adapters.0.name": ('"--api-key"', '"\\u0007"', "5"),
    "groups.0.predicted.throughput_tok_s": ("1e308", DIGITS, "1e400"),
    "groups.0.predicted.kv_tokens": (DIGITS, "9223372036854775808"),
    "groups.0.predicted.load_over_capacity": ("1e308", "1e-320"),
    "groups.0.engine_args.max_loras": COUNTS,
    "groups.0.engine_args.max_num_seqs": COUNTS,
    "groups.0.engine_args.max_model_len": COUNTS,
    "totals.gpus": COUNTS,
    "totals.lower_bound_gpus": ("9223372036854775808", DIGITS),
    "verification.duration_s": ("1e308", "1e-320", DIGITS),
    "verification.seeds": ("[]", f"[{DIGITS}]", "[9223372036854775808]"),
    "provenance": ("[]", '{"a": ' * 500 + "1" + "}" * 500, '{"profile_kind": {"a": 1e308}}', "null"),
    "base_model": ('"--trust-remote-code"', '""', '"\\u001b[2J"'),
    "engine.version": ('"' + "9" * 5000 + '"', '"\\u001b[2J"', '""', '"rm -rf"'),
    "engine.rules": ('"none"', '"' + "r" * 100_000 + '"'),
}
"""Values of fields of a plan, as JSON."""

_PROFILE_FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "gpu.memory_bytes": (*COUNTS, "1" + "0" * 300),
    "tp": COUNTS,
    "model.layers": COUNTS,
    "model.hidden_size": COUNTS,
    "model.vocab_size": COUNTS,
    "model.head_dim": COUNTS,
    "model.max_positions": COUNTS,
    "engine.block_size": COUNTS,
    "engine.lora_extra_vocab": ("9223372036854775808", "1" + "0" * 300),
    "step_latency.coefficients.base_ms.value": ("1e308", "-1e308", "0", "1e-320", "-1"),
    "memory.coefficients.reserved_bytes.value": ("1e308", "-1e308", "1e-320"),
    "memory.coefficients.slot_factor.value": ("1e308", "-1e308", "1e-320"),
    "loading.coefficients.gpu_base_ms.value": ("1e308", "-1e308", "1e-320"),
    "loading.coefficients.disk_ms_per_rank.value": ("1e308", "-1e308"),
    "host.coefficients.request_ms.value": ("1e308", "-1e308"),
    "length_correlation": ("0.9999999999999999", "-1", "1e308"),
    "step_latency.form": ('"none"', '""', '"' + "f" * 100_000 + '"'),
    "step_latency.coefficients": ("{}", "[]", "null"),
    "step_latency.fitted_range": ('{"tokens": [1e308, -1e308]}', '{"rank": [0, 1e-320]}', "[]"),
    "name": ('"\\u001b[31m"', '"../../x"', '""'),
}
"""Values of fields of a profile, as JSON."""

_TOKENS_MS: Final = '{"axes": [{"name": "tokens", "points": %s}], "values": %s}'
_REQUESTS_MS: Final = (
    '{"axes": [{"name": "requests", "points": [0, 256]}, {"name": "kv_tokens", "points": [0, 1e6]}],'
    ' "values": [0, 5, 5, 10]}'
)
_STEP_TABLES: Final = (
    _TOKENS_MS % ("[1, 1e12]", "[1, 2]"),
    _TOKENS_MS % ("[1e-300, 2e-300]", "[0, 1e12]"),
    _TOKENS_MS % ("[1, 2]", "[1e12, 1e12]"),
    _TOKENS_MS % ("[1, 2]", "[1e308, 1e308]"),
    _TOKENS_MS % ("[2, 1]", "[1, 2]"),
    _TOKENS_MS % ("[1, 2]", "[2, 1]"),
    _TOKENS_MS % ("[1, 2]", "[1]"),
    _TOKENS_MS % ("[1]", "[1]"),
    _TOKENS_MS % (f"[1, {DIGITS}]", "[1, 2]"),
    _TOKENS_MS % ("[" + ",".join(map(str, range(200_000))) + "]", "[1, 2]"),
    _TOKENS_MS % ("[1, 2]", "[" + "1," * 1_000_000 + "1]"),
    _TOKENS_MS % ("[1, 1e400]", "[1, 2]"),
    _TOKENS_MS % ('["\\u001b[31m", 2]', "[1, 2]"),
    '{"axes": [], "values": []}',
    _REQUESTS_MS,
    "[]",
)
"""Tables of tokens of a step model, as JSON."""

_TARGETS: Final = (
    *('"(a+)+$"', '"((q_proj){900}){900}"', '"(?<=q)_proj"', '"("', '"\\ud800"', '"\\u0000"', '""'),
    *('"' + "(q_proj|" * 100_000 + '"', '"' + "q" * 2_000_000 + '"', '"\\u001b[31m"', "1e308", "null", "{}"),
    *('["embed_tokens"]', '["q_proj", 3]', "[" + '"q_proj",' * 500_000 + '"q_proj"]', "[]", "[" * 2000),
)
"""Targets of an adapter's configuration, as JSON."""


def cases() -> Iterator[Case]:
    """Yield the cases of all documents."""
    yield from _documents()
    yield from _mutated_workloads()
    yield from _mutated_plans()
    yield from _mutated_profiles()
    yield from _adapter_configs()


def _mutated_workloads() -> Iterator[Case]:
    for words, table in ((SIMULATE, _SIMULATED), (PLAN, _PLANNED)):
        for path, values in table.items():
            for number, value in enumerate(values):
                text = with_value(WORKLOAD, path, value)
                if path == "pools":
                    text = text.replace('"profile": "./profile.json", "gpus": {"count": 2}, ', "")
                name = f"{words[0]} {path} {shown(value)} #{number}"
                yield Case(name, words, {"workload.yaml": text})


def _mutated_plans() -> Iterator[Case]:
    for path, values in _PLAN_FIELDS.items():
        for number, value in enumerate(values):
            words = EXPORT if number % 2 == 0 else ("explain", "plan.json")
            yield Case(
                f"plan.json {path} {shown(value)} #{number}",
                words,
                {"plan.json": _changed(path, value)},
            )


def _mutated_profiles() -> Iterator[Case]:
    for path, values in _PROFILE_FIELDS.items():
        for number, value in enumerate(values):
            words = PLAN if number % 3 == 2 else SIMULATE
            name = f"profile.json {path} {shown(value)} #{number}"
            yield Case(name, words, {"profile.json": _changed(path, value)})
    for number, table in enumerate(_STEP_TABLES):
        fit = '{"source": "none", "samples": 1, "error_formula": "none", "error": 1.0}'
        tables = f'{{"tokens_ms": {table}, "requests_ms": {_REQUESTS_MS}}}'
        model = f'{{"form": "table", "coefficients": {{}}, "fit": {fit}, "tables": {tables}}}'
        name = f"profile.json table {shown(table)} #{number}"
        words = PLAN if number % 3 == 2 else SIMULATE
        yield Case(name, words, {"profile.json": _changed("step_latency", model)})


def _adapter_configs() -> Iterator[Case]:
    adapter = {"name": "a", "rank": 8, "rate_rps": 0.1, "path": ".", "target_modules": "adapter_config.json"}
    workload = json.dumps(WORKLOAD | {"adapters": [adapter]})
    for number, targets in enumerate(_TARGETS):
        files = {"workload.yaml": workload, "adapter_config.json": f'{{"target_modules": {targets}}}'}
        yield Case(f"adapter_config.json {shown(targets)} #{number}", SIMULATE, files)
        text = with_value(WORKLOAD | {"adapters": [adapter]}, "adapters.0.target_modules", targets)
        yield Case(f"workload.yaml targets {shown(targets)} #{number}", SIMULATE, {"workload.yaml": text})
    files = {"workload.yaml": workload, "adapter_config.json": link_to_zeros}
    yield Case("adapter_config.json without end", SIMULATE, files)


def _changed(path: str, value: str) -> Callable[[Path], None]:
    """Return a writer of the file that is there with one value changed."""

    def write(file: Path) -> None:
        file.write_text(with_value(json.loads(file.read_text()), path, value))

    return write


def _documents() -> Iterator[Case]:
    """Yield broken and huge documents in place of each kind of document."""
    for kind, words in {
        "workload.yaml": SIMULATE,
        "plan.json": ("explain", "plan.json"),
        "profile.json": ("profiles", "./profile.json"),
        "result.json": ("bench", "--read", "result.json"),
        "config.json": ROOFLINE,
    }.items():
        for name, content in _BROKEN.items():
            yield Case(f"{kind}: {name}", words, {kind: content})
    adapters = json.dumps(WORKLOAD["adapters"])
    whole = json.dumps(WORKLOAD)
    for name, text in {
        "60 kB that name 100 million adapters": json.dumps(
            [{"name": f"n{k}-{{i}}", "count": 100_000, "rank": 8, "rate_rps": 0.0} for k in range(1000)]
        ),
        "1,000,001 adapters": json.dumps(
            [{"name": f"n{k}-{{i}}", "count": 100_000, "rank": 8, "rate_rps": 0.0} for k in range(10)]
            + [{"name": "last", "rank": 8, "rate_rps": 0}]
        ),
        "50,000 equal names": json.dumps([{"name": "a", "rank": 8, "rate_rps": 0.0}] * 50_000),
        "10,000 entries apart from each other": json.dumps(
            [
                {"name": f"a{k}", "rank": 8, "rate_rps": 0.0, "apart_from": [f"a{(k + 1) % 10_000}"]}
                for k in range(10_000)
            ]
        ),
        "an adapter with 100,000 names in apart_from": json.dumps(
            [
                {"name": "a", "rank": 8, "rate_rps": 0.0, "apart_from": ["b"] * 100_000},
                {"name": "b", "rank": 8, "rate_rps": 0.0},
            ]
        ),
        "adapters: /dev/zero": '"/dev/zero"',
        "adapters: the workload itself": '"workload.yaml"',
    }.items():
        for words in (SIMULATE, PLAN):
            yield Case(f"{words[0]} {name}", words, {"workload.yaml": whole.replace(adapters, text)})


def _nested(opening: str, closing: str, levels: int) -> str:
    return opening * levels + closing * levels


def _link_to_itself(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(file)


_BROKEN: Final[Mapping[str, Content]] = {
    "empty": "",
    "null": "null",
    "a list": "[]",
    "a number": "1",
    "5,000 digits": DIGITS,
    "a key of 5,000 digits": '{"groups": ' + DIGITS + "}",
    "100,000 open lists": "[" * 100_000,
    "100,000 nested lists": _nested("[", "]", 100_000),
    "900 nested objects": '{"provenance": ' * 900 + "1" + "}" * 900,
    "100,000 keys": json.dumps({f"k{i}": i for i in range(100_000)}),
    "100,000 keys, the last twice": json.dumps({f"k{i}": i for i in range(100_000)})[:-1] + ', "k0": 1}',
    "a duplicate key": '{"groups": [], "groups": []}',
    "NaN": '{"totals": NaN}',
    "half a document": '{"groups": [{"id": "g',
    "UTF-16": '{"groups": []}'.encode("utf-16"),
    "null bytes": b"\0" * 1000,
    "invalid UTF-8": b'{"a": "\xff\xfe"}',
    "a lone surrogate": '{"base_model": "\\ud800"}',
    "aliases of aliases": "\n".join(
        f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" if i else "a0: &a0 [1]" for i in range(60)
    ),
    "a tag": "!!python/object/apply:os.system [id]",
    "an escape in a key": '{"\\u001b[31m": 1}',
    "a key of 1 MiB": json.dumps({"k" * 2**20: 1}),
    "a string of 16 MiB": json.dumps({"base_model": "m" * 2**24}),
    "a list of 2 million numbers": json.dumps({"groups": [0] * 2_000_000}),
    "8 GiB of zeros": sparse_file,
    "a link to itself": _link_to_itself,
    "a link to /dev/zero": link_to_zeros,
}
