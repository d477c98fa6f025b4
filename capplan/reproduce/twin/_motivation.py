"""Llama-2-7B: throughput by adapters, where packing ends (2.3, appendix A), and overheads of adapters (5.1).

The four overheads are memory, computation, loading and scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count as numbers
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from capplan.datasets import load_profile
from capplan.datasets.published import LENGTHS, TOKEN_BUDGET, UTILIZATION
from capplan.errors import InfeasibleError
from capplan.models import disk_load_ms, gpu_load_ms, kv_budget
from capplan.models.calibration import smape
from capplan.reproduce._lab import Lab
from capplan.reproduce._results import Curve, Findings
from capplan.reproduce.twin._fidelity import published_model
from capplan.reproduce.twin._setting import bare_profile, memory_table, numbered, profiling_profile, setting
from capplan.spec import STARVED_BELOW, BaseTraffic, Coefficient, EngineLimits, Lengths, Profile, Workload
from capplan.twin import simulate

PANELS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "sizes": (("varying_adapter_size", "initial_point"), "s_max"),
    "rates": (("varying_arrival_rate", "initial_point"), "rate"),
    "slots": (("loaded_adapters_rate_0.025",), "a_max"),
}
"""By panel of Fig. 1, the groups of published runs, and what differs from line to line."""
VLLM: Final = "vllm"
SLORA: Final = "slora"
SLORA_RUNS: Final = "slora_h100_llama2_7b.csv"
SLORA_FOLDER: Final = "measured"
_UNSTARTED: Final = ((8, 320, False), (32, 384, True), (64, 128, True), (16, 512, True))
"""Rank, slots, and whether the server of the authors ran out of memory."""
_WHOLE_S: Final = 1400.0


@dataclass(frozen=True)
class Profiling:
    """The profile of Llama-2-7B on vLLM 0.5.0."""

    folder: str


def profiled(case: Profiling) -> str:
    given = setting().motivation
    return profiling_profile(Path(case.folder), given.model_len, given.batched_tokens).model_dump_json()


def profile_of(lab: Lab) -> str:
    """Return the profile fitted to the profiling runs, as JSON."""
    return lab.each(profiled, [Profiling(str(lab.measurements()))])[0]


@dataclass(frozen=True)
class Packed:
    """Equal adapters on one GPU for some seconds, as a published run had them."""

    rank: int
    rate_rps: float
    adapters: int
    slots: int
    output_tokens: int
    duration_s: float
    seed: int
    engine: str
    profile: str = ""


def packed(case: Packed) -> dict[str, float] | None:
    """Return throughput and its share of the offered load; None if the server does not start."""
    given = setting().motivation
    workload = _workload(case.rank, case.adapters, case.rate_rps, given.prompt_tokens, case.output_tokens)
    settings: dict[str, Any] = dict(given.slora)
    profile = load_profile(given.slora_profile) if case.engine == SLORA else None
    if profile is None:
        profile = Profile.model_validate_json(case.profile)
        settings = _vllm_settings(case.slots, case.rank)
    try:
        found = simulate(workload, profile, duration_s=case.duration_s, seed=case.seed, **settings)
    except InfeasibleError:
        return None
    offered = case.adapters * case.rate_rps * (given.prompt_tokens + case.output_tokens)
    return {"tok_s": found.throughput_tok_s, "share": found.throughput_tok_s / offered}


def _workload(
    rank: int,
    adapters: int,
    rate_rps: float,
    prompt_tokens: int,
    output_tokens: int,
    base: BaseTraffic | None = None,
) -> Workload:
    return Workload(
        base_model="meta-llama/Llama-2-7b-hf",
        adapters=numbered([rank] * adapters, [rate_rps] * adapters),
        base=base,
        prompt_tokens=Lengths(mean=prompt_tokens),
        output_tokens=Lengths(mean=output_tokens),
    )


def _vllm_settings(slots: int, rank: int) -> dict[str, Any]:
    given = setting().motivation
    return {
        "a_max": slots,
        "s_max": rank,
        "max_num_seqs": given.batched_tokens,
        "max_num_batched_tokens": given.batched_tokens,
        "max_model_len": given.model_len,
    }


@dataclass(frozen=True)
class Point:
    """A measured run, and its line of a figure."""

    line: str
    case: Packed
    tok_s: float
    share: float


def vllm_points(reference: Path, panel: str, profile: str) -> list[Point]:
    """Return the finished published runs of a panel of Fig. 1."""
    groups, differs = PANELS[panel]
    table = pd.read_csv(reference / "runs.csv")
    table = table[table.subgroup.isin(groups) & (table.status == "ok")]
    table = table.assign(rate=table.rate_list.astype(float)).sort_values([differs, "n_adapters"])
    words = {"sizes": "rank {:g}", "rates": "{:g} req/s", "slots": "{:g} slots"}[panel]
    return [
        Point(
            words.format(getattr(row, differs)),
            Packed(
                int(row.s_max),
                row.rate,
                int(row.n_adapters),
                int(row.a_max),
                setting().motivation.output_tokens,
                row.duration_s,
                0,
                VLLM,
                profile,
            ),
            row.total_throughput,
            row.throughput_over_offered,
        )
        for row in _rows(table)
    ]


def slora_points(measured: Path) -> list[Point]:
    """Return the published runs of S-LoRA.

    Runs that the client ended early have sent at the nominal rate, the others as their duration says.
    """
    given = setting().motivation
    table = pd.read_csv(measured / SLORA_RUNS).sort_values(["rate_per_adapter", "adapters"])
    points = []
    for row in _rows(table):
        rate_rps = row.rate_per_adapter
        if row.duration > _WHOLE_S:
            rate_rps = row.num_prompts / row.duration / row.adapters
        tok_s = row.request_throughput * (given.prompt_tokens + given.slora_output_tokens)
        case = Packed(
            int(row.rank),
            rate_rps,
            int(row.adapters),
            0,
            given.slora_output_tokens,
            row.duration,
            0,
            SLORA,
        )
        share = row.request_throughput / (rate_rps * row.adapters)
        points.append(Point(f"{row.rate_per_adapter:g} req/s", case, tok_s, share))
    return points


def _rows(table: pd.DataFrame) -> list[Any]:
    return list(table.itertuples())


def max_pack(adapters: Sequence[int], tok_s: Sequence[float], share: Sequence[float]) -> tuple[int, float]:
    """Return adapters and throughput at the highest throughput without starvation, zeros without any."""
    held = [at for at, each in enumerate(share) if each >= STARVED_BELOW]
    if not held:
        return 0, 0.0
    best = max(held, key=lambda at: tok_s[at])
    return adapters[best], tok_s[best]


@dataclass(frozen=True)
class Simulated:
    """A line of a figure: measured runs with the twin's throughput and share, by seed."""

    name: str
    points: tuple[Point, ...]
    tok_s: tuple[tuple[float, ...], ...]
    share: tuple[tuple[float, ...], ...]

    @property
    def adapters(self) -> list[int]:
        return [point.case.adapters for point in self.points]

    def max_packs(self) -> list[int]:
        """Return the adapters at the end of packing, by seed."""
        return [max_pack(self.adapters, *each)[0] for each in zip(self.tok_s, self.share, strict=True)]

    def peaks(self) -> list[float]:
        """Return the highest throughput without starvation, by seed."""
        return [max_pack(self.adapters, *each)[1] for each in zip(self.tok_s, self.share, strict=True)]

    def falls(self) -> list[float]:
        """Return how much lower throughput is with the most adapters than at its highest, by seed."""
        return [1.0 - each[-1] / max(each) for each in self.tok_s]

    def curve(self) -> Curve:
        """Return throughput by adapters, mean over seeds."""
        y = tuple(np.mean(self.tok_s, axis=0).tolist())
        return Curve(name=self.name, x=tuple(self.adapters), y=y)


