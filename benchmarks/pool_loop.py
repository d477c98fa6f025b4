"""Schedulers and adapter caches on the reference engine, measured and predicted side by side.

    python -m benchmarks.pool_loop --out DIR --stage profile    # once, 5 minutes
    python -m benchmarks.pool_loop --out DIR --stage systems    # four systems in four rounds, 14 minutes
    python -m benchmarks.pool_loop --out DIR --stage queues     # a plan with queues

A Llama of 4 layers on the CPU serves 32 adapters of rank 8, popular by Zipf's law (exponent 1), with memory
for 8 of them beside a full batch of mean requests. Lengths are gamma-distributed, outputs with a standard
deviation above their mean. Requests arrive by Poisson at `LOAD` of the rate at which the twin saturates under
fifo without a cache. Chameleon refreshes its queues every 20 s. The systems take turns, in rounds with
requests of their own, which all systems and the twin share, and are ordered by median TTFT. The setting is
fixed before any is measured.

The plan of the stage ``queues``, for `PLANNED_LOAD`, has the scheduler and the cache of Chameleon. It is
verified with its queues and served by `capplan serve PLAN`; TTFT is compared by size class.

Every stage writes its results to DIR, and an interrupted one goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.common import command_line, numbered_adapters, read_or_make, records_table
from capplan import Lengths, Plan, Profile, Workload, load_profile, simulate
from capplan.models import require_kv_tokens
from capplan.profiling.load import BenchOptions, LoadSettings, RequestFile, Target, bench
from capplan.profiling.server._process import (
    ServerCommand,
    engine_words,
    flag_words,
    run_capplan,
    running_server,
)
from capplan.profiling.validation._loop import ClosedLoop, LoopSettings, saturated_rps
from capplan.serving import kv_bytes_per_token
from capplan.serving._memory import adapter_tokens
from capplan.spec import DEFAULT_GPU_MEMORY_UTILIZATION, EngineArgs, Queues, write_text_atomic, zipf
from capplan.twin import simulate_detailed

_CHAMELEON: Final = MappingProxyType({"policy": "chameleon", "refresh_s": 20.0})
SYSTEMS: Final = MappingProxyType(
    {
        "chameleon": (_CHAMELEON, "chameleon"),
        "chameleon, no cache": (_CHAMELEON, "none"),
        "fifo": ("fifo", "chameleon"),
        "fifo, no cache": ("fifo", "none"),
    }
)
ADAPTERS: Final = 32
IN_MEMORY: Final = 8
RANK: Final = 8
SEQS: Final = 16
LOAD: Final = 0.85
PLANNED_LOAD: Final = 0.6
PROMPT: Final = Lengths(mean=100.0, std=60.0)
OUTPUT: Final = Lengths(mean=100.0, std=120.0)
ROUNDS: Final = 4
THROUGHPUT_BAR: Final = 5.0
"""Largest SMAPE of throughput in percent."""
_DRAIN_S: Final = 1.0
_METRICS: Final = ("throughput_tok_s", "ttft_s_mean", "ttft_s_p50", "ttft_s_p99", "itl_ms_mean")


@dataclass(frozen=True)
class Setting:
    """Profile with the memory of the setting, and its workload."""

    model: str
    profile: Profile
    args: EngineArgs
    workload: Workload
    threads: int

    @property
    def blocks(self) -> int:
        """KV blocks of the pool."""
        return require_kv_tokens(self.profile, self.args, 0) // self.profile.engine.block_size

    def keywords(self, duration_s: float, seed: int) -> dict[str, Any]:
        """Return the settings of a simulation."""
        limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization")
        fields = {name: getattr(self.args, name) for name in limits}
        return {**fields, "a_max": ADAPTERS, "s_max": RANK, "duration_s": duration_s, "seed": seed}

    def command(self, scheduler: Mapping[str, Any] | str, cache: str) -> ServerCommand:
        """Return the command of a server of all adapters."""
        more = {
            "--scheduler": scheduler if isinstance(scheduler, str) else json.dumps(dict(scheduler)),
            "--cache": cache,
            "--num-kv-blocks": self.blocks,
            "--block-size": self.profile.engine.block_size,
            "--served-model-name": self.workload.base_model,
            "--max-queue": 100_000,
            "--drain-timeout-s": 0,
        }
        adapters = {adapter.name: adapter.rank for adapter in self.workload.adapters}
        return ServerCommand(self.model, adapters, engine_words(self.args, more), self.threads)


def closed_loop(given: argparse.Namespace) -> ClosedLoop:
    """Return the folder of profile and model."""
    settings = LoopSettings(
        threads=given.threads,
        adapters=ADAPTERS,
        ranks=(RANK,),
        slots=(IN_MEMORY,),
        engine=LoopSettings.engine.replace(max_num_seqs=SEQS),
        rules="chameleon",
        form=None,
    )
    return ClosedLoop(given.out, settings, lambda line: print(time.strftime("%H:%M:%S"), line, flush=True))


def setting_of(given: argparse.Namespace, load: float) -> Setting:
    """Return the setting on the profile of this machine; the rate of saturation is found once."""
    loop = closed_loop(given)
    profile = load_profile(str(loop.profile))
    limits = {"max_num_seqs": SEQS, "max_num_batched_tokens": 512, "max_model_len": 512}
    args = EngineArgs(
        max_loras=IN_MEMORY,
        max_lora_rank=RANK,
        gpu_memory_utilization=DEFAULT_GPU_MEMORY_UTILIZATION,
        **limits,
    )
    arch, block = profile.model, profile.engine.block_size
    tokens = IN_MEMORY * adapter_tokens(arch, RANK) + SEQS * (PROMPT.mean_tokens + OUTPUT.mean_tokens)
    lacking = -(-int(tokens) // block) * block - require_kv_tokens(profile, args, 0)
    more_bytes = lacking * kv_bytes_per_token(arch) / args.gpu_memory_utilization
    profile = profile.replace(
        gpu=profile.gpu.replace(memory_bytes=round(profile.gpu.memory_bytes + more_bytes))
    )
    setting = Setting(loop.model, profile, args, _workload(profile, 1.0), given.threads)

    def saturated() -> float:
        scheduler, cache = SYSTEMS["fifo, no cache"]
        fields = setting.keywords(300.0, 0)
        return saturated_rps(
            lambda rate: simulate(
                _workload(profile, rate), profile, scheduler=scheduler, cache=cache, **fields
            )
        )

    rate_rps = load * float(read_or_make(given.out / "saturated-rps.json", saturated))
    return Setting(loop.model, profile, args, _workload(profile, rate_rps), given.threads)


def _workload(profile: Profile, rate_rps: float) -> Workload:
    return Workload(
        base_model=profile.model.hf_ids[0],
        prompt_tokens=PROMPT,
        output_tokens=OUTPUT,
        adapters=numbered_adapters([RANK] * ADAPTERS, rate_rps * np.array(zipf(ADAPTERS, 1.0))),
    )


def measured_row(setting: Setting, system: str, duration_s: float, seed: int) -> dict[str, Any]:
    """Return measured and predicted metrics of a system."""
    scheduler, cache = SYSTEMS[system]
    predicted = simulate(
        setting.workload,
        setting.profile,
        scheduler=scheduler,
        cache=cache,
        **setting.keywords(duration_s, seed),
    )
    with running_server(setting.command(scheduler, cache)) as url:
        result = bench(
            setting.workload,
            Target(url, base_model=setting.workload.base_model),
            LoadSettings(duration_s, drain_s=_DRAIN_S),
            BenchOptions(seed=seed, profile=setting.profile, max_model_len=setting.args.max_model_len),
        )
    overall = result.overall
    measured = {
        "throughput_tok_s": overall.throughput_tok_s,
        "ttft_s_mean": overall.ttft_s.mean,
        "ttft_s_p50": overall.ttft_s.p50,
        "ttft_s_p99": overall.ttft_s.p99,
        "itl_ms_mean": overall.token_gap_ms_mean,
    }
    if overall.failed or overall.rejected or not result.client.kept_up:
        raise SystemExit(f"{system}: void: {overall.failed} failed, client kept up: {result.client.kept_up}")
    return {
        "system": system,
        "requests": overall.submitted,
        "measured": measured,
        "predicted": {name: float(getattr(predicted, name)) for name in _METRICS},
    }


def compare_systems(given: argparse.Namespace) -> bool:
    """Measure the four systems, print them, and return whether the bars hold."""
    setting = setting_of(given, LOAD)
    rounds = [
        {system: _measured(given, setting, system, given.seed + each) for system in SYSTEMS}
        for each in range(ROUNDS)
    ]
    rows = [_mean_row([each[system] for each in rounds]) for system in SYSTEMS]
    print(f"{setting.workload.total_rate_rps:.2f} req/s, {setting.blocks} blocks, {ROUNDS} rounds\n")
    print(records_table(_shown(row) for row in rows))
    orders = [
        [row["system"] for row in sorted(rows, key=lambda row: row[side]["ttft_s_p50"])]
        for side in ("measured", "predicted")
    ]
    print(f"\nmedian TTFT, ascending: measured {'; '.join(orders[0])}. Predicted {'; '.join(orders[1])}.")
    errors = [
        _smape(row["measured"]["throughput_tok_s"], row["predicted"]["throughput_tok_s"]) for row in rows
    ]
    return orders[0] == orders[1] and max(errors) <= THROUGHPUT_BAR


def _measured(given: argparse.Namespace, setting: Setting, system: str, seed: int) -> dict[str, Any]:
    file = given.out / f"{system.replace(', ', '-').replace(' ', '-')}-{seed}.json"
    return read_or_make(file, lambda: measured_row(setting, system, given.duration_s, seed))


def _mean_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of the rounds of one system."""
    means = {
        side: {name: float(np.mean([row[side][name] for row in rows])) for name in _METRICS}
        for side in ("measured", "predicted")
    }
    return {"system": rows[0]["system"], "requests": sum(row["requests"] for row in rows), **means}


