"""Prometheus metrics of a server, under vLLM's names."""

import json
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from capplan.fleet._routing import ReportedState
from capplan.server._metrics import Histogram
from capplan.serving.routers import RESIDENT
from capplan.spec import QueueClass, Queues, Wrs
from tests.engine.live import Live, live
from tests.engine.test_faults import complete, send, streamed


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live({"a": 8, "b": 4}, {"max_loras": 1, "max_num_seqs": 2}) as running:
        yield running


def samples(server: Live) -> dict[str, float]:
    """Return the values of all series by name, with labels other than vLLM's usual ones."""
    answer = send(server, "GET", "/metrics")
    assert answer.status == 200
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation
        for sample in family.samples:
            if sample.name.startswith("vllm:") and sample.name != "vllm:lora_requests_info":
                assert sample.labels.pop("model_name") == "base"
                assert sample.labels.pop("engine") == "0"
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_counters_match_the_requests(server: Live) -> None:
    before = samples(server)
    for tokens in (1, 5, 9):
        assert complete(server, prompt=[1, 2, 3], max_tokens=tokens, ignore_eos=True).status == 200
    assert complete(server, max_tokens=0).status == 400
    after = samples(server)
    grown = {name: value - before[name] for name, value in after.items()}
    assert grown["vllm:prompt_tokens_total"] == 9
    assert grown["vllm:generation_tokens_total"] == 15
    assert grown["vllm:request_success_total{finished_reason=length}"] == 3
    assert grown["vllm:request_success_total{finished_reason=abort}"] == 0
    for name, count in (
        ("time_to_first_token", 3),
        ("inter_token_latency", 12),
        ("time_per_output_token", 12),
        ("request_time_per_output_token", 2),
        ("e2e_request_latency", 3),
        ("request_queue_time", 3),
    ):
        assert grown[f"vllm:{name}_seconds_count"] == count
        assert grown[f"vllm:{name}_seconds_bucket{{le=+Inf}}"] == count
    assert grown["vllm:iteration_tokens_total_count"] == 15
    assert grown["vllm:iteration_tokens_total_sum"] == 9 + 12
    assert grown["vllm:e2e_request_latency_seconds_sum"] >= grown["vllm:time_to_first_token_seconds_sum"] > 0


def test_a_stop_string_counts_as_stop(server: Live) -> None:
    letter = json.loads(complete(server, max_tokens=1).body)["choices"][0]["text"]
    before = samples(server)
    asked = {"max_tokens": 50, "stop": [letter], "return_token_ids": True}
    [choice] = json.loads(complete(server, **asked).body)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["token_ids"])) == ("stop", letter, 1)
    server.check_idle()
    after = samples(server)
    for reason, count in (("stop", 1), ("abort", 0)):
        name = f"vllm:request_success_total{{finished_reason={reason}}}"
        assert after[name] - before[name] == count


def test_gauges_of_running_and_waiting_requests(server: Live) -> None:
    with streamed(server, prompt=[[1, 2]] * 5, max_tokens=500):
        now = samples(server)
    assert now["vllm:num_requests_running"] == 2
    assert now["vllm:num_requests_waiting"] == 3
    assert 0 < now["vllm:kv_cache_usage_perc"] < 1
    [info] = [name for name in now if name.startswith("vllm:lora_requests_info")]
    assert info.endswith("{max_lora=1,running_lora_adapters=a,waiting_lora_adapters=a}")
    server.check_idle()
    afterwards = samples(server)
    assert afterwards["vllm:num_requests_running"] == afterwards["vllm:kv_cache_usage_perc"] == 0
    assert afterwards["vllm:request_success_total{finished_reason=abort}"] == 5


def test_the_speed_of_the_core_is_measured_between_steps(server: Live) -> None:
    name = "capplan:speed_probe_seconds"
    before = samples(server)
    assert complete(server, max_tokens=400, ignore_eos=True).status == 200
    after = samples(server)
    taken, spent_s = (after[f"{name}_{part}"] - before[f"{name}_{part}"] for part in ("count", "sum"))
    assert 0 < taken < 400  # not after each step
    assert 0.0 < spent_s / taken < 0.1


def test_a_shared_pool_has_metrics_of_its_queues_and_cached_adapters() -> None:
    wrs = Wrs(a=0.4, b=0.6, max_prompt_tokens=100, max_output_tokens=100, max_adapter_bytes=1)
    classes = (QueueClass(upper_wrs=0.5, quota_tokens=400), QueueClass(upper_wrs=None, quota_tokens=2000))
    queues = Queues(wrs=wrs, adapter_charge="none", classes=classes)
    pool = {"scheduler": "chameleon", "cache": "lru", "queues": queues, "max_num_seqs": 2}
    with live({"a": 8, "b": 4}, pool) as running:
        before = samples(running)
        for name in "bbb":
            assert complete(running, model=name, max_tokens=3, ignore_eos=True).status == 200
        grown = {name: value - before[name] for name, value in samples(running).items()}
        assert grown["capplan:adapter_cache_hits_total"] == 2
        assert grown["capplan:adapter_cache_misses_total"] == 1
        assert grown["capplan:adapters_cached"] == 1
        assert grown["capplan:adapter_prefetches_total{outcome=wasted}"] == 0
        assert grown["vllm:kv_cache_usage_perc"] == 0  # idle adapters make room
        refreshes = ("queue_refreshes", "queue_refreshes_kept", "queue_quotas_scaled")
        for name in ("adapter_evictions", "bypasses", "squashes", "overruns", "recomputes", *refreshes):
            assert grown[f"capplan:{name}_total"] == 0
        with streamed(running, prompt=[[1, 2]] * 5, max_tokens=300):
            now = samples(running)
        by_queue = [
            [now[f"capplan:queue_{name}{{queue={number}}}"] for number in (0, 1)]
            for name in ("requests_waiting", "quota_tokens", "outstanding_tokens")
        ]
        assert by_queue == [[0, 3], [400, 2000], [0, 2 * 302]]
        running.check_idle()


def test_buckets_include_their_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.sum == 5.5


def test_routers_read_the_state_between_two_steps(server: Live) -> None:
    before = json.loads(send(server, "GET", "/state").body)
    assert complete(server, model="a", prompt=[1, 2, 3], max_tokens=4, ignore_eos=True).status == 200
    answer = send(server, "GET", "/state")
    state = ReportedState.model_validate_json(answer.body)
    assert (state.running, state.queued, state.running_tokens, state.partial_tokens) == (0, 0, 0, 0)
    assert state.free_blocks == state.blocks > 0
    assert (state.max_loras, state.max_num_seqs) == (1, 2)
    assert state.adapters == {"a": RESIDENT}
    assert state.answers == before["answers"] + 1
    assert state.answer_tokens == before["answer_tokens"] + 4
