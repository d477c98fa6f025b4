"""Servers of Toppings by loading policy: ``python -m benchmarks.papers.toppings.servers`` prints its tables.

Each part is a figure: ``cumulative`` (Fig. 3), ``production`` (Fig. 13), ``interruptions`` (Fig. 4),
``synthetic`` (Table 2, Figs. 14 and 16, and the strawman of Fig. 8); ``settle`` shows what fixes the numbers
of `baseline`. All systems serve the same requests with the same base model and differ in `Cache.loading`
alone, S-LoRA also in its loader, dLoRA in its batches and LoRA operator; no adapter is kept without a request
and none is loaded ahead. Figures are means over seeds, relative to
``cached``.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from benchmarks.common import command_line, preset_workload, records_table
from benchmarks.papers.toppings import baseline
from capplan import Adapter, Profile, Workload, simulate
from capplan.errors import InfeasibleError
from capplan.spec import Cache, Lengths, Merging, Scheduler, Trace
from capplan.twin import SimulationResult, simulate_detailed

Result = TypeVar("Result")

CACHED: Final = "cached"
S_LORA: Final = "S-LoRA (on-demand)"
FEW_CORES: Final = "assisted, quarter of the cores"
DLORA: Final = "dLoRA"


@dataclass(frozen=True)
class System:
    """A server."""

    loading: str
    load_ms: float = baseline.COPY_MS
    """Of an adapter of rank 64."""
    cores: int | None = None
    is_dlora: bool = False

    def profile(self, load: Workload, model: str) -> Profile:
        if self.is_dlora:
            return baseline.dlora_profile(load.adapters[0].rank, model)
        return baseline.profile(model=model, load_ms=self.load_ms)

    def scheduler(self, model: str) -> Scheduler:
        """Return the settings; for the large model the paper has dLoRA's adapters in its own engine."""
        merging = Merging() if self.is_dlora and model == baseline.SMALL else None
        return Scheduler(policy="fifo", merging=merging)

    def cache(self) -> Cache:
        """Return the settings: nothing is kept without a request, or loaded ahead."""
        chosen: dict[str, object] = {"policy": "none", "loading": self.loading}
        if self.loading not in (CACHED, "resident"):
            chosen["prefetch"] = "none"
        if self.cores is not None:
            chosen["cpu_workers"] = self.cores
        return Cache.model_validate(chosen)