def _smape(measured: float, predicted: float) -> float:
    return 100.0 * abs(predicted - measured) / (predicted + measured)


def _shown(row: Mapping[str, Any]) -> dict[str, object]:
    pairs = {name: (row["measured"][name], row["predicted"][name]) for name in _METRICS}
    return {
        "system": row["system"],
        "requests": row["requests"],
        **{name: f"{m:.4g} / {p:.4g} ({_smape(m, p):.1f} %)" for name, (m, p) in pairs.items()},
    }


def compare_queues(given: argparse.Namespace) -> bool:
    """Plan with queues, serve the plan, and compare TTFT by class; return whether its order holds."""
    setting = setting_of(given, PLANNED_LOAD)
    workload, plan_file, requests = (
        given.out / name for name in ("queues.json", "plan.json", "queues.parquet")
    )
    if not plan_file.exists():
        write_text_atomic(workload, json.dumps(_document(given, setting), indent=1))
        words = ("plan", str(workload), "--gpus", "1", "--quiet", "-o", str(plan_file))
        run_capplan(words, given.threads, (0,))
    [group] = Plan.from_json(plan_file).groups
    if group.queues is None:
        raise SystemExit("the plan has no queues")
    if not requests.exists():
        _serve_plan(given, setting, plan_file, requests)
    scheduler, cache = group.scheduling or (None, None)
    table = simulate_detailed(
        setting.workload,
        setting.profile,
        scheduler=scheduler,
        cache=cache,
        queues=group.queues,
        **setting.keywords(given.duration_s, given.seed),
    ).requests
    queue = _queues_of(group.queues, table.prompt_tokens, table.output_tokens)
    measured = pq.read_table(requests, columns=["number", "ttft_s"]).to_pydict()
    ttft_s = np.full(len(table), np.nan)
    ttft_s[measured["number"]] = [np.nan if each is None else each for each in measured["ttft_s"]]
    sides = {"measured": ttft_s, "predicted": table.ttft_s}
    medians: dict[str, list[float]] = {side: [] for side in sides}
    rows = []
    for number, each in enumerate(group.queues.classes):
        own = {side: values[queue == number] for side, values in sides.items()}
        for side, values in own.items():
            medians[side].append(float(np.nanmedian(values)))
        rows.append(
            {
                "class": number,
                "below": "–" if each.upper_wrs is None else f"{each.upper_wrs:.3f}",
                "quota, tokens": each.quota_tokens,
                "requests": int((queue == number).sum()),
                **{f"median TTFT, s: {side}": f"{medians[side][-1]:.4g}" for side in sides},
                **{f"mean: {side}": f"{np.nanmean(values):.4g}" for side, values in own.items()},
            }
        )
    print(records_table(rows))
    return np.argsort(medians["measured"]).tolist() == np.argsort(medians["predicted"]).tolist()


