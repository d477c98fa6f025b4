"""Random workload files over all features, for `benchmarks.plan_soundness`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from benchmarks.common import H100_LLAMA, LLAMA
from capplan import load_profile, load_workload, plan
from capplan.datasets import gpu_sheet
from capplan.errors import CapplanError
from capplan.models import EngineChoice, roofline_profile
from capplan.planner import SOLVERS
from capplan.planner.problem._bound import lower_bound
from capplan.planner.problem._setup import make_problem
from capplan.planner.solvers import find_solver
from capplan.planner.solvers._base import Requirement
from capplan.serving import RULES
from capplan.spec import Profile, write_text_atomic

Document = dict[str, Any]
Item = TypeVar("Item")

H100_QWEN: Final = "h100-64g/qwen2.5-7b/vllm-0.8.5"
MODELS: Final = {H100_LLAMA: LLAMA, H100_QWEN: "Qwen/Qwen2.5-7B-Instruct"}
RANKS: Final = (1, 4, 8, 16, 32, 64, 128, 256)
OTHER_GPUS: Final = ("a100-80g", "l40s", "h100-80g")
TIGHTEST: Final = {"ttft_s": 0.3, "e2e_s": 8.0, "tpot_ms": 25.0, "tpt_ms": 40.0, "itl_ms": 25.0}
"""Low end of the bounds drawn on a median; those on tails are looser."""
LOOSER: Final = {"mean": 1.2, "p50": 1.0, "p95": 2.0, "p99": 3.0}
PREVIOUS_SCALE: Final = 0.7
"""Load of the plan in force relative to that of the workload."""


@dataclass(frozen=True)
class Case:
    """A workload file, and the arguments of `capplan.plan` beside it."""

    path: Path
    solver: str
    options: Mapping[str, Any]
    """``robust`` and ``knobs`` where drawn."""


@dataclass(frozen=True)
class Draw:
    """Random choices of one workload."""

    rng: np.random.Generator

    def maybe(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one(self, items: Sequence[Item]) -> Item:
        return items[int(self.rng.integers(len(items)))]

    def log(self, low: float, high: float, digits: int = 4) -> float:
        return round(float(np.exp(self.rng.uniform(np.log(low), np.log(high)))), digits)

    def count(self, low: int, high: int) -> int:
        return max(low, min(high, round(self.log(low, high))))


def draw_case(folder: Path, seed: int, number: int) -> Case:
    """Write workload `number` of a seed with its files; the same arguments write the same files."""
    draw = Draw(np.random.default_rng((seed, number)))
    folder.mkdir(parents=True, exist_ok=True)
    solver = "capplan" if draw.maybe(0.6) else draw.one([name for name in SOLVERS if name != "milp"])
    load = draw.log(0.1, 1.5)
    document: Document = {"version": 1, **_hardware(draw, folder, load)}
    document["adapters"] = _adapters(draw, folder)
    if draw.maybe(0.3):
        document["base"] = _base(draw)
    if draw.maybe(0.15):
        document["trace"] = _trace(draw, folder, document)
    else:
        document["requests"] = _requests(draw, folder)
        if "base" in document and draw.maybe(0.15):
            del document["adapters"]
    document |= _objectives(draw, document)
    document["engine"] = _engine(draw)
    supports = find_solver(solver).supports if draw.maybe(0.95) else frozenset(Requirement)
    _constrain(draw, document, supports)
    path = folder / "workload.yaml"
    _scale(path, document, load)
    listed = "trace" not in document and isinstance(document.get("adapters"), list)
    if listed and Requirement.PREVIOUS_PLAN in supports and draw.maybe(0.15):
        _plan_in_force(path, _with_move_cost(draw, document))
    return Case(path, solver, _options(draw))


def _options(draw: Draw) -> Document:
    robust = {"robust": draw.one((0.7, 0.9, 0.95))} if draw.maybe(0.12) else {}
    return robust | ({"knobs": draw.one(("any", "default"))} if draw.maybe(0.15) else {})


def _hardware(draw: Draw, folder: Path, load: float) -> Document:
    """Return profile and GPUs, or pools; some profiles are rooflines, some of two GPUs per instance.

    Rooflines, and some shipped profiles, are of any engine whose rules are known.
    """
    shipped = draw.one(list(MODELS))
    count = max(1, round(load * draw.log(1.2, 4.0)) + draw.count(1, 4) - 1)
    model = {"base_model": MODELS[shipped]}
    if draw.maybe(0.7):
        profile = shipped
        if draw.maybe(0.3):
            profile = "./engine.json"
            other = _of_other_engine(load_profile(shipped), _engine_choice(draw))
            write_text_atomic(folder / profile, other.model_dump_json())
        return {**model, "profile": profile, "gpus": {"count": min(8, count)}}
    tp = draw.one((1, 2))
    sheet = gpu_sheet(draw.one(OTHER_GPUS))
    roofline = roofline_profile(sheet, load_profile(shipped).model, _engine_choice(draw), tp=tp)
    write_text_atomic(folder / "roofline.json", roofline.model_dump_json())
    if draw.maybe(0.4):
        return {**model, "profile": "./roofline.json", "gpus": {"count": min(8, count) * tp}}
    prices = draw.maybe(0.7)
    pools = [("first", shipped, 1), ("second", "./roofline.json", tp)]
    return {
        **model,
        "pools": [
            {"name": name, "profile": profile, "count": draw.count(1, 4) * size}
            | ({"usd_per_hour": draw.log(1.0, 6.0, 2)} if prices else {})
            for name, profile, size in pools
        ],
    }


def _engine_choice(draw: Draw) -> EngineChoice:
    rules = draw.one(RULES)
    return EngineChoice(rules.engine, rules.version, rules.name, lora_extra_vocab=rules.lora_extra_vocab)


def _of_other_engine(profile: Profile, engine: EngineChoice) -> Profile:
    """Return a profile with the step times of another engine's, under the rules of an engine."""
    fields = ("name", "version", "rules", "lora_extra_vocab")
    changed = profile.engine.replace(**{name: getattr(engine, name) for name in fields}, prefix_caching=None)
    return profile.replace(engine=changed, name=f"{profile.name}/{engine.rules}")


