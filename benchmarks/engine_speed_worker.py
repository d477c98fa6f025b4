"""One engine in a process, controlled by lines of JSON; `benchmarks.engine_speed` starts it.

The Python of the engine runs it as a file, so it imports that engine only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[list[list[int]], list[str], int], list[list[int]]]
"""(prompts, adapters, tokens) to the answers."""


def capplan_run(given: dict[str, Any]) -> Run:
    import torch

    from capplan.engine import Engine

    torch.set_num_threads(given["threads"])
    engine = Engine(given["model"], given["adapters"], **given["settings"])

    def run(prompts: list[list[int]], adapters: list[str], tokens: int) -> list[list[int]]:
        answers = engine.generate(prompts, adapters, max_tokens=tokens, ignore_eos=True)
        return [list(answer.token_ids) for answer in answers]

    return run


def vllm_run(given: dict[str, Any]) -> Run:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(given["model"], enable_lora=True, disable_log_stats=True, **given["settings"])
    loras = {
        name: LoRARequest(name, number, path)
        for number, (name, path) in enumerate(given["adapters"].items(), start=1)
    }

    def run(prompts: list[list[int]], adapters: list[str], tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=True)
        answers = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            params,
            lora_request=[loras[name] for name in adapters],
            use_tqdm=False,
        )
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return run


def main() -> None:
    given = json.loads(sys.argv[1])
    run = {"capplan": capplan_run, "vllm": vllm_run}[given["engine"]](given)
    answers_to, sys.stdout = sys.stdout, sys.stderr  # engines print to stdout, too
    for line in sys.stdin:
        task = json.loads(line)
        begin = time.perf_counter()
        answers = run(task["prompts"], task["adapters"], task["tokens"])
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "answers": answers}), file=answers_to, flush=True)


if __name__ == "__main__":
    main()