def _serve_plan(given: argparse.Namespace, setting: Setting, plan: Path, requests: Path) -> None:
    more = {"--num-kv-blocks": setting.blocks, "--max-queue": 100_000, "--drain-timeout-s": 0}
    served = ServerCommand(setting.model, {}, (*flag_words(more), str(plan)), setting.threads)
    with running_server(served) as url, RequestFile(requests) as file:
        bench(
            setting.workload,
            Target(url, base_model=setting.workload.base_model),
            LoadSettings(given.duration_s, drain_s=_DRAIN_S),
            BenchOptions(seed=given.seed, profile=setting.profile, max_model_len=setting.args.max_model_len),
            file=file,
        )
        file.keep()


def _queues_of(queues: Queues, prompt: NDArray[np.int64], output: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the class of each request; all adapters have the size that counts as 1."""
    wrs = queues.wrs
    sizes = wrs.a * np.minimum(prompt / wrs.max_prompt_tokens, 1.0)
    sizes += wrs.b * np.minimum(output / wrs.max_output_tokens, 1.0)
    cuts = [each.upper_wrs for each in queues.classes[:-1]]
    return np.searchsorted(np.array(cuts, float), sizes, side="right")


def _document(given: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Return the workload file of the plan."""
    profile = given.out / "pool-profile.json"
    write_text_atomic(profile, setting.profile.model_dump_json(indent=1))
    limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    return {
        "version": 1,
        "base_model": setting.workload.base_model,
        "profile": str(profile.resolve()),
        "engine": {name: getattr(setting.args, name) for name in limits},
        "scheduler": {"policy": "chameleon", "queues": {"quota_size": "mean"}},
        "cache": "chameleon",
        "requests": {
            "prompt_tokens": {"mean": PROMPT.mean, "std": PROMPT.std},
            "output_tokens": {"mean": OUTPUT.mean, "std": OUTPUT.std},
        },
        "adapters": [
            {"name": each.name, "rank": each.rank, "rate_rps": each.rate_rps}
            for each in setting.workload.adapters
        ],
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--stage", choices=("profile", "systems", "queues"), required=True)
    parser.add_argument("--duration", dest="duration_s", type=float, default=40.0, help="of each measurement")
    parser.add_argument("--budget-s", type=float, default=300.0, help="of the profile")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    if given.stage == "profile":
        loop = closed_loop(given)
        loop.measure(given.budget_s)
        loop.calibrate()
        return 0
    return int(not (compare_systems if given.stage == "systems" else compare_queues)(given))


if __name__ == "__main__":
    raise SystemExit(main())
