"""Recorded cases: read, check, and turn the recorder's configuration into the limits of our engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from capplan import InputError
from capplan.errors import NO_VALUE
from capplan.serving import Limits, rules_of_version

REQUIRED = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "max_model_len": 2,
    "num_blocks": 2,
    "max_loras": 1,
    "long_prefill": 0,
}
"""Whole numbers of a configuration, and the least each may be."""
SWITCHES = ("reserve_full_isl", "prefix_caching", "async_sched")
"""Booleans; all but the first may be left out and are off then."""
WORKLOAD_LEAST = (0, 1, 1, 0, 0, 0)  # arrival_step, prompt, output, adapter, prefix_group, shared_prefix_len


class Step(NamedTuple):
    """Decisions of the scheduler in one step."""

    number: int
    tokens: list[tuple[int, int]]
    """(request, tokens) in the order in which they were scheduled."""
    preempted: list[int]
    """In rising order: vLLM reports a set."""
    free_blocks: int
    """After scheduling, before any output is processed."""


@dataclass(frozen=True)
class Case:
    """An engine, its requests, and the recorded steps."""

    name: str
    version: str
    """Of the vLLM that decided."""
    config: dict[str, Any]
    workload: list[list[int]]
    steps: list[Step]


def limits_of(case: Case) -> Limits:
    """Return the limits of the engine that a case was recorded with, from vLLM 0.32 on."""
    config = case.config
    return Limits(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        max_loras=config["max_loras"],
        max_cpu_loras=max(64, config["max_loras"]),  # recorded without a host cache: nothing depends on it
        block_size=config["block_size"],
        watermark_blocks=int(config.get("watermark", 0.0) * config["num_blocks"]),
        long_prefill_tokens=config["long_prefill"],
        reserve_full_sequence=int(config["reserve_full_isl"]),
        reverse_skipped=0,
        lone_prefill_exempt=1,
        async_scheduling=int(config.get("async_sched", False)),
        prefix_caching=int(config.get("prefix_caching", False)),
        unhashed_to_front=1,
        hold_ending=int(rules_of_version(case.version).hold_ending),
    )


def usable_blocks(config: dict[str, Any]) -> int:
    """Return the KV blocks that requests can have; vLLM keeps block 0 for itself."""
    return int(config["num_blocks"]) - 1


def unknown_keys(cases: list[Case]) -> list[str]:
    """Return the configuration keys that mean nothing here."""
    known = {*REQUIRED, *SWITCHES, "watermark"}
    return sorted({key for case in cases for key in case.config} - known)


def read_cases(path: Path) -> list[Case]:
    """Read a recording.

    Raises
    ------
    InputError
        When the file is not a recording; the location names the case and the key.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", location=str(path)) from error
    except ValueError as error:
        raise InputError(f"must be JSON: {error}", location=str(path)) from error
    _require(isinstance(content, dict), "must be an object with a list `cases`", path)
    cases = content.get("cases")
    _require(isinstance(cases, list) and cases, "must have a list `cases` that is not empty", path)
    version = content.get("vllm_version")
    _require(isinstance(version, str), "must have a `vllm_version`", path)
    return [_case(each, version, f"{path}: case {number}") for number, each in enumerate(cases)]


def _case(content: Any, version: str, where: str) -> Case:
    _require(isinstance(content, dict), "must be an object", where)
    for key, kind in (("name", str), ("config", dict), ("workload", list), ("steps", list)):
        _require(
            isinstance(content.get(key), kind) and content[key], f"must have a {kind.__name__} `{key}`", where
        )
    where = f"{where} ({content['name']})"
    config = content["config"]
    _check_config(config, where)
    for number, row in enumerate(content["workload"]):
        _check_row(row, config, f"{where}: request {number}")
    steps = [
        _step(each, len(content["workload"]), f"{where}: steps[{at}]")
        for at, each in enumerate(content["steps"])
    ]
    numbers = [step.number for step in steps]
    _require(numbers == sorted(set(numbers)), "the steps must have rising numbers", where)
    return Case(content["name"], version, config, content["workload"], steps)


def _check_config(config: dict[str, Any], where: str) -> None:
    for key, least in REQUIRED.items():
        value = config.get(key)
        _require(_whole(value, least), f"must be a whole number >= {least}", f"{where}: config.{key}", value)
    for key in SWITCHES:
        value = config.get(key, None if key == "reserve_full_isl" else False)
        _require(isinstance(value, bool), "must be true or false", f"{where}: config.{key}", value)
    watermark = config.get("watermark", 0.0)
    ok = isinstance(watermark, int | float) and not isinstance(watermark, bool) and 0 <= watermark < 1
    _require(ok, "must be in [0, 1)", f"{where}: config.watermark", watermark)


def _check_row(row: Any, config: dict[str, Any], where: str) -> None:
    ok = isinstance(row, list) and len(row) == len(WORKLOAD_LEAST)
    ok = ok and all(_whole(value, least) for value, least in zip(row, WORKLOAD_LEAST, strict=True))
    _require(
        ok, "must be [arrival_step, prompt, output, adapter, prefix_group, shared_prefix_len]", where, row
    )
    _require(row[1] < config["max_model_len"], "the prompt must be shorter than max_model_len", where, row[1])


def _step(content: Any, requests: int, where: str) -> Step:
    _require(
        isinstance(content, list) and len(content) == 4, "must be [step, tokens, preempted, free]", where
    )
    number, tokens, preempted, free_blocks = content
    ok = (
        _whole(number, 0)
        and _whole(free_blocks, 0)
        and isinstance(tokens, dict)
        and isinstance(preempted, list)
    )
    ok = ok and all(_whole(count, 1) for count in tokens.values())
    ids = [str(each) for each in [*(tokens if ok else ()), *(preempted if ok else ())]]
    ok = ok and all(each.isdecimal() and int(each) < requests for each in ids)
    _require(ok, "must be [step, {request: tokens}, [preempted requests], free blocks]", where, content)
    return Step(
        number,
        [(int(request), count) for request, count in tokens.items()],
        sorted(int(request) for request in preempted),
        free_blocks,
    )


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(ok: object, rule: str, where: object, value: object = NO_VALUE) -> None:
    if not ok:
        raise InputError(rule, value, str(where))