def lines(lab: Lab, points: Sequence[Point]) -> list[Simulated]:
    """Simulate measured runs, line by line. A server that does not start has no throughput."""
    found = lab.by_seed(packed, [point.case for point in points])
    nothing = {"tok_s": 0.0, "share": 0.0}
    simulated = []
    for name, members in groupby(zip(points, found, strict=True), key=lambda each: each[0].line):
        own, answers = zip(*members, strict=True)
        tok_s, share = (
            tuple(tuple((each or nothing)[key] for each in of_seed) for of_seed in zip(*answers, strict=True))
            for key in ("tok_s", "share")
        )
        simulated.append(Simulated(name, own, tok_s, share))
    return simulated


def errors(found: Sequence[Simulated]) -> list[float]:
    """Return SMAPE of throughput over all lines, by seed."""
    measured = np.array([point.tok_s for line in found for point in line.points])
    seeds = range(len(found[0].tok_s))
    return [smape(np.concatenate([line.tok_s[at] for line in found]), measured) for at in seeds]


def fig1(lab: Lab) -> Findings:
    """Compare throughput by adapters with the published runs of vLLM 0.5.0."""
    reference, profile = lab.measurements(), profile_of(lab)
    panels = {panel: lines(lab, vllm_points(reference, panel, profile)) for panel in PANELS}
    values: dict[str, Any] = {f"{panel}-error": errors(found) for panel, found in panels.items()}
    by_name = {panel: {line.name: line for line in found} for panel, found in panels.items()}
    sizes, rates, slots = (by_name[panel] for panel in PANELS)
    values |= {f"max-pack-{name.removeprefix('rank ')}": line.max_packs() for name, line in sizes.items()}
    values |= {
        f"max-pack-{name.removesuffix(' req/s')}-rps": line.max_packs()
        for name, line in rates.items()
        if name != "0.05 req/s"
    }
    values |= {f"max-pack-{count}-slots": slots[f"{count} slots"].max_packs() for count in (48, 96, 192, 256)}
    values["sizes-order"] = _falling([sizes[f"rank {rank}"].peaks() for rank in (8, 16, 32, 64)])
    values["rates-order"] = _falling(
        [rates[f"{rate:g} req/s"].peaks() for rate in (0.1, 0.05, 0.025, 0.0125)]
    )
    highest = {name: [max(each) for each in line.tok_s] for name, line in slots.items()}
    values["slots-middle"] = [
        middle > max(few, many)
        for few, middle, many in zip(*(highest[f"{count} slots"] for count in (96, 192, 320)), strict=True)
    ]
    starts = [Packed(rank, 0.05, count, count, 231, 1.0, 0, VLLM, profile) for rank, count, _ in _UNSTARTED]
    refused = [each is None for each in lab.each(packed, starts)]
    values["memory-errors"] = refused == [fails for _, _, fails in _UNSTARTED]
    return Findings(values, [line.curve() for found in panels.values() for line in found])