def _adapters(draw: Draw, folder: Path) -> list[Document] | str:
    total = draw.count(4, 400)
    ranks = [draw.one(RANKS[: draw.one((5, 6, 8))]) for _ in range(draw.count(1, 3))]
    if draw.maybe(0.1):
        weights = np.exp(draw.rng.normal(0.0, 1.2, total))
        with (folder / "adapters.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("name", "rank", "rate_rps"))
            rows.writerows((f"csv-{i}", draw.one(ranks), f"{w / total:.6g}") for i, w in enumerate(weights))
        return "adapters.csv"
    entries: list[Document] = []
    for group, rank in enumerate(ranks):
        count = max(1, total // len(ranks))
        entry: Document = {"name": f"g{group}-{{i}}", "count": count, "rank": rank}
        weight = draw.log(0.2, 1.0)
        laws = [{"zipf": draw.log(0.4, 1.6)}, {"power_law": draw.log(0.15, 1.0)}, {"exponential": 0.1}]
        if draw.maybe(0.5):
            entry |= {"popularity": draw.one(laws), "total_rate_rps": weight}
        else:
            entry["rate_rps"] = weight / count
        if draw.maybe(0.2):
            entry["prompt_tokens"] = _gamma(draw, 60, 1200)
        if draw.maybe(0.1):
            entry["output_tokens"] = _gamma(draw, 30, 400)
        entries.append(entry)
    if draw.maybe(0.3):
        entries.append({"name": "hot", "rank": draw.one(ranks), "rate_rps": draw.log(0.3, 3.0)})
    if draw.maybe(0.2):
        entries.append({"name": "idle-{i}", "count": draw.count(1, 20), "rank": ranks[0], "rate_rps": 0.0})
    return entries


def _base(draw: Draw) -> Document:
    """Return traffic of the base model: from little to several times that of the adapters."""
    entry: Document = {"rate_rps": 0.0 if draw.maybe(0.05) else draw.log(0.05, 4.0)}
    if draw.maybe(0.4):
        entry["prompt_tokens"] = _gamma(draw, 60, 1200)
    if draw.maybe(0.3):
        entry["output_tokens"] = _gamma(draw, 30, 400)
    if draw.maybe(0.3):
        entry["arrivals"] = _arrivals(draw)
    return entry


def _gamma(draw: Draw, low: float, high: float) -> Document:
    mean = draw.log(low, high, 0)
    return {"mean": mean, "std": round(mean * draw.one((0.0, 0.5, 1.0, 1.5)), 1)}


def _requests(draw: Draw, folder: Path) -> Document:
    document: Document = {"arrivals": _arrivals(draw)}
    forms: list[Callable[[float, float], Document]] = [
        lambda low, high: _gamma(draw, low, high),
        lambda low, high: _gamma(draw, low, high),
        lambda low, high: {"mean": draw.log(low, high, 0)},
        lambda low, high: {"values": [round(low), round(high), round(3 * high)], "counts": [6, 3, 1]},
        lambda low, high: {"edges": [1, round(low), round(high), round(2 * high)], "counts": [1, 6, 2]},
    ]
    if draw.maybe(0.12):
        _write_lengths(draw, folder / "lengths.csv")
        scale = {"scale": draw.log(0.5, 1.5)} if draw.maybe(0.5) else {}
        document["lengths_from"] = {"file": "lengths.csv", **scale}
    else:
        document["prompt_tokens"] = draw.one(forms)(60.0, 900.0)
        document["output_tokens"] = draw.one(forms)(20.0, 300.0)
        if draw.maybe(0.1):
            _write_lengths(draw, folder / "lengths.csv")
            document["prompt_tokens"] = {"file": "lengths.csv", "column": "prompt_tokens"}
        if draw.maybe(0.2):
            document["length_correlation"] = round(float(draw.rng.uniform(-0.8, 0.8)), 2)
    if draw.maybe(0.15):
        document["stickiness"] = {"last": draw.one((1, 4)), "probability": 0.4}
    if draw.maybe(0.15):
        document["shared_prefix_tokens"] = draw.count(16, 200)
    return document


def _write_lengths(draw: Draw, path: Path) -> None:
    lengths = np.ceil(draw.rng.lognormal((5.5, 4.8), (0.9, 0.7), (2000, 2))).clip(1, 6000).astype(int)
    rows = "\n".join(f"{prompt},{output}" for prompt, output in lengths.tolist())
    write_text_atomic(path, f"prompt_tokens,output_tokens\n{rows}\n")


def _arrivals(draw: Draw) -> str | Document:
    if draw.maybe(0.4):
        return draw.one(("poisson", "poisson", "poisson", "deterministic"))
    if draw.maybe(0.1):
        return {"process": "unpredictable", "factor": 1.5, "clip": 2.0}
    process: Document = draw.one(
        (
            {"process": "poisson"},
            {"process": "gamma", "cv": draw.log(0.3, 6.0)},
            {"process": "weibull", "cv": draw.log(0.5, 3.0)},
            {"process": "lognormal", "cv": draw.log(0.5, 4.0)},
        )
    )
    every_s = draw.one((300.0, 900.0, 1800.0))
    period_s, phase = draw.one((3600.0, 14400.0, 86400.0)), draw.one((0.0, 0.25, 0.6))
    modulations: list[Document] = [
        {"kind": "steps", "steps": [[0, 1], [600, draw.log(1.2, 3.0)], [900, 1]], "period_s": 1800},
        {"kind": "diurnal", "amplitude": draw.log(0.2, 0.9), "period_s": period_s, "phase": phase},
        {"kind": "burst", "factor": draw.log(1.5, 6.0), "every_s": every_s, "length_s": every_s / 10},
        {"kind": "burst", "factor": draw.log(1.5, 4.0), "every_s": 7200.0, "length_s": 900.0, "at_s": 5400.0},
        {"kind": "shifting_skew", "from_rank": 32, "to_rank": 16},
        {"kind": "shifting_skew", "from_rank": 16, "to_rank": 8, "over_s": 7200.0},
    ]
    if draw.maybe(0.5) or process == {"process": "poisson"}:
        process["modulation"] = draw.one(modulations)
    return process


def _trace(draw: Draw, folder: Path, document: Document) -> Document:
    """Write 10,000 recorded requests at about 1 a second; without names, they are assigned by the rates."""
    count = 10_000
    gaps = draw.rng.gamma(1.0 / 4.0, 4.0, count) if draw.maybe(0.5) else draw.rng.exponential(1.0, count)
    lengths = np.ceil(draw.rng.lognormal((5.6, 4.8), (0.8, 0.6), (count, 2))).clip(1, 7000).astype(int)
    columns = [gaps.cumsum().round(4).tolist(), *lengths.T.tolist()]
    header = ["arrival_s", "prompt_tokens", "output_tokens"]
    based = "base" in document
    if based:
        document["base"] = {"rate_rps": document["base"]["rate_rps"]}
    if draw.maybe(0.5):
        names = [f"t{i}" for i in range(draw.count(4, 200))]
        weights = np.arange(1, len(names) + 1) ** -draw.log(0.2, 1.4)
        named = draw.rng.choice(names, count, p=weights / weights.sum())
        columns.append(np.where(draw.rng.random(count) < 0.3 * based, "", named).tolist())
        header.append("adapter")
        ranks = "\n".join(f"{name},{draw.one(RANKS[:6])}" for name in names)
        write_text_atomic(folder / "ranks.csv", f"name,rank\n{ranks}\n")
        del document["adapters"]
    elif not isinstance(document["adapters"], str):
        for entry in document["adapters"]:
            entry.pop("prompt_tokens", None), entry.pop("output_tokens", None)
    rows = "\n".join(",".join(map(str, row)) for row in zip(*columns, strict=True))
    write_text_atomic(folder / "trace.csv", f"{','.join(header)}\n{rows}\n")
    return {"file": "trace.csv", **({} if "adapters" in document else {"ranks": "ranks.csv"})}


def _objectives(draw: Draw, document: Document) -> Document:
    slo: Document = {"served_fraction": draw.one((0.8, 0.95, 0.98))} if draw.maybe(0.25) else {}
    for _ in range(draw.one((0, 0, 1, 1, 2))):
        metric, statistic = draw.one(list(TIGHTEST)), draw.one(list(LOOSER))
        name, unit = metric.split("_")
        low = TIGHTEST[metric] * LOOSER[statistic]
        slo[f"{name}_{statistic}_{unit}"] = draw.log(low, 8.0 * low, 2)
    if draw.maybe(0.08):
        slo |= {"tpt_over_base": draw.log(1.3, 3.0, 2), "attainment": draw.one((0.9, 0.95, 0.99))}
    priced = all("usd_per_hour" in pool for pool in document.get("pools", [{}]))
    objectives = ["min_gpus", "min_gpus", "min_gpus", "min_latency", "max_throughput"]
    return {
        **({"slo": slo} if slo else {}),
        **({"queues": {}} if draw.maybe(0.06) else {}),
        "objective": draw.one(objectives + ["min_cost"] * 3 if priced else objectives),
        "headroom": draw.one((0.0, 0.05, 0.1, 0.1, 0.2)),
    }


def _engine(draw: Draw) -> Document:
    """Return the engine settings that are fixed; half of the workloads leave all open."""
    if draw.maybe(0.5):
        return {}
    choices: Document = {
        "max_num_seqs": draw.one((32, 64, 128, 256, 512)),
        "max_num_batched_tokens": draw.one((512, 1024, 2048, 4096)),
        "max_model_len": draw.one((2048, 4096, 8192)),
        "gpu_memory_utilization": draw.one((0.8, 0.85, 0.95)),
        "max_loras": draw.one((2, 4, 8, 16, 32)),
        "max_lora_rank": 256,
        "max_cpu_loras": draw.one((32, 64, 128)),
    }
    return {name: value for name, value in choices.items() if draw.maybe(0.25)}


def _constrain(draw: Draw, document: Document, supports: frozenset[Requirement]) -> None:
    """Drop what a solver does not support, and add pins, apart_from, together_with and max_replicas."""
    if Requirement.POOLS not in supports and "pools" in document:
        first = document.pop("pools")[0]
        document |= {"profile": first["profile"], "gpus": {"count": first["count"]}}
    if Requirement.OBJECTIVE not in supports or (
        document["objective"] == "min_cost" and "pools" not in document
    ):
        document["objective"] = "min_gpus"
    entries = document.get("adapters")
    if not isinstance(entries, list):
        return
    first, names = entries[0], [entry["name"].replace("{i}", "0") for entry in entries]
    if Requirement.MAX_REPLICAS in supports and draw.maybe(0.15):
        entries[-1]["max_replicas"] = draw.one((1, 2))
    if Requirement.POOLS in supports and "pools" in document and draw.maybe(0.4):
        first["pool"] = draw.one(("first", "second"))
    if len(entries) > 1 and Requirement.APART in supports and draw.maybe(0.15):
        entries[-1]["apart_from"] = [names[0]]
    elif len(entries) > 1 and Requirement.TOGETHER in supports and draw.maybe(0.15):
        entries[-1]["together_with"] = [names[0]]


def _scale(path: Path, document: Document, load: float) -> None:
    """Write the workload with rates that keep `load` GPUs busy by the lower bound."""
    write_text_atomic(path, json.dumps(document, indent=1))
    busy = lower_bound(make_problem(load_workload(path), None, None)).gpus
    factor = load / busy if busy > 0 else 10.0 * load
    entries = document.get("adapters")
    if "trace" in document:
        document["trace"]["rate_rps"] = float(f"{factor:.4g}")
    elif isinstance(entries, str):
        header, *rows = (path.parent / entries).read_text().splitlines()
        cells = (row.rsplit(",", 1) for row in rows)
        scaled = [f"{head},{float(rate) * factor:.6g}" for head, rate in cells]
        write_text_atomic(path.parent / entries, "\n".join([header, *scaled]) + "\n")
    if "trace" not in document:
        _multiply_rates(document, factor)
    write_text_atomic(path, json.dumps(document, indent=1))


def _multiply_rates(document: Document, factor: float) -> None:
    listed = document.get("adapters", ())
    entries = [] if isinstance(listed, str) else [*listed]
    for entry in [*entries, *([document["base"]] if "base" in document else [])]:
        key = "total_rate_rps" if "popularity" in entry else "rate_rps"
        entry[key] = float(f"{entry[key] * factor:.6g}")


def _with_move_cost(draw: Draw, document: Document) -> Document:
    """Return the workload with a cost of moves, if its objective takes one."""
    priced = document["objective"] in ("min_gpus", "min_cost") and draw.maybe(0.5)
    return {**document, "move_cost": draw.log(0.001, 0.1)} if priced else document


def _plan_in_force(path: Path, document: Document) -> None:
    """Plan the workload at a lighter load, and make that the plan in force if there is one."""
    lighter = deepcopy(document)
    _multiply_rates(lighter, PREVIOUS_SCALE)
    before = path.with_name("before.yaml")
    write_text_atomic(before, json.dumps(lighter, indent=1))
    try:
        plan(load_workload(before)).to_json(path.with_name("before.json"))
    except CapplanError:
        return
    write_text_atomic(path, json.dumps({**document, "previous_plan": "before.json"}, indent=1))
