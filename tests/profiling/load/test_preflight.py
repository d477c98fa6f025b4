"""Metrics and engine settings that servers report."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.profiling.load._preflight import EngineInfo, engine_info, parse_metrics

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0"} 7
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:iteration_tokens_total_count{engine="0"} 1200.0
vllm:iteration_tokens_total_bucket{le="8.0"} 5.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b",waiting_lora_adapters=""} 1.7e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b,c",waiting_lora_adapters="d"} 1.8e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.6e+09
process_start_time_seconds 1e9
vllm:num_preemptions_total nonsense
"""


def test_metrics_of_engines_are_summed_and_the_newest_adapters_count() -> None:
    assert parse_metrics(TEXT) == {
        "running": 5.0,
        "waiting": 7.0,
        "kv_used": 0.25,
        "steps": 1200.0,
        "running_adapters": 3.0,
    }


def test_text_without_metrics_gives_no_values() -> None:
    assert parse_metrics("<html>\n{}\n") == {}


def test_other_servers_have_other_names() -> None:
    assert parse_metrics('sglang:num_running_reqs{m="x"} 4\nsglang:token_usage 0.5\n') == {
        "running": 4.0,
        "kv_used": 0.5,
    }


def series(name: str, value: float | str, **labels: str) -> str:
    written = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{written}}} {value}\n"


def lora(running: str, time_s: float, **labels: str) -> str:
    names = {"max_lora": "4", "waiting_lora_adapters": "", "running_lora_adapters": running}
    return series("vllm:lora_requests_info", time_s, **labels, **names)


OLD, NEW = "vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_a_share_is_the_mean_over_engines_under_one_of_its_names(
    shares: list[float], old: bool, new: bool
) -> None:
    names = [name for name, given in ((OLD, old), (NEW, new)) if given]
    text = "".join(
        series(name, share, engine=str(engine)) for name in names for engine, share in enumerate(shares)
    )
    found = parse_metrics(text)
    assert found.get("kv_used") == (pytest.approx(sum(shares) / len(shares)) if names else None)


def test_servers_of_several_versions_behind_a_router_are_read_each_by_its_name() -> None:
    first = series(OLD, 0.2, instance="a") + series(OLD, 0.4, instance="b") + series(NEW, 0.4, instance="b")
    assert parse_metrics(first)["kv_used"] == pytest.approx(0.3)


def test_counts_add_over_engines_but_not_over_the_ranks_of_one() -> None:
    text = "".join(
        series("sglang:num_running_reqs", 5.0, tp_rank=str(rank), dp_rank=str(engine))
        for rank in range(4)
        for engine in range(2)
    )
    assert parse_metrics(text) == {"running": 10.0}


def test_running_adapters_are_those_of_all_engines() -> None:
    routed = lora("a", 1e9, instance="x") + lora("", 9e8, instance="x") + lora("b", 2e9, instance="y")
    assert parse_metrics(routed)["running_adapters"] == 2.0
    same = lora("a,b", 1e9, instance="x") + lora("b,a", 1e9, instance="y")
    assert parse_metrics(same)["running_adapters"] == 2.0
    idle = lora("a,b", 1e9, instance="x") + lora("", 2e9, instance="x") + lora("c", 1e9, instance="y")
    assert parse_metrics(idle)["running_adapters"] == 1.0
    engines = "".join(series("vllm:num_requests_running", 1.0, engine=str(each)) for each in range(2))
    unnamed = lora("z", 1e9) + lora("a,b", 2e9) + lora("c", 2.1e9)
    assert parse_metrics(engines + unnamed)["running_adapters"] == 3.0
    assert parse_metrics(engines + lora("a", 1e9, engine="0") + lora("b", 2e9, engine="1")) == {
        "running": 2.0,
        "running_adapters": 2.0,
    }


OPEN_METRICS = """\
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 7 1395066363.000 # {trace_id="}\\"x"} 99.0 1395066363
vllm:num_preemptions_created{engine="0"} 1.7e+09
vllm:num_requests_running{engine="0",path="C:\\\\x{\\"y\\"}",note="a
vllm:num_requests_running{engine="0",path="C:\\\\x{\\"y\\"}"} 3
vllm:num_requests_waiting{engine="0"} NaN
vllm:kv_cache_usage_perc{engine="0"} +Inf
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:prompt_tokens_total {engine="0"} 5
vllm:iteration_tokens_total_bucket{le="+Inf"} 4 # {} 1
# EOF
"""


def test_exemplars_escapes_times_and_values_that_are_none() -> None:
    assert parse_metrics(OPEN_METRICS) == {
        "preemptions": 7.0,
        "running": 3.0,
        "kv_used": 0.5,
        "prompt_tokens": 5.0,
    }
    assert parse_metrics(lora('a\\"b, c\\\\', 1e9))["running_adapters"] == 2.0


@given(st.text(alphabet='vllm:kv_cache_usage_perc{}",\\= 0.5\n', max_size=60))
def test_text_of_any_shape_raises_no_exception(text: str) -> None:
    for found in (parse_metrics(NEW + text), parse_metrics("vllm:lora_requests_info" + text)):
        assert all(map(math.isfinite, found.values()))
    engine_info("vllm:cache_config_info" + text)


CACHE = 'block_size="32",gpu_memory_utilization="0.92",kv_cache_size_tokens="174752",num_gpu_blocks="5461"'

METRICS = f"""\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{{CACHE}}} 1.0
vllm:lora_requests_info{{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""}} 1.7e+09
"""


def test_slots_and_memory_are_read() -> None:
    assert engine_info(METRICS) == EngineInfo(4, 174_752, 32, 0.92)


def test_kv_tokens_fall_back_to_blocks() -> None:
    assert engine_info(METRICS.replace("kv_cache_size_tokens", "other")).kv_tokens == 5461 * 32


def test_unreported_settings_are_none() -> None:
    assert engine_info("") == EngineInfo()
    assert engine_info('vllm:cache_config_info{num_gpu_blocks="None"} 1\n').kv_tokens is None


def test_settings_of_several_engines() -> None:
    engines = [
        series("vllm:cache_config_info", 1.0, engine=n, num_gpu_blocks="10", block_size="16") for n in "01"
    ]
    assert engine_info("".join(engines)).kv_tokens == 320
    assert engine_info(engines[0] + series("vllm:cache_config_info", 1.0, engine="1")).kv_tokens is None
    slots = [series("vllm:lora_requests_info", 1.0, instance=n, max_lora=n) for n in "84"]
    assert engine_info("".join(slots)).a_max == 4
