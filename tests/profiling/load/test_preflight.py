"""Metrics and engine settings that servers report."""

from capplan.profiling.load.preflight import EngineInfo, engine_info, parse_metrics

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
