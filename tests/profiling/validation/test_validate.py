"""Validation of plans on running servers, and the command of started ones."""

import asyncio
import os
import signal
from typing import Any

import pytest

from benchmarks.stand_in_servers import METRICS
from capplan import Adapter, Lengths, Profile, Workload
from capplan.cli.options import read_cache, read_queues, read_scheduler
from capplan.profiling.load import LoadProgress
from capplan.profiling.validation import ValidationOptions, validate
from capplan.profiling.validation._validate import KV_CAPACITY, server_command
from capplan.spec import Group, QueueClass, Queues, Wrs
from tests.cli.examples import MODEL, profile_document, small_plan
from tests.profiling.load.servers import listening, plain, toy_server
from tests.profiling.load.test_run import quick

PLAN = small_plan()
PROFILE = Profile.model_validate(profile_document())
PROFILES = {group.profile: PROFILE for group in PLAN.groups}
WORKLOAD = Workload(
    base_model=MODEL,
    adapters=[Adapter(name=name, rank=8, rate_rps=4.0) for name in ("a", "b", "shared")],
    prompt_tokens=Lengths(mean=12),
    output_tokens=Lengths(mean=6),
)


def test_an_interrupt_ends_the_validation_and_keeps_the_running_group() -> None:
    started: list[str] = []

    def interrupt(now: LoadProgress) -> None:
        if now.completed and len(started) == 1:
            started.append("interrupted")
            os.kill(os.getpid(), signal.SIGINT)

    with toy_server(load_ms=0.0, names=(MODEL, "a", "b", "shared")) as (url, _):
        options = ValidationOptions(duration_s=60.0, urls={"g0": url, "g1": url})
        found = validate(PLAN, WORKLOAD, PROFILES, options, started.append, interrupt)
    assert started == ["g0", "interrupted"]
    assert found.partial
    assert not found.agrees
    assert [(group.group, group.faults) for group in found.groups] == [("g0", ("stopped before its time",))]


def test_the_memory_of_a_server_with_api_key_is_read() -> None:
    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                if b"authorization: bearer sesame" not in head:
                    await plain(writer, 401, b"{}")
                elif head.startswith(b"get /metrics"):
                    await plain(writer, 200, METRICS.encode())
                elif b'"stream": true' in body:
                    await quick({"prompt": [1], "max_tokens": 2}, writer)
                else:
                    await plain(writer, 200, b'{"choices": [{"text": "a"}]}')
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    with listening(lambda: asyncio.start_server(guarded, "127.0.0.1", 0)) as url:
        options = ValidationOptions(duration_s=1.0, groups=("g0",), urls={"g0": url}, api_key="sesame")
        found = validate(PLAN, WORKLOAD, PROFILES, options)
    assert found.groups[0].metric(KV_CAPACITY).measured == 64_000
    assert found.results["g0"].overall.failed == 0


def words_of(
    group: Group = PLAN.groups[0], workload: Workload = WORKLOAD, lora_kernel: str | None = None
) -> list[str]:
    """Return the command line of a server of a group."""
    options = ValidationOptions(lora_kernel=lora_kernel)
    return server_command(PLAN, group, PROFILE, workload, 64_000, 10, options).words()


@pytest.mark.parametrize(
    ("flag", "value", "given"),
    [
        ("--shared-prefix-tokens", "9", {"workload": WORKLOAD.replace(shared_prefix_tokens=9)}),
        ("--lora-kernel", "padded", {"lora_kernel": "padded"}),
        ("--tensor-parallel-size", "2", {"group": PLAN.groups[0].replace(tp=2)}),
    ],
)
def test_a_server_is_started_with_prefix_kernel_and_ranks_if_any(
    flag: str, value: str, given: dict[str, Any]
) -> None:
    words = words_of(**given)
    assert words[words.index(flag) + 1] == value
    assert flag not in words_of()


def test_a_server_is_started_with_scheduler_cache_and_queues_of_its_group() -> None:
    wrs = Wrs(a=0.4, b=0.6, max_prompt_tokens=9, max_output_tokens=9, max_adapter_bytes=9)
    classes = (QueueClass(upper_wrs=0.5, quota_tokens=9), QueueClass(upper_wrs=None, quota_tokens=9))
    group = PLAN.groups[0].replace(scheduler="static", cache="gdsf", queues=Queues(wrs=wrs, classes=classes))
    words = words_of(group)
    given = {flag: words[words.index(flag) + 1] for flag in ("--scheduler", "--cache", "--queues")}
    assert read_scheduler(given["--scheduler"]) == group.scheduler
    assert read_cache(given["--cache"]) == group.cache
    assert read_queues(given["--queues"]) == group.queues
    assert "--rules" not in words
