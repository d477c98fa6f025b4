"""The four overheads of adapters: memory, computation, loading, scheduling (section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as numbers
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from capplan.datasets import load_profile
from capplan.datasets.published import LENGTHS, TOKEN_BUDGET, UTILIZATION
from capplan.models import disk_load_ms, gpu_load_ms, kv_budget
from capplan.reproduce._lab import Lab
from capplan.reproduce._results import Curve, Findings
from capplan.reproduce.twin._fidelity import published_model
from capplan.reproduce.twin._motivation import profile_of
from capplan.reproduce.twin._profiles import bare_profile
from capplan.reproduce.twin._setting import numbered, setting
from capplan.spec import BaseTraffic, Coefficient, EngineLimits, Lengths, Profile, Workload
from capplan.twin import SimulationResult, simulate

_GIB: Final = 2.0**30
_STRAIGHT: Final = 0.95


@dataclass(frozen=True)
class Served:
    """A server of Llama-2-7B for some seconds: adapters with equal loads, or without any the base model."""

    rank: int
    slots: int
    adapters: int
    total_rps: float
    prompt_tokens: int
    output_tokens: int
    seed: int
    profile: str


def served(case: Served) -> dict[str, float]:
    """Return throughput, batch and latencies."""
    given = setting().motivation
    used = case.adapters or 1
    rate_rps = case.total_rps / used if case.adapters else 0.0
    workload = Workload(
        base_model="meta-llama/Llama-2-7b-hf",
        adapters=numbered([case.rank] * used, [rate_rps] * used),
        base=None if case.adapters else BaseTraffic(rate_rps=case.total_rps),
        prompt_tokens=Lengths(mean=case.prompt_tokens),
        output_tokens=Lengths(mean=case.output_tokens),
    )
    found = simulate(
        workload,
        Profile.model_validate_json(case.profile),
        a_max=case.slots,
        s_max=case.rank,
        max_num_seqs=given.batched_tokens,
        max_num_batched_tokens=given.batched_tokens,
        max_model_len=given.model_len,
        duration_s=given.saturated_s,
        seed=case.seed,
    )
    return {
        "tok_s": found.throughput_tok_s,
        "batch": found.running_mean,
        "itl_ms": found.itl_ms_mean,
        "tpot_ms": found.tpot_ms_mean,
    }


def saturated(lab: Lab, rank: int, points: Sequence[tuple[int, int]], seed: int) -> list[dict[str, float]]:
    """Return a saturated server at each pair of slots and adapters in use."""
    given, profile = setting().motivation, profile_of(lab)
    lengths = given.prompt_tokens, given.output_tokens
    return lab.each(
        served, [Served(rank, *point, given.saturating_rps, *lengths, seed, profile) for point in points]
    )


def last_slots(model: str, rank: int, start: tuple[int, int, int]) -> int:
    """Return the fewest slots beside which a request of the longest length has no room.

    Parameters
    ----------
    model
        Its architecture, which gives the sizes of weights, KV and slots.
    rank
        Of the slots.
    start
        Slots, their rank, and KV tokens of one measured start, which gives the reserve.
    """
    given, bare = setting().motivation, bare_profile(model)

    def room(reserved_bytes: float, a_max: int, s_max: int) -> int:
        memory = bare.memory
        changed = memory.coefficients | {"reserved_bytes": Coefficient(value=reserved_bytes)}
        profile = bare.replace(memory=memory.replace(coefficients=changed))
        seqs = tokens = given.batched_tokens
        return kv_budget(profile, UTILIZATION).tokens(EngineLimits(a_max, s_max, seqs, tokens))

    slots, start_rank, measured = start
    first, second = (room(reserve, slots, start_rank) for reserve in (0.0, _GIB))
    reserved_bytes = _GIB * (first - measured) / (first - second)
    steps = numbers(given.memory_step, given.memory_step)
    return next(each for each in steps if room(reserved_bytes, each, rank) < given.model_len)


def fig4(lab: Lab) -> Findings:
    """Report what slots cost in memory, batch and throughput."""
    reference = lab.measurements()
    values: dict[str, Any] = {}
    for name, model in (("7b", "llama-2-7b"), ("13b", "llama-2-13b")):
        start = _smallest_start(reference, model)
        values |= {f"memory-{name}-{rank}": float(last_slots(model, rank, start)) for rank in (8, 16, 32)}
    few, many = [(1, 0), (128, 0), (256, 0), (384, 0), (512, 0), (640, 0)], [(1, 0), (128, 0), (192, 0)]
    light = [saturated(lab, 8, few, seed) for seed in lab.seeds]
    heavy = [saturated(lab, 32, many, seed) for seed in lab.seeds]
    values["batch-cut"] = [_cut(each[0]["batch"], each[1]["batch"]) for each in light]
    values["throughput-cut"] = [_cut(each[0]["tok_s"], each[1]["tok_s"]) for each in light]
    values["plateau"] = [
        cut < batch / 2 for cut, batch in zip(values["throughput-cut"], values["batch-cut"], strict=True)
    ]
    values["strong-cut"] = [_cut(each[0]["tok_s"], each[-1]["tok_s"]) for each in heavy]
    values["linear"] = [
        _straightness([point["batch"] for point in each], [point["itl_ms"] for point in each]) >= _STRAIGHT
        for each in light
    ]
    curves = [
        _mean_curve(f"rank {rank}", [slots for slots, _ in points], found, "tok_s")
        for rank, points, found in ((8, few, light), (32, many, heavy))
    ]
    return Findings(values, curves)


def _smallest_start(reference: Path, model: str) -> tuple[int, int, int]:
    """Return slots, their rank and KV tokens of the measured start with the least of both."""
    table = pd.read_csv(reference / "profiling_memory.csv")
    table = table[(table.model == model) & table.source.str.startswith("v0.5.0") & (table.status == "ok")]
    row = table.sort_values(["a_max", "s_max"]).iloc[0]
    return max(1, int(row.a_max)), max(8, int(row.s_max)), int(row.kv_tokens)


def _cut(before: float, after: float) -> float:
    return 100.0 * (1.0 - after / before)


def _straightness(x: Sequence[float], y: Sequence[float]) -> float:
    """Return R2 of a line."""
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def _mean_curve(
    name: str, x: Sequence[float], found: Sequence[Sequence[dict[str, float]]], key: str
) -> Curve:
    y = np.mean([[point[key] for point in each] for each in found], axis=0)
    return Curve(name=name, x=tuple(map(float, x)), y=tuple(map(float, y)))


def fig5(lab: Lab) -> Findings:
    """Report what adapters in use cost in inter-token latency."""
    used = (0, 1, 16, 32, 64, 96)
    values: dict[str, Any] = {}
    curves, straight = [], []
    for rank, slots in ((8, 200), (16, 150), (32, 100)):
        found = [saturated(lab, rank, [(slots, each) for each in used], seed) for seed in lab.seeds]
        itl = [
            {adapters: point["itl_ms"] for adapters, point in zip(used, each, strict=True)} for each in found
        ]
        values[f"jump-{rank}"] = [-_cut(each[0], each[1]) for each in itl]
        values[f"many-{rank}"] = [-_cut(each[1], each[64]) for each in itl]
        straight += [_straightness(used[1:], [each[count] for count in used[1:]]) for each in itl]
        over = [[{"over": -_cut(each[0], each[count])} for count in used] for each in itl]
        curves.append(_mean_curve(f"rank {rank}", used, over, "over"))
    return Findings(values | {"linear": min(straight) >= _STRAIGHT}, curves)


def fig6(lab: Lab) -> Findings:
    """Report the time of a load over the latency of requests of three lengths."""
    text = profile_of(lab)
    profile = Profile.model_validate_json(text)
    lengths, ranks = {"short": (23, 27), "mean": (250, 231), "long": (423, 358)}, (8, 16, 32)
    cases = [Served(rank, 1, 1, 0.05, *lengths[name], 0, text) for name, rank in product(lengths, ranks)]
    shares: dict[tuple[str, int], float] = {}
    for (name, rank), found in zip(product(lengths, ranks), lab.each(served, cases), strict=True):
        load_ms = disk_load_ms(profile.loading, rank) + gpu_load_ms(profile.loading, rank, rank)
        shares[name, rank] = 100.0 * load_ms / (found["tpot_ms"] * (lengths[name][1] - 1))
    by_rank = [[shares[name, rank] for rank in ranks] for name in lengths]
    by_length = [[shares[name, rank] for name in reversed(lengths)] for rank in ranks]
    order = all(one < other for each in (*by_rank, *by_length) for one, other in pairwise(each))
    curves = [
        Curve(name=f"{prompt} + {output} tokens", x=tuple(map(float, ranks)), y=tuple(each))
        for (prompt, output), each in zip(lengths.values(), by_rank, strict=True)
    ]
    values = {"short-8": shares["short", 8], "short-32": shares["short", 32], "long": shares["long", 32]}
    return Findings(values | {"order": order}, curves)


@dataclass(frozen=True)
class Queued:
    """Llama-3.1-8B with more adapters than slots."""

    adapters: int
    slots: int
    seed: int


def scheduling(case: Queued) -> float:
    """Return the per cent of a step that the scheduler takes to pass over requests without a slot."""
    profile = load_profile(setting().models["llama"])
    prompt, output = LENGTHS[published_model("llama").key]
    workload = Workload(
        base_model=profile.model.hf_ids[0],
        adapters=numbered([8] * case.adapters, [setting().motivation.scheduler_rps] * case.adapters),
        prompt_tokens=prompt,
        output_tokens=output,
    )
    found = simulate(
        workload,
        profile,
        a_max=case.slots,
        max_num_seqs=TOKEN_BUDGET,
        max_num_batched_tokens=TOKEN_BUDGET,
        duration_s=setting().motivation.scheduler_s,
        seed=case.seed,
    )
    without_slot = 1.0 - min(1.0, case.slots / case.adapters)
    per_request_ms = profile.step_latency.value("ms_per_waiting_krequest") / 1e3
    return 100.0 * per_request_ms * found.waiting_mean * without_slot / _step_ms(found)


def _step_ms(found: SimulationResult) -> float:
    return 1e3 * found.busy_fraction * found.duration_s / found.steps


def fig7(lab: Lab) -> Findings:
    """Report the share of the scheduler in a step."""
    adapters, slots = (64, 128, 256, 384), (8, 128, 384)
    points = [(served, fewer) for fewer in slots for served in adapters if fewer <= served]
    cases = [Queued(*point, seed) for seed in lab.seeds for point in points]
    found = iter(lab.each(scheduling, cases))
    by_seed = [{point: next(found) for point in points} for _ in lab.seeds]
    most = max(adapters)
    values: dict[str, Any] = {
        "few-slots": [each[most, 8] for each in by_seed],
        "many-slots": [max(each[point] for point in points if point[1] >= 128) for each in by_seed],
        "grows": [
            all(one < other for one, other in pairwise([each[count, 8] for count in adapters]))
            for each in by_seed
        ],
    }
    curves = [
        Curve(
            name=f"{fewer} slots",
            x=tuple(float(served) for served in adapters if served >= fewer),
            y=tuple(
                float(np.mean([each[served, fewer] for each in by_seed]))
                for served in adapters
                if served >= fewer
            ),
        )
        for fewer in slots
    ]
    return Findings(values, curves)
