"""Placement of adapters on one GPU and on four, verified by the twin (section 8.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Final, TypeAlias

import numpy as np

from capplan.datasets import load_profile
from capplan.datasets.published import LENGTHS, MAX_NUM_SEQS, TOKEN_BUDGET
from capplan.planner import Solver, SolverResult, compare
from capplan.planner.solvers import find_solver
from capplan.reproduce._lab import Lab
from capplan.reproduce._results import Curve, Findings
from capplan.reproduce.twin._fidelity import published_model
from capplan.reproduce.twin._setting import numbered, setting, system
from capplan.spec import STARVED_BELOW, Adapter, EngineConfig, Slo, Workload

PROPOSED: Final = "Proposed"
MAXBASES: Final = ("MaxBase", "MaxBase*")
FOUR: Final = 4
_ALIKE: Final = 0.2
_MANY_TIMES: Final = 10.0
Answers: TypeAlias = Mapping[int, SolverResult]
"""Answers of one system along a curve, by adapters."""


@dataclass(frozen=True)
class Cell:
    """Adapters on GPUs, with one draw of rates and sizes."""

    model: str
    gpus: int
    rates: str
    ranks: str
    adapters: int
    draw: int


@dataclass(frozen=True)
class Placed:
    """A system's answer to a cell."""

    cell: Cell
    system: str


def solver_of(name: str) -> Solver:
    """Return the solver of a system of the recipe, with the estimator that the paper gives it."""
    chosen: dict[str, Any] = dict(system(name))
    return replace(find_solver(chosen.pop("solver")), **chosen)


def paper_workload(model: str, adapters: tuple[Adapter, ...], **fields: Any) -> Workload:
    """Return a workload with the profile and lengths of a measured model, under the paper's criterion.

    Nine tenths of the tokens are served; the server has the limits of the measured runs.
    """
    profile = load_profile(setting().models[model])
    prompt, output = LENGTHS[published_model(model).key]
    common: dict[str, Any] = {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "slo": Slo(stable=False),
        "engine": EngineConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=TOKEN_BUDGET,
            max_model_len=setting().placement.model_len[model],
        ),
    }
    return Workload(
        base_model=profile.model.hf_ids[0], profile=profile.name, adapters=adapters, **common | fields
    )


def drawn_adapters(rates: str, ranks: str, adapters: int, draw: int) -> tuple[Adapter, ...]:
    """Return adapters of random rates and sizes; a longer draw begins with a shorter one."""
    given = setting().placement
    sets = (list(given.rates_rps).index(rates), list(given.ranks).index(ranks))
    random = np.random.default_rng((draw, *sets))
    most = max(max(curve.adapters) for curve in given.curves.values())
    rate_rps = random.choice(given.rates_rps[rates], most)
    rank = random.choice(given.ranks[ranks], most)
    return numbered(rank[:adapters], rate_rps[:adapters])


def placed(case: Placed) -> dict[str, Any]:
    """Return the answer, verified by one hour of the twin."""
    cell = case.cell
    adapters = drawn_adapters(cell.rates, cell.ranks, cell.adapters, cell.draw)
    return _compared(paper_workload(cell.model, adapters, headroom=0.0), case.system, cell.gpus, cell.draw)


def _compared(workload: Workload, name: str, gpus: int, seed: int) -> dict[str, Any]:
    limit_s = setting().placement.time_limit_s
    (row,) = compare(workload, [solver_of(name)], gpus=gpus, seed=seed, seeds=1, time_limit_s=limit_s).rows
    return {name: None if value != value else value for name, value in asdict(row).items()}  # JSON has no NaN


def answers(lab: Lab, curve: str, systems: Sequence[str]) -> dict[str, list[Answers]]:
    """Return each system's answers along a curve, by draw."""
    given = setting().placement.curves[curve]
    cases = [
        Placed(Cell(given.model, given.gpus, given.rates, given.ranks, adapters, draw), name)
        for name, draw, adapters in product(systems, lab.seeds, given.adapters)
    ]
    found: dict[str, list[dict[int, SolverResult]]] = {name: [{} for _ in lab.seeds] for name in systems}
    for case, row in zip(cases, lab.each(placed, cases), strict=True):
        known: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else float("nan") if each is None else each
            for name, each in row.items()
        }
        found[case.system][lab.seeds.index(case.cell.draw)][case.cell.adapters] = SolverResult(**known)
    return {name: list(each) for name, each in found.items()}


def starves(row: SolverResult) -> bool:
    """Return whether a GPU serves less than nine tenths of its tokens, the paper's criterion.

    Capplan's own also asks it of each adapter.
    """
    return row.answered and not row.memory_errors and row.served_fraction < STARVED_BELOW