def _falling(peaks: Sequence[Sequence[float]]) -> list[bool]:
    return [all(one > other for one, other in pairwise(each)) for each in zip(*peaks, strict=True)]


def figa13(lab: Lab) -> Findings:
    """Compare throughput by adapters with the published runs of S-LoRA."""
    reference, profile = lab.measurements(), profile_of(lab)
    found = lines(lab, slora_points(reference.parent / SLORA_FOLDER))
    values: dict[str, Any] = {"error": errors(found)}
    values |= {f"max-pack-{line.name.removesuffix(' req/s')}-rps": line.max_packs() for line in found}
    vllm = next(
        line for line in lines(lab, vllm_points(reference, "rates", profile)) if line.name == "0.05 req/s"
    )
    slora = next(line for line in found if line.name == vllm.name)
    values["plateau"] = [one < other for one, other in zip(slora.falls(), vllm.falls(), strict=True)]
    return Findings(values, [line.curve() for line in found])


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
    used = case.adapters or 1
    rate_rps = case.total_rps / used if case.adapters else 0.0
    base = None if case.adapters else BaseTraffic(rate_rps=case.total_rps)
    workload = _workload(case.rank, used, rate_rps, case.prompt_tokens, case.output_tokens, base)
    found = simulate(
        workload,
        Profile.model_validate_json(case.profile),
        duration_s=setting().motivation.saturated_s,
        seed=case.seed,
        **_vllm_settings(case.slots, case.rank),
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
    """Return the fewest slots of a rank beside which a request of the longest length has no room.

    `start` is slots, their rank, and KV tokens of one measured start, which gives the reserve.
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
    table = memory_table(reference, model)
    row = table[table.status == "ok"].sort_values(["a_max", "s_max"]).iloc[0]
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
    return Curve(name=name, x=tuple(x), y=tuple(y.tolist()))


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
        Curve(name=f"{prompt} + {output} tokens", x=ranks, y=tuple(each))
        for (prompt, output), each in zip(lengths.values(), by_rank, strict=True)
    ]
    values = {"short-8": shares["short", 8], "short-32": shares["short", 32], "long": shares["long", 32]}
    return Findings(values | {"order": order}, curves)


@dataclass(frozen=True)
class Queued:
    """Llama-3.1-8B with more adapters than slots."""

    adapters: int
    slots: int
    seed: int = 0


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
    step_ms = 1e3 * found.busy_fraction * found.duration_s / found.steps
    return 100.0 * per_request_ms * found.waiting_mean * without_slot / step_ms


def fig7(lab: Lab) -> Findings:
    """Report the share of the scheduler in a step."""
    adapters, slots = (64, 128, 256, 384), (8, 128, 384)
    points = [(served, fewer) for fewer in slots for served in adapters if fewer <= served]
    found = lab.by_seed(scheduling, [Queued(*point) for point in points])
    by_seed = [dict(zip(points, each, strict=True)) for each in zip(*found, strict=True)]
    most = max(adapters)
    values: dict[str, Any] = {
        "few-slots": [each[most, 8] for each in by_seed],
        "many-slots": [max(each[point] for point in points if point[1] >= 128) for each in by_seed],
        "grows": [
            all(one < other for one, other in pairwise([each[count, 8] for count in adapters]))
            for each in by_seed
        ],
    }
    curves = []
    for fewer in slots:
        x = tuple(served for served in adapters if served >= fewer)
        y = tuple(float(np.mean([each[served, fewer] for each in by_seed])) for served in x)
        curves.append(Curve(name=f"{fewer} slots", x=x, y=y))
    return Findings(values, curves)
