"""Launch scripts for ``python3 -m sglang.launch_server``.

The flags are those of SGLang 0.5.23: ``sglang.srt.server_args``, with the checks of ``arg_groups/lora_hook``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from capplan.deploy import _launch as launch
from capplan.deploy._servers import Flag, quantization_of, require_servable
from capplan.deploy._target import Exporter, Loss
from capplan.spec import Group, Plan

_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--tp-size": "GPUs of one server",
        "--enable-lora": "off by default",
        "--max-loras-per-batch": "adapter slots of the plan, and one more if the base model has traffic, "
        "whose requests count as those of an adapter; 8 by default",
        "--max-loaded-loras": "adapters in host memory; never fewer than are loaded at the start, or fill a "
        "batch",
        "--max-lora-rank": "rank that every slot is sized for; by default that of the adapters below",
        "--lora-target-modules": "layers that slots hold space for; by default those of the adapters below",
        "--max-running-requests": "max_num_seqs of the plan; the default depends on memory",
        "--chunked-prefill-size": "max_num_batched_tokens of the plan; SGLang counts prompts alone",
        "--mem-fraction-static": "gpu_memory_utilization of the plan; activations and CUDA graphs are beyond "
        "it here: lower it if they do not fit",
        "--context-length": "max_model_len of the plan; by default all positions of the model",
        "--disable-radix-cache": "prefix caching is off in the plan; on by default",
        "--quantization": "weights of 16 bits become FP8 on loading, as the plan's profile has them",
        "--kv-cache-dtype": "as the plan's profile has it; that of the model by default",
    }
)

_KV_DTYPES: Final[Mapping[str, str]] = MappingProxyType({"fp8": "fp8_e4m3"})
"""Names of SGLang, by those of vLLM that differ."""


def sglang_files(plan: Plan, *, port: int = 8000) -> dict[str, str]:
    """Return one launch script per server, the routing table, and the plan that their digest is of.

    Parameters are those of `capplan.deploy.export`, and paths those for vLLM.
    """
    require_servable(plan, "SGLang")
    return launch.launch_files(plan, port, partial(_script, plan))


def sglang_losses(plan: Plan) -> tuple[Loss, ...]:
    """Return what SGLang does not do as the plan says."""
    rules = ", ".join(dict.fromkeys(plan.engine_of(group).rules for group in plan.groups))
    losses = [
        Loss(
            f"SGLang schedules by its own rules, not by {rules}, which the twin followed: a step computes "
            "prompts or decodes, not both, and has other step times, memory and slots"
        )
    ]
    if any(group.adapters for group in plan.groups):
        losses.append(Loss(f"requests name an adapter as model {plan.base_model}:ADAPTER, not ADAPTER"))
    if any(plan.engine_of(group).fully_sharded_loras for group in plan.groups):
        losses.append(Loss("SGLang shards one matrix of a layer, not both: slots take more memory"))
    return tuple(losses)


def _script(plan: Plan, server: launch.Server, digest: str) -> str:
    group = server.group
    flags = tuple(_flags(plan, group))
    command = [
        f"exec python3 -m sglang.launch_server --model-path={shlex.quote(plan.base_model)}",
        '--host="${HOST:-127.0.0.1}"',
        launch.port_word(server),
        *(" ".join(map(shlex.quote, flag.words)) for flag in flags),
        '"$@"',  # before --lora-paths, which takes every word up to the next flag
    ]
    if group.adapters:
        command += ["--lora-paths", *(launch.adapter_word(each, _lora_path) for each in group.adapters)]
    comment = [
        *launch.header_of(plan, server, digest, "SGLang"),
        *(f"Differs from the plan: {loss.text}." for loss in sglang_losses(plan)),
        "HOST=0.0.0.0 lets other machines reach it, which SGLang's default does not.",
        *(["Its scheduler, queues and cache policy are left out."] if group.scheduling is not None else []),
        *(f"{' '.join(flag.words)}: {_REASONS[flag.name]}" for flag in flags),
        *launch.download_lines(group.adapters),
    ]
    return launch.shell_script(comment, launch.root_check(group.adapters), command)


def _flags(plan: Plan, group: Group) -> Iterator[Flag]:
    """Yield the flags of a group's servers, all but the port and the adapters."""
    args, engine = group.engine_args, plan.engine_of(group)
    yield Flag("--tp-size", (str(group.tp),))
    if args.max_loras:
        yield from _lora_flags(plan, group)
    yield Flag("--max-running-requests", (str(args.max_num_seqs),))
    yield Flag("--chunked-prefill-size", (str(args.max_num_batched_tokens),))
    yield Flag("--mem-fraction-static", (str(args.gpu_memory_utilization),))
    yield Flag("--context-length", (str(args.max_model_len),))
    if args.enable_prefix_caching is False:
        yield Flag("--disable-radix-cache")
    if (quantization := quantization_of(engine, group)) is not None:
        yield Flag("--quantization", (quantization,))
    if engine.kv_cache_dtype is not None:
        yield Flag("--kv-cache-dtype", (_KV_DTYPES.get(engine.kv_cache_dtype, engine.kv_cache_dtype),))


def _lora_flags(plan: Plan, group: Group) -> Iterator[Flag]:
    args, adapters = group.engine_args, len(group.adapters)
    in_batch = args.max_loras + (group.base is not None)
    on_host = adapters if args.max_cpu_loras is None else args.max_cpu_loras
    yield Flag("--enable-lora")
    yield Flag("--max-loras-per-batch", (str(in_batch),))
    yield Flag("--max-loaded-loras", (str(max(on_host, adapters, in_batch)),))
    yield Flag("--max-lora-rank", (str(args.max_lora_rank),))
    modules = plan.engine_of(group).target_modules
    if modules is not None:
        yield Flag("--lora-target-modules", modules)
    elif not adapters:  # nothing to infer them from
        yield Flag("--lora-target-modules", ("all",))


def _lora_path(name: str, path: str) -> str:
    """Return a value of ``--lora-paths``: ``name=path``, or JSON if SGLang would strip the path."""
    if path != path.strip():
        return json.dumps({"lora_name": name, "lora_path": path})
    return f"{name}={path}"


EXPORTER: Final = Exporter(
    sglang_files,
    launch.TOP_NAMES,
    serves=True,
    options=("port",),
    losses=sglang_losses,
    notes=launch.download_notes,
)
