"""Throughput by adapters with Llama-2-7B: where packing ends (sections 2.3 and appendix A)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from capplan.datasets import load_profile
from capplan.errors import InfeasibleError
from capplan.models.calibration import smape
from capplan.reproduce._lab import Lab
from capplan.reproduce._results import Curve, Findings
from capplan.reproduce.twin._profiles import profiling_profile
from capplan.reproduce.twin._setting import numbered, setting
from capplan.spec import STARVED_BELOW, Lengths, Profile, Workload
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
    """Return the profile as JSON."""
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
    workload = Workload(
        base_model="meta-llama/Llama-2-7b-hf",
        adapters=numbered([case.rank] * case.adapters, [case.rate_rps] * case.adapters),
        prompt_tokens=Lengths(mean=given.prompt_tokens),
        output_tokens=Lengths(mean=case.output_tokens),
    )
    settings: dict[str, Any] = dict(given.slora)
    profile = load_profile(given.slora_profile) if case.engine == SLORA else None
    if profile is None:
        profile = Profile.model_validate_json(case.profile)
        settings = {
            "a_max": case.slots,
            "s_max": case.rank,
            "max_num_seqs": given.batched_tokens,
            "max_num_batched_tokens": given.batched_tokens,
            "max_model_len": given.model_len,
        }
    try:
        found = simulate(workload, profile, duration_s=case.duration_s, seed=case.seed, **settings)
    except InfeasibleError:
        return None
    offered = case.adapters * case.rate_rps * (given.prompt_tokens + case.output_tokens)
    return {"tok_s": found.throughput_tok_s, "share": found.throughput_tok_s / offered}


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
        """Adapters of each run."""
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

    def curve(self, prefix: str = "") -> Curve:
        """Return throughput by adapters, mean over seeds."""
        y = tuple(float(each) for each in np.mean(self.tok_s, axis=0))
        return Curve(name=f"{prefix}{self.name}", x=tuple(map(float, self.adapters)), y=y)


def lines(lab: Lab, points: Sequence[Point]) -> list[Simulated]:
    """Simulate measured runs, line by line. A server that does not start has no throughput."""
    cases = [replaced(point.case, seed) for seed in lab.seeds for point in points]
    found = iter(lab.each(packed, cases))
    nothing = {"tok_s": 0.0, "share": 0.0}
    by_seed = [[each or nothing for each in islice(found, len(points))] for _ in lab.seeds]
    numbered_points = list(enumerate(points))
    simulated = []
    for name, members in groupby(numbered_points, key=lambda each: each[1].line):
        at = [number for number, _ in members]
        tok_s, share = (
            tuple(tuple(own[number][key] for number in at) for own in by_seed) for key in ("tok_s", "share")
        )
        simulated.append(Simulated(name, tuple(points[number] for number in at), tok_s, share))
    return simulated


def replaced(case: Packed, seed: int) -> Packed:
    """Return the case with another seed."""
    return Packed(**{**vars(case), "seed": seed})


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