def holds(row: SolverResult) -> bool:
    """Return whether there is an answer without starvation and memory errors."""
    return row.answered and not row.memory_errors and not starves(row)


def reach(found: Answers) -> int:
    """Return the most adapters up to which every answer holds, 0 for none."""
    last = 0
    for adapters in sorted(found):
        if not holds(found[adapters]):
            break
        last = adapters
    return last


def _valid(draws: Sequence[Answers]) -> bool:
    """Return whether no answer starves or runs out of memory."""
    return not any(row.answered and not holds(row) for found in draws for row in found.values())


def _curves(
    found: Mapping[str, Sequence[Answers]], value: Callable[[SolverResult], float], prefix: str = ""
) -> Iterator[Curve]:
    """Yield a curve per system, mean over draws where all hold."""
    for name, draws in found.items():
        counts = sorted(draws[0])
        held = [count for count in counts if all(holds(each[count]) for each in draws)]
        means = tuple(float(np.mean([value(each[count]) for each in draws])) for count in held)
        yield Curve(name=f"{prefix}{name}", x=tuple(map(float, held)), y=means)


def fig10(lab: Lab) -> Findings:
    """Place on one GPU with the pipeline and the two baselines."""
    names = (PROPOSED, *MAXBASES)
    left, right = (answers(lab, f"fig10-{side}", names) for side in ("left", "right"))
    ours, others = left[PROPOSED], [left[name] for name in MAXBASES]
    beyond = [
        all(
            any(starves(draw[at][count]) for count, row in found.items() if not row.answered)
            for draw in others
        )
        for at, found in enumerate(ours)
    ]
    first = [[_first(found, lambda row: row.memory_errors > 0) for found in right[name]] for name in MAXBASES]
    last = [max(reach(found), min(found)) for found in right[PROPOSED]]
    fewer = [
        found[count].slots_per_gpu < base[count].slots_per_gpu
        for found, base, count in zip(right[PROPOSED], right["MaxBase"], last, strict=True)
    ]
    throughput = [
        _last_throughput(side[PROPOSED][at]) >= _last_throughput(side[name][at])
        for side, name, at in product((left, right), MAXBASES, range(len(lab.seeds)))
    ]
    values: dict[str, Any] = {
        "valid": _valid(left[PROPOSED]) and _valid(right[PROPOSED]),
        "left": beyond,
        "right": [one < float("inf") and one <= other for one, other in zip(*first, strict=True)],
        "slots": fewer,
        "throughput": throughput,
    }
    curves = [
        *_curves(left, lambda row: row.throughput_tok_s, "left: "),
        *_curves(right, lambda row: row.throughput_tok_s, "right: "),
    ]
    return Findings(values, curves)


def _first(found: Answers, is_so: Callable[[SolverResult], bool]) -> float:
    return min((count for count, row in found.items() if is_so(row)), default=float("inf"))


def _last_throughput(found: Answers) -> float:
    last = reach(found)
    return found[last].throughput_tok_s if last else 0.0


def fig11(lab: Lab) -> Findings:
    """Place on four GPUs with the pipeline and the baselines."""
    names = (PROPOSED, "ProposedFast", *MAXBASES, "Random")
    curves = [name for name in setting().placement.curves if name.startswith("fig11")]
    found = {curve: answers(lab, curve, names) for curve in curves}
    first, second = found[curves[0]][PROPOSED], found[curves[1]][PROPOSED]
    one_gpu = [_most(draw, lambda row: holds(row) and row.gpus == 1) for draw in first]
    four = [_first(draw, lambda row: row.answered and row.gpus == FOUR) for draw in first]
    every = [(each[PROPOSED], name, each[name]) for each in found.values() for name in (*MAXBASES, "Random")]
    fewest = all(
        ours.gpus <= row.gpus
        for proposed, _, others in every
        for mine, other in zip(proposed, others, strict=True)
        for count, row in other.items()
        if holds(row) and holds(ours := mine[count])
    )
    failing = {
        name: any(row.answered and not holds(row) for _, other, draws in every if other == name
                  for draw in draws for row in draw.values())
        for name in (*MAXBASES, "Random")
    }  # fmt: skip
    random = [
        row.gpus == FOUR
        for _, name, draws in every
        if name == "Random"
        for draw in draws
        for row in draw.values()
    ]
    values: dict[str, Any] = {
        "one-gpu": one_gpu,
        "four-gpus": [count for count in four if count < float("inf")] or None,
        "low-rates": [holds(draw[max(draw)]) for draw in second],
        "valid": all(_valid(each[PROPOSED]) for each in found.values()),
        "fewest": fewest,
        "baselines": all(failing.values()),
        "random-all": float(np.mean(random)) >= 0.9,
    }
    shown = [
        curve
        for name, each in found.items()
        for curve in _curves(each, lambda row: row.gpus, f"{name.removeprefix('fig11-')}: ")
    ]
    return Findings(values, shown)


