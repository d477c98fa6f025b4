from capplan.profiling.load.preflight import EngineInfo, engine_info

CACHE = 'block_size="32",gpu_memory_utilization="0.92",kv_cache_size_tokens="174752",num_gpu_blocks="5461"'
METRICS = f"""\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{{CACHE}}} 1.0
vllm:lora_requests_info{{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""}} 1.7e+09
"""


def test_slots_and_memory_are_read() -> None:
    assert engine_info(METRICS) == EngineInfo(4, 174_752, 32, 0.92)


def test_blocks_stand_in_for_tokens_where_those_are_not_told() -> None:
    assert engine_info(METRICS.replace("kv_cache_size_tokens", "other")).kv_tokens == 5461 * 32


def test_what_is_not_told_is_not_known() -> None:
    assert engine_info("") == EngineInfo()
    assert engine_info('vllm:cache_config_info{num_gpu_blocks="None"} 1\n').kv_tokens is None