SYSTEMS: Final = {
    S_LORA: System("on-demand", baseline.SLORA_LOAD_MS),
    "on-demand": System("on-demand"),
    "strawman": System("strawman"),
    "assisted": System("assisted"),
    FEW_CORES: System("assisted", cores=baseline.CORES // 4),
    DLORA: System("resident", is_dlora=True),
}
METRICS: Final = {"TTFT": "ttft_s_mean", "TPT": "tpt_ms_mean", "E2E": "e2e_s_mean"}
SCALED: Final = {128: 1.5, 256: 3.6, 512: 7.7}
"""Requests per second by number of adapters (section 7.2)."""
CUMULATIVE: Final = {"requests": 5, "rank": 128, "prompt": 128, "output": 32, "every_ms": 200}
"""The requests of Fig. 3, each of an adapter of its own."""
INTERRUPTED_RPS: Final = (3.0, 6.0, 9.0)
SYNTHETIC: Final = ("s1", "s2", "s3", "s4", "s5", "s6")
LARGE: Final = ("s5", "s6")
POPULARITY: Final = "adapter_popularity.csv"
COMPRESSION: Final = 30
MAX_MODEL_LEN: Final = 4096


@dataclass(frozen=True)
class Trial:
    """Settings of all runs."""

    duration_s: float
    seeds: tuple[int, ...]


def run(
    load: Workload,
    system: System,
    trial: Trial,
    model: str = baseline.SMALL,
    simulated: Callable[..., Result] = simulate,
) -> list[Result]:
    """Return one result per seed; dLoRA's adapters have the rank of their memory."""
    profile, scheduler = system.profile(load, model), system.scheduler(model)
    if system.is_dlora:
        padded = [a.replace(rank=baseline.padded_rank(a.rank, model)) for a in load.adapters]
        load = load.model_copy(update={"adapters": tuple(padded)})
    return [
        simulated(
            load,
            profile,
            a_max=len(load.adapters),
            s_max=512,
            scheduler=scheduler,
            cache=system.cache(),
            max_model_len=MAX_MODEL_LEN,
            gpus_per_link=baseline.GPUS[model],
            max_num_batched_tokens=MAX_MODEL_LEN,
            duration_s=trial.duration_s,
            seed=seed,
        )
        for seed in trial.seeds
    ]


def mean(results: Sequence[SimulationResult], metric: str) -> float:
    return float(np.mean([getattr(result, metric) for result in results]))


def production(adapters: int, rps: float, traces: Path | None) -> Workload:
    """Return scaled production: the preset's popularity, or that of recorded counts with random factors."""
    load = preset_workload("toppings-maf-512")
    if traces is None:
        shares = [adapter.rate_rps for adapter in load.adapters][:adapters]
    else:
        shares = recycled(traces / POPULARITY, adapters)
    total = sum(shares)
    cycled = tuple(
        Adapter(name=f"f-{i}", rank=64, rate_rps=rps * share / total) for i, share in enumerate(shares)
    )
    return baseline.with_outputs(load.model_copy(update={"adapters": cycled}))


def recycled(counts: Path, adapters: int, seed: int = 2019) -> list[float]:
    """Return the invocations of so many functions: the recorded apps again and again, times e^N(0, 1)."""
    with counts.open(newline="") as file:
        recorded = [float(row["count"]) for row in csv.DictReader(file) if row["source"] == "maf2021_app"]
    rng = np.random.default_rng(seed)
    rounds = -(-adapters // len(recorded))
    drawn = np.concatenate([rng.permutation(recorded) for _ in range(rounds)])[:adapters]
    return list(drawn * rng.lognormal(0.0, 1.0, adapters))


def over_cached(
    name: str, load: Workload, trial: Trial, systems: Sequence[str], model: str = baseline.SMALL
) -> list[Mapping[str, str]]:
    """Return a row per system: each metric relative to the cached one."""
    ideal = run(load, System(CACHED), trial, model)
    rows = []
    for system in (CACHED, *systems):
        try:
            results = ideal if system == CACHED else run(load, SYSTEMS[system], trial, model)
        except InfeasibleError:
            rows.append({"setting": name, "system": system, **dict.fromkeys(METRICS, "out of memory")})
            continue
        row = {"setting": name, "system": system}
        for metric, field in METRICS.items():
            own, of_ideal = mean(results, field), mean(ideal, field)
            row[metric] = f"{own:.4g}" if system == CACHED else f"{own / of_ideal - 1.0:+.0%}"
        row["interrupted share"] = f"{mean(results, 'interruption_share_mean'):.1%}"
        row["interruptions p50"] = f"{mean(results, 'interruption_count_p50'):.0f}"
        row["completed"] = f"{mean(results, 'completed') / mean(results, 'submitted'):.1%}"
        rows.append(row)
    return rows


def cumulative(systems: Sequence[str]) -> list[Mapping[str, str]]:
    """Return a row per system: E2E of the first four requests over that of the last, which none delays."""
    given = CUMULATIVE
    names = [f"f-{i}" for i in range(given["requests"])]
    adapters = tuple(Adapter(name=name, rank=given["rank"], rate_rps=0.0) for name in names)
    arrivals_s = np.arange(len(names)) * given["every_ms"] / 1e3
    trace = Trace.from_arrays(
        arrivals_s, names, [given["prompt"]] * len(names), [given["output"]] * len(names), 10.0
    )
    load = Workload(
        base_model="llama-2-7b",
        adapters=adapters,
        prompt_tokens=Lengths(mean=given["prompt"]),
        output_tokens=Lengths(mean=given["output"]),
        trace=trace,
    )
    rows = []
    for name in (CACHED, *systems):
        system = System(CACHED) if name == CACHED else SYSTEMS[name]
        (result,) = run(load, system, Trial(10.0, (0,)), simulated=simulate_detailed)
        e2e_s = result.requests.e2e_s
        relative = {f"request {i + 1}": f"{e2e_s[i] / e2e_s[-1]:.2f}" for i in range(len(names) - 1)}
        rows.append({"system": name, **relative, "last": f"{1e3 * e2e_s[-1]:.0f} ms"})
    return rows


def synthetic(name: str, trial: Trial, traces: Path | None) -> list[Mapping[str, str]]:
    """Return the rows of a setting of Table 2; S4's prompts are compressed 30 times, as Lloco's are."""
    load = preset_workload(f"toppings-{name}", traces=traces)
    if load.length_pairs is None:
        load = baseline.with_outputs(load)
    else:
        pairs = load.length_pairs
        shorter = replace(pairs, prompt_tokens=np.maximum(1, pairs.prompt_tokens // COMPRESSION))
        load = load.model_copy(update={"length_pairs": shorter})
    model = baseline.LARGE if name in LARGE else baseline.SMALL
    systems = [system for system in SYSTEMS if system != FEW_CORES or name == "s3"]
    return over_cached(name.upper(), load, trial, systems, model)


def settle(trial: Trial) -> list[Mapping[str, str]]:
    """Return what the paper's figures give, by the number that each of them fixes."""
    rows = []

    def note(number: str, figure: str, ours: str) -> None:
        rows.append({"number": number, "figure": figure, "ours": ours})

    for copy_ms in (5.0, 6.0, 7.0, 8.0, 10.0):
        gains = (f"rank {r}: {baseline.pipeline_gain(r, copy_ms):.2f}" for r in baseline.PIPELINE_GAIN)
        rows.append(
            {"number": f"copy {copy_ms:g} ms", "figure": "pipelining, section 7.3", "ours": ", ".join(gains)}
        )
    for factor in (0.2, 0.3, 0.4, 1.0):
        load = preset_workload("toppings-motivation-6")
        results = run(baseline.with_outputs(load, factor), SYSTEMS[S_LORA], trial)
        count = mean(results, "interruption_count_p50")
        rows.append(
            {
                "number": f"outputs x {factor:g}",
                "figure": "interruptions p50 at 6 RPS",
                "ours": f"{count:.0f}",
            }
        )
    load = baseline.with_outputs(preset_workload("toppings-s3"))
    ideal = mean(run(load, System(CACHED), trial), "e2e_s_mean")
    for load_ms in (20.0, 24.0, 28.0, 32.0):
        e2e = mean(run(load, System("on-demand", load_ms), trial), "e2e_s_mean") / ideal - 1.0
        note(f"S-LoRA's load {load_ms:g} ms", "E2E in S3: +81 %", f"{e2e:+.0%}")
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parts = ("settle", "cumulative", "production", "interruptions", "synthetic")
    parser.add_argument("--part", choices=parts, nargs="+", default=parts)
    parser.add_argument(
        "--traces", type=Path, help="folder of adapter_popularity.csv and qmsum_lengths.parquet; else no S4"
    )
    parser.add_argument("--duration", dest="duration_s", type=float, default=1800.0)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    trial = Trial(chosen.duration_s, tuple(range(chosen.seeds)))
    systems = [system for system in SYSTEMS if system != FEW_CORES]
    for part in chosen.part:
        rows: list[Mapping[str, str]] = []
        if part == "settle":
            rows = settle(trial)
        elif part == "cumulative":
            rows = cumulative(systems)
        elif part == "production":
            for adapters, rps in SCALED.items():
                load = production(adapters, rps, chosen.traces)
                rows += over_cached(f"{adapters} adapters, {rps:g} RPS", load, trial, systems)
        elif part == "interruptions":
            for rps in INTERRUPTED_RPS:
                rows += over_cached(f"{rps:g} RPS", production(512, rps, chosen.traces), trial, systems)
        else:
            for name in SYNTHETIC if chosen.traces else [each for each in SYNTHETIC if each != "s4"]:
                rows += synthetic(name, trial, chosen.traces)
        print(f"\n{part}\n\n{records_table(rows)}", flush=True)


if __name__ == "__main__":
    main()