def _most(found: Answers, is_so: Callable[[SolverResult], bool]) -> int:
    return max((count for count, row in found.items() if is_so(row)), default=0)


def fig12(lab: Lab) -> Findings:
    """Compare with dLoRA's placement and with one for latency."""
    names = (PROPOSED, "dLoRA", "ProposedLat")
    top, bottom = (answers(lab, f"fig12-{part}", names) for part in ("top", "bottom"))
    pairs = [
        (ours[count], dlora[count], latency[count], count <= max(ours) / 2)
        for part in (top, bottom)
        for ours, dlora, latency in zip(*(part[name] for name in names), strict=True)
        for count in ours
    ]
    held = [(ours, dlora, small) for ours, dlora, _, small in pairs if holds(ours) and holds(dlora)]
    apart = [
        abs(latency.itl_ms_mean / dlora.itl_ms_mean - 1.0)
        for _, dlora, latency, _ in pairs
        if holds(latency) and holds(dlora)
    ]
    all_used = [
        row.gpus == FOUR for _, dlora, latency, _ in pairs for row in (dlora, latency) if row.answered
    ]
    values: dict[str, Any] = {
        "gpus": all(
            ours.gpus < dlora.gpus if small else ours.gpus <= dlora.gpus for ours, dlora, small in held
        ),
        "dlora-all": all(all_used),
        "itl": all(dlora.itl_ms_mean < ours.itl_ms_mean for ours, dlora, _ in held if ours.gpus < dlora.gpus),
        "lat-itl": max(apart, default=1.0) <= _ALIKE,
        "top-dlora": [
            not dlora[max(dlora)].answered and holds(ours[max(ours)])
            for ours, dlora in zip(top[PROPOSED], top["dLoRA"], strict=True)
        ],
        "top-lat": [
            reach(latency) < reach(ours)
            for ours, latency in zip(top[PROPOSED], top["ProposedLat"], strict=True)
        ],
        "bottom-dlora": [
            reach(dlora) >= reach(ours) and any(starves(row) for row in dlora.values())
            for ours, dlora in zip(bottom[PROPOSED], bottom["dLoRA"], strict=True)
        ],
        "lat-valid": _valid(top["ProposedLat"]) and _valid(bottom["ProposedLat"]),
    }
    curves = [
        *_curves(top, lambda row: row.itl_ms_mean, "top: "),
        *_curves(bottom, lambda row: row.itl_ms_mean, "bottom: "),
    ]
    return Findings(values, curves)


@dataclass(frozen=True)
class Timed:
    """A system's placement of the workload of Table 5."""

    model: str
    gpus: int
    system: str


def timed_ms(case: Timed) -> float | None:
    """Return the fastest of some placements, None without an answer."""
    given = setting().placement
    load = given.speed[str(case.gpus)]
    adapters = drawn_adapters("mixed", "mixed", load.adapters, 0)
    workload = paper_workload(case.model, adapters, headroom=0.0)
    scaled = workload.at_rates_times(load.total_rps / workload.total_rate_rps)
    rows = [_compared(scaled, case.system, case.gpus, 0) for _ in range(given.repeats)]
    times = [row["solve_s"] for row in rows if row["solve_s"] is not None]
    return min(times) * 1e3 if times else None


def table5(lab: Lab) -> Findings:
    """Time the placement algorithms."""
    systems = {1: (PROPOSED, *MAXBASES), FOUR: (PROPOSED, "ProposedFast", *MAXBASES, "Random", "dLoRA")}
    cases = [
        Timed(model, gpus, name)
        for model in setting().models
        for gpus, names in systems.items()
        for name in names
    ]
    ms = {(each.model, each.gpus, each.system): found for each, found in
          zip(cases, lab.each(timed_ms, cases), strict=True)}  # fmt: skip
    values: dict[str, Any] = {
        f"{model}-{gpus}-{name.replace('*', 'half').lower()}": found
        for (model, gpus, name), found in ms.items()
    }
    for model in setting().models:
        own = {name: ms[model, FOUR, name] or float("inf") for name in systems[FOUR]}
        base = max(own[name] for name in (*MAXBASES, "Random"))
        values[f"{model}-order"] = base < own["ProposedFast"] < own["dLoRA"] < own[PROPOSED]
        values[f"{model}-fast"] = own["dLoRA"] >= _MANY_TIMES * own["ProposedFast"]
    return Findings(values)
