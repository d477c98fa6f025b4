"""Small documents that the tests of commands, exporters and loaders share."""

import json
from pathlib import Path
from typing import Any

from capplan import EngineArgs, Plan
from capplan.spec import (
    Binds,
    Group,
    GroupVerification,
    Percentiles,
    PlanAdapter,
    PlanEngine,
    Predicted,
    Totals,
    Verification,
)

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
WORKLOAD = f"""\
base_model: {MODEL}
profile: ./profile.json
gpus: {{count: 2}}
engine: {{max_num_seqs: 64, max_num_batched_tokens: 2048, max_model_len: 4096}}
requests: {{prompt_tokens: {{mean: 120, std: 60}}, output_tokens: {{mean: 40, std: 20}}}}
adapters:
  - {{name: "support-{{i}}", count: 12, rank: 8, rate_rps: 0.05}}
  - {{name: legal, rank: 16, rate_rps: 0.3, path: adapters/legal}}
"""


def profile_document() -> dict[str, Any]:
    """Return a profile of plausible numbers, as JSON data."""
    fit = {
        "source": "an estimate for tests",
        "samples": 0,
        "error_formula": "100 * mean(|p - a| / (|p| + |a|))",
        "error": 12.5,
    }

    def part(form: str, **values: float) -> dict[str, Any]:
        coefficients = {
            name: {"value": value, "std_error": abs(value) / 10} for name, value in values.items()
        }
        return {"form": form, "coefficients": coefficients, "fitted_range": {"tokens": [1, 2048]}, "fit": fit}

    return {
        "name": "test-gpu/llama-3.1-8b/vllm-0.8.5",
        "gpu": {"name": "Test GPU", "memory_bytes": 64 * 2**30},
        "model": {
            "name": "Llama-3.1-8B",
            "hf_ids": [MODEL],
            "layers": 32,
            "hidden_size": 4096,
            "heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "intermediate_size": 14336,
            "vocab_size": 128256,
        },
        "engine": {"name": "vllm", "version": "0.8.5", "rules": "vllm-0.8"},
        "step_latency": part(
            "additive",
            base_ms=8.0,
            ms_per_ktoken=20.0,
            ms_per_kv_ktoken=0.05,
            ms_per_slot=0.01,
            ms_per_slot_ktoken=0.0,
            ms_per_slot_rank16=0.01,
            ms_per_adapter=0.05,
            ms_per_adapter_rank16=0.0,
            ms_per_adapter_small_rank16=0.0,
            ms_per_adapter_krequest=0.0,
            ms_per_adapter_queued=0.0,
            ms_per_waiting_krequest=0.1,
            ms_per_ktoken_beyond_graphs=1.0,
        ),
        "memory": part(
            "slots-and-reserve",
            slot_factor=1.0,
            slot_overhead_bytes=0.0,
            reserved_bytes=4e9,
            bytes_per_seq=0.0,
            seqs_in_reserve=1024.0,
        ),
        "loading": part(
            "copies-and-bytes",
            serving_factor=1.0,
            gpu_base_ms=8.0,
            gpu_ms_per_rank=0.1,
            gpu_padding_ms=1.0,
            disk_base_ms=50.0,
            disk_ms_per_rank=2.0,
        ),
        "host": part("per-request", request_ms=5.0, client_itl_factor=1.0),
        "provenance": {"kind": "roofline", "source": "an estimate for tests", "command": "none"},
    }


def write_inputs(folder: Path, workload: str = WORKLOAD) -> Path:
    """Write a workload and the profile it names; return the path of the workload."""
    (folder / "profile.json").write_text(json.dumps(profile_document()))
    path = folder / "workload.yaml"
    path.write_text(workload)
    return path


def small_plan(**changes: Any) -> Plan:
    """Return a plan of two groups: one with two replicas, and an adapter shared between both.

    Its digest is that of the plan with the changes.
    """
    groups = (
        group("g0", replicas=2, adapters=(("a", 8, 0.5, None), ("shared", 16, 0.25, None))),
        group("g1", adapters=(("b", 32, 1.0, "/models/b"), ("shared", 16, 0.75, None)), max_lora_rank=32),
    )
    verdicts = tuple(verdict(each.id) for each in groups)
    plan = Plan(
        created_by="capplan tests",
        base_model=MODEL,
        engine=PlanEngine(name="vllm", version="0.8.5", rules="vllm-0.8"),
        objective="min_gpus",
        workload_digest="0" * 64,
        groups=groups,
        totals=Totals(gpus=3, lower_bound_gpus=2),
        provenance={"solver": "capplan", "seed": 0},
        verification=Verification(
            ok=True, seeds=(1, 2, 3), duration_s=3600.0, min_served_fraction=0.97, groups=verdicts
        ),
    )
    return plan.replace(**changes).with_digest()


def plan_of(*groups: Group, **changes: Any) -> Plan:
    """Return a verified plan of these groups alone."""
    gpus = sum(each.replicas * each.tp for each in groups)
    check = Verification(ok=True, seeds=(1,), duration_s=60.0, min_served_fraction=1.0)
    totals = Totals(gpus=gpus, lower_bound_gpus=1)
    return small_plan(groups=groups, totals=totals, **{"verification": check, **changes})


def group(
    name: str,
    adapters: tuple[tuple[str, int, float, str | None], ...],
    replicas: int = 1,
    max_lora_rank: int = 16,
    **args: Any,
) -> Group:
    """Return a group; an adapter is (name, rank, share, path), each at 0.4 requests per second."""
    engine = {
        "max_loras": 2,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.9,
        "max_model_len": 8192,
    }
    # In these plans an adapter on one group alone has the whole of its traffic there.
    entries = tuple(
        PlanAdapter(name=a, rank=rank, rate_rps=0.4, path=path, share=share if a == "shared" else 1.0)
        for a, rank, share, path in adapters
    )
    return Group(
        id=name,
        replicas=replicas,
        gpu="Test GPU",
        profile="test-gpu/llama-3.1-8b/vllm-0.8.5",
        engine_args=EngineArgs(**{**engine, "max_lora_rank": max_lora_rank, **args}),
        adapters=entries,
        predicted=Predicted(
            throughput_tok_s=1234.0,
            low_tok_s=1200.0,
            high_tok_s=1300.0,
            ttft_s=Percentiles(mean=0.1, p50=0.1, p95=0.2, p99=0.35),
            tpot_ms=Percentiles(mean=20.0, p50=19.0, p95=30.0, p99=41.5),
            served_fraction=0.975,
            kv_tokens=123456,
            load_over_capacity=0.82,
            source="twin",
        ),
        binds=Binds(resource="kv", value=0.93, note="share of KV blocks in use"),
    )


def verdict(name: str, ok: bool = True, note: str = "") -> GroupVerification:
    """Return what the twin says of a group."""
    return GroupVerification(
        id=name, ok=ok, served_fraction=0.97, throughput_tok_s=1230.0, ttft_p99_s=0.4, note=note
    )
