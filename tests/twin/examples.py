"""A profile of round numbers and workloads for it."""

from capplan import Adapter, Lengths, Profile, Workload
from capplan.spec import (
    Coefficient,
    Fit,
    FittedModel,
    Gpu,
    ModelArch,
    ProfileEngine,
    Provenance,
    ProvenanceKind,
)

FIT = Fit(source="made up", samples=0, error_formula="none", error=0.0)


def part(form: str, **values: float) -> FittedModel:
    """Return a model with these coefficients."""
    return FittedModel(form=form, coefficients={k: Coefficient(value=v) for k, v in values.items()}, fit=FIT)


def profile(
    step_ms: float = 10.0, request_ms: float = 0.0, load_ms: float = 0.0, disk_ms: float = 0.0
) -> Profile:
    """Return a profile whose every step takes `step_ms`; a KV token takes 4 KiB, a slot 576 KiB at rank 1."""
    return Profile(
        name="test/tiny/vllm-0.8.5",
        gpu=Gpu(name="Test GPU", memory_bytes=2**30),
        model=ModelArch(
            name="tiny",
            hf_ids=("org/tiny",),
            layers=4,
            hidden_size=256,
            heads=4,
            kv_heads=4,
            head_dim=64,
            intermediate_size=512,
            vocab_size=512,
        ),
        engine=ProfileEngine(name="vllm", version="0.8.5", rules="vllm-0.8"),
        step_latency=part("digital-twin", k1=0, k2=0, k3=0, k4=0, k5=1, k6=0, k7=step_ms),
        memory=part(
            "slots-and-reserve",
            reserved_bytes=0,
            slot_factor=1,
            slot_overhead_bytes=0,
            bytes_per_seq=0,
            seqs_in_reserve=0,
        ),
        loading=part(
            "copies-and-bytes",
            gpu_base_ms=load_ms,
            gpu_ms_per_rank=0,
            gpu_padding_ms=0,
            disk_base_ms=disk_ms,
            disk_ms_per_rank=0,
            serving_factor=1,
        ),
        host=part("per-request", request_ms=request_ms, client_itl_factor=1),
        provenance=Provenance(kind=ProvenanceKind.ROOFLINE, source="made up", command="none"),
    )


def workload(
    adapters: int = 4, rate_rps: float = 0.5, rank: int = 8, prompt: float = 64, output: float = 16
) -> Workload:
    """Return a workload of equal adapters and constant lengths."""
    return Workload(
        base_model="org/tiny",
        adapters=tuple(Adapter(name=f"a{i}", rank=rank, rate_rps=rate_rps) for i in range(adapters)),
        prompt_tokens=Lengths(mean=prompt),
        output_tokens=Lengths(mean=output),
    )
