"""Toppings' two settings (sections 7.4 and 7.5): workloads, and an H100 whose kernels pay for ranks.

No profile of the paper's GPUs is at hand, and the shipped profiles are vLLM's, whose kernels do not care
which ranks are in a batch. So the engine here is made up of three parts, and its provenance says so:

- the shipped H100 profile of Llama-3.1-8B for steps without adapters, for memory and for copies of adapters;
- Toppings' Figures 5 and 6 for decode: 24 requests of rank 32 take 34.8 ms and 16 of rank 64 take 35.8 ms
  with padding (BGMV), 35.3 and 35.9 ms without (MBGMV): 3.5 and 2.344 ms per 1000 units of rank on their
  GPUs;
- LoRAServe's section III-A for prefill: 2,000 tokens take 2.7 times as long at rank 128 as at rank 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan import Adapter, Profile, Workload, load_profile
from capplan.models.step_latency import ADDITIVE, GRAPH_TOKENS
from capplan.spec import Kernel, load_workload
from capplan.twin.cluster import Instance
from capplan.workload.presets import preset

SHIPPED: Final = "h100-64g/llama-3.1-8b/vllm-0.8.5"
BASE_MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"
RANKS: Final = (8, 16, 32, 64)
DECODE_MS_PER_KRANK: Final = {Kernel.BGMV: 3.5, Kernel.MBGMV: 2.34375}


def engine(profile: Profile, adapters: Mapping[str, float] | None = None) -> Instance:
    """Return an instance: 64 slots of rank 64, vLLM's default batch.

    Adapters are loaded beside the batch, which is nearest to the paper's engine, whose CPU computes for an
    adapter that is on its way: nobody else waits for it.
    """
    return Instance(profile, a_max=64, s_max=64, rules="capplan", prefix_caching=False, adapters=adapters)


@dataclass(frozen=True)
class Setting:
    """Instances and what they are asked."""

    name: str
    workload: Workload
    instances: int

    def engines(self, profile: Profile) -> list[Instance]:
        """Return the instances; every one holds every adapter."""
        return [engine(profile)] * self.instances

    def placed(self, profile: Profile) -> list[Instance]:
        """Return the instances with the adapters spread as dLoRA spreads them.

        Replicas in proportion to the rates, as many in all as adapters and engines less one (PAPER_NOTES 9);
        the busiest adapter first, each replica on the engine with the lowest rate so far.
        """
        held: list[dict[str, float]] = [{} for _ in range(self.instances)]
        rate_rps = np.zeros(self.instances)
        total = sum(adapter.rate_rps for adapter in self.workload.adapters)
        for adapter in sorted(self.workload.adapters, key=lambda each: -each.rate_rps):
            spare = int(adapter.rate_rps / total * (self.instances - 1))
            for i in np.argsort(rate_rps, kind="stable")[: 1 + spare].tolist():
                held[i][adapter.name] = 1.0
                rate_rps[i] += adapter.rate_rps / (1 + spare)
        return [engine(profile, own) for own in held]


def profile_with(kernel: Kernel) -> Profile:
    """Return the H100 with LoRA kernels of this kind; vLLM's are those of the shipped profile as it is."""
    shipped = load_profile(SHIPPED)
    if kernel is Kernel.VLLM:
        return shipped
    data = shipped.model_dump(mode="json")
    coefficients = data["step_latency"]["coefficients"]
    for name in coefficients:  # vLLM's own kernels
        if "slot" in name or "adapter" in name:
            coefficients[name] = {"value": 0.0}
    plain_ms = prefill_ms(shipped, 2000)
    # (plain + k * 2000 * 128 / 1000) / (plain + k * 2000 * 8 / 1000) = 2.7
    prefill = (2.7 - 1.0) * plain_ms / (2000 * (128 - 2.7 * 8) / 1000)
    coefficients["ms_per_decode_krank"] = {"value": DECODE_MS_PER_KRANK[kernel]}
    coefficients["ms_per_prefill_krank"] = {"value": prefill}
    data["engine"]["kernel"] = kernel.value
    data["name"] = f"h100-64g/llama-3.1-8b/{kernel.value}"
    data["provenance"] |= {
        "kind": "published",
        "source": "step without LoRA, memory, loading: shipped; LoRA: Toppings Figs 5, 6; LoRAServe III-A",
        "command": "python -m benchmarks.toppings_cluster",
        "notes": "put together for one benchmark; LoRA terms are those of other GPUs",
    }
    return Profile.model_validate(data)


def prefill_ms(profile: Profile, tokens: int) -> float:
    """Return the milliseconds of a step that computes so many prompt tokens without any adapter."""
    model = profile.step_latency
    beyond = model.value("ms_per_ktoken_beyond_graphs") * max(0, tokens - GRAPH_TOKENS)
    assert model.form == ADDITIVE.name
    return model.value("base_ms") + (model.value("ms_per_ktoken") * tokens + beyond) / 1e3


def cluster(rps: float) -> Setting:
    """Return section 7.4: 8 instances, four ranks, 128 adapters of each."""
    workload = _preset(f"toppings-cluster-{rps:g}")
    return Setting(f"8 instances, {rps:g} req/s", workload, 8)


def simulation(
    popularity: str = "functions", adapters: int = 40_000, rps: float = 340.0, instances: int = 60
) -> Setting:
    """Return section 7.5: 60 instances and 40,000 adapters; the four ranks are dealt in turn (assumed)."""
    shares = function_shares(adapters) if popularity == "functions" else zipf_shares(adapters)
    lengths = _preset("toppings-cluster-30")
    dealt = tuple(
        Adapter(name=f"f{i}", rank=RANKS[i % 4], rate_rps=rps * share)
        for i, share in enumerate(shares.tolist())
    )
    workload = lengths.model_copy(update={"adapters": dealt})
    name = f"{instances} instances, {rps:g} req/s, {adapters:,} adapters ({popularity})"
    return Setting(name, workload, instances)


def function_shares(functions: int, seed: int = 2019) -> NDArray[np.float64]:
    """Return shares like those of the functions of Azure's trace of 2019, by its published facts.

    45 % of the applications are asked at most once an hour, 36 % up to once a minute, 16 % up to once a
    second, 3 % more often, over eight decades (Shahrad et al., ATC 2020). Log-uniform within each band, from
    1e-5 to 10 a second; those ends are assumed.
    """
    rng = np.random.default_rng(seed)
    ends = np.log10([1e-5, 1 / 3600, 1 / 60, 1.0, 10.0])
    band = rng.choice(4, functions, p=[0.45, 0.36, 0.16, 0.03])
    return _shares(10.0 ** rng.uniform(ends[band], ends[band + 1]))


def zipf_shares(adapters: int, s: float = 1.44) -> NDArray[np.float64]:
    """Return Zipf's law with the exponent of Azure's functions of 2021."""
    return _shares(np.arange(1.0, adapters + 1) ** -s)


def _shares(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(weights / weights.sum())


def _preset(name: str) -> Workload:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "workload.yaml"
        path.write_text(preset(name).yaml(profile=SHIPPED, base_model=BASE_MODEL))
        return load_workload(path)
