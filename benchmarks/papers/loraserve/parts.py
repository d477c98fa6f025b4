"""Tables of LoRAServe's evaluation: six traces, equal load, weak scaling, rank skew, models and TP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from benchmarks.common import markdown
from benchmarks.papers.loraserve.hardware import PROMPT_TOKENS, RANKS, SETTING, hardware, prefill_ms
from benchmarks.papers.loraserve.lab import PRODUCTION, SERVERS, Lab, mean_and_range
from benchmarks.papers.loraserve.load import TRACES
from benchmarks.papers.loraserve.systems import (
    BLIND,
    CONTIGUOUS,
    FACTORS,
    LORASERVE,
    OURS,
    RANDOM,
    RUNTIME,
    Scene,
)

POISSON: Final = TRACES[:3]
MOVING: Final = (*(trace for trace in TRACES if trace.endswith("shifting")), "rankskew-2")
"""Traces on which re-balancing at run time is compared: two whose popularity moves, and one with a skew."""
PAPER: Final = (LORASERVE, "toppings", BLIND, CONTIGUOUS, RANDOM)
COMPARED: Final = (OURS, *PAPER)
WITHOUT_SEARCH: Final = ("least-work-left", *PAPER)
"""Ours by its router alone, where every case would need a placement of its own."""
OF_LORASERVE: Final = 0.95
"""Share of LoRAServe's lowest highest rate over the seeds, at which systems are compared."""
LOADS: Final = (0.8, OF_LORASERVE)
MOST_FACTOR: Final = 3
"""Servers that are tried, over those of LoRAServe."""
PRODUCTIONS: Final = tuple(f"{PRODUCTION}{adapters}" for adapters in (50, 100, 200))
EXPONENTS: Final = {"third": "1/3", "1": "1", "2": "2", "3": "3"}
CLUSTERS: Final = (4, 8, 12)
SCALED: Final = ("least-work-left", LORASERVE, BLIND)
MODELS: Final = (SETTING, "a100-40g/llama-30b/tp4", "a100-40g/llama-2-70b/tp8")
DEGREES: Final = ("a100-40g/llama-7b/tp2", SETTING, "a100-40g/llama-7b/tp8")
ALONE: Final = tuple(f"a100-40g/llama-7b/tp{degree}" for degree in (1, 2, 8))
_STEADY: Final = "poisson-uniform"


def rates(lab: Lab, scene: Scene, systems: Sequence[str] = COMPARED) -> dict[str, list[float]]:
    """Return the highest rates of each system, per seed and random placement."""
    return {system: lab.highest_rps(scene, system) for system in systems}


def capacity(lab: Lab, traces: Sequence[str] = TRACES) -> str:
    """Return the highest loads on the six traces, and their ratios."""
    found = {trace: rates(lab, lab.scene(trace)) for trace in traces}
    table = [[trace, *map(mean_and_range, of.values())] for trace, of in found.items()]
    ratios = [[trace, *_ratios(of)] for trace, of in found.items()]
    header = ["trace", "ours / best other", *(f"LoRAServe / {system}" for system in (RANDOM, CONTIGUOUS))]
    header += [f"LoRAServe / {BLIND}", "LoRAServe / toppings"]
    return f"{markdown(['trace', *COMPARED], table)}\n\n{markdown(header, ratios)}"


def _ratios(of: Mapping[str, Sequence[float]]) -> list[str]:
    mean = {system: fmean(rps) for system, rps in of.items()}
    best = max(rps for system, rps in mean.items() if system != OURS)
    others = (RANDOM, CONTIGUOUS, BLIND, "toppings")
    return [f"{mean[OURS] / best:.2f}", *(f"{mean[LORASERVE] / mean[system]:.2f}" for system in others)]


def variants(lab: Lab, traces: Sequence[str] = TRACES) -> str:
    """Return what single choices change: the time step, the router's preference, the placement alone."""
    slow = replace(lab, step_s=300.0, out=lab.out / "step-300s")
    rows = []
    for trace in traces:
        scene = lab.scene(trace)
        systems = (LORASERVE, "loraserve-literal", "loraserve-frozen", "capplan", "least-work-left", OURS)
        found = rates(lab, scene, systems)
        slowly = mean_and_range(slow.highest_rps(slow.scene(trace), LORASERVE))
        rows.append([trace, *map(mean_and_range, found.values()), slowly])
    return markdown(["trace", *systems, "loraserve, step 300 s"], rows)


def factors(lab: Lab, traces: Sequence[str] = TRACES) -> str:
    """Return the highest loads of ours by its factor, over the best other system that routes or re-places."""
    rows = []
    for trace in traces:
        found = rates(lab, lab.scene(trace), (*FACTORS, LORASERVE, "toppings"))
        mean = {system: fmean(rps) for system, rps in found.items()}
        best = max(mean[LORASERVE], mean["toppings"])
        cells = [f"{mean[system]:.1f}, {mean[system] / best:.2f}" for system in FACTORS]
        rows.append([trace, *cells, *(mean_and_range(found[other]) for other in (LORASERVE, "toppings"))])
    return markdown(["trace", *FACTORS, LORASERVE, "toppings"], rows)


def runtime(lab: Lab, traces: Sequence[str] = MOVING) -> str:
    """Return the highest load with re-balancing at run time, beside that with placements drawn before."""
    systems = (LORASERVE, *RUNTIME)
    rows = [[trace, *map(mean_and_range, rates(lab, lab.scene(trace), systems).values())] for trace in traces]
    return markdown([f"trace, windows of {lab.step_s:g} s", *systems], rows)


def equal_load(lab: Lab, traces: Sequence[str] = POISSON) -> str:
    """Return the servers that each system needs for 95 % of LoRAServe's load, the servers saved, and rates.

    Adapters and traffic of a trace grow with the servers of the lab.
    """
    rows, highest = [], []
    for trace in traces:
        scene = lab.scene(trace, lab.servers)
        rps = OF_LORASERVE * lab.loraserve_rps(scene)
        most = MOST_FACTOR * lab.servers
        needed = {s: lab.servers_for(scene, s, rps, most) for s in WITHOUT_SEARCH}
        own = needed[LORASERVE] or lab.servers
        cells = [
            f"> {most} (> {1 - own / most:.0%})" if n is None else f"{n} ({1 - own / n:.0%})"
            for n in needed.values()
        ]
        rows.append([trace, f"{rps:.1f}", *cells])
        found = rates(lab, scene, WITHOUT_SEARCH)
        mean = fmean(found[LORASERVE])
        highest.append([trace, *(f"{mean_and_range(f)}, {mean / fmean(f):.2f}" for f in found.values())])
    needed_table = markdown(["trace", "req/s", *WITHOUT_SEARCH], rows)
    title = f"highest req/s of {lab.servers} servers, and LoRAServe's over it"
    return f"{needed_table}\n\n{markdown([title, *WITHOUT_SEARCH], highest)}"


def latency(lab: Lab, traces: Sequence[str] = POISSON) -> str:
    """Return P95 TTFT at shares of LoRAServe's highest load."""
    rows = []
    for trace in traces:
        scene = lab.scene(trace)
        for share in LOADS:
            rps = share * lab.loraserve_rps(scene)
            found = {system: lab.p95_s(scene, system, rps) for system in COMPARED}
            own = fmean(found[LORASERVE])
            cells = [f"{fmean(p95):.2f} s, {fmean(p95) / own:.1f} x" for p95 in found.values()]
            rows.append([trace, f"{rps:.1f} ({share:.0%})", *cells])
    return markdown(["trace", "req/s", *COMPARED], rows)


def storage(lab: Lab) -> str:
    """Return the adapters on each server under LoRAServe, against all of them on all servers."""
    rows = []
    for name in (*POISSON, *PRODUCTIONS):
        scene = lab.scene(name)
        rps = OF_LORASERVE * lab.loraserve_rps(scene)
        stored = []
        for seed, _ in lab.runs(LORASERVE):
            placements, _ = scene.stepped(lab.load(scene, rps, seed))
            stored += [sorted(len(served) for served in shares) for shares in placements]
        everything = len(scene.workload.adapters)
        fewest, mean, most = (fmean(f(step) for step in stored) for f in (min, fmean, max))
        cells = [f"{count:.1f}, {everything / count:.1f} x" for count in (fewest, mean, most)]
        rows.append([name, f"{rps:.1f}", str(everything), *cells])
    header = ["trace", "req/s", "adapters", "emptiest server", "mean", "fullest server"]
    return markdown(header, rows)


def scaling(lab: Lab) -> str:
    """Return the highest load on 4, 8 and 12 servers, with adapters and traffic in proportion.

    The first row is that of LoRAServe's placement by the operating points alone, without a simulation.
    """
    scenes = {n: lab.scene(_STEADY, n) for n in CLUSTERS}
    found = {
        "placement of `loraserve`": {n: [scene.placed_rps()] for n, scene in scenes.items()},
        **{s: {n: lab.highest_rps(scene, s) for n, scene in scenes.items()} for s in SCALED},
    }
    rows = []
    for system, of in found.items():
        per_server = fmean(of[SERVERS]) / SERVERS
        cells = [f"{mean_and_range(rps)}, {fmean(rps) / (per_server * n) - 1:+.1%}" for n, rps in of.items()]
        rows.append([system, *cells])
    return markdown(["system", *(f"{n} servers" for n in CLUSTERS)], rows)


def skew(lab: Lab) -> str:
    """Return the highest load with 100 adapters by the exponent of the ranks' power law."""
    rows = []
    for label, shown in EXPONENTS.items():
        found = rates(lab, lab.scene(f"rankskew-{label}"), WITHOUT_SEARCH)
        rows.append([shown, *map(mean_and_range, found.values()), _order(found)])
    return markdown(["alpha", *WITHOUT_SEARCH, "order"], rows)


def models(lab: Lab, names: Sequence[str] = (*MODELS, *DEGREES)) -> str:
    """Return the highest load by model and degree of tensor parallelism."""
    rows = []
    for name in dict.fromkeys(names):
        other = replace(lab, hardware=name)
        found = rates(other, other.scene(_STEADY), WITHOUT_SEARCH)
        rows.append([name, *map(mean_and_range, found.values()), _order(found)])
    return markdown(["server", *WITHOUT_SEARCH, "order"], rows)


def prefill(lab: Lab) -> str:
    """Return the prefill of 2,000 tokens by rank, alone on a server of the roofline."""
    rows = []
    for name in (lab.hardware, *ALONE, *MODELS[1:]):
        step = hardware(name).step_latency
        low, high = (prefill_ms(step, PROMPT_TOKENS, rank) for rank in RANKS)
        rows.append([name, f"{low:.0f}", f"{high:.0f}", f"{high / low:.2f}"])
    return markdown(["server", *(f"rank {rank}, ms" for rank in RANKS), "ratio"], rows)


def _order(found: Mapping[str, Sequence[float]]) -> str:
    mean = {system: fmean(rps) for system, rps in found.items()}
    return " > ".join(sorted(mean, key=lambda system: -mean[system]))


PARTS: Final[Mapping[str, Callable[[Lab], str]]] = {
    "capacity": capacity,
    "variants": variants,
    "factors": factors,
    "runtime": runtime,
    "equal-load": equal_load,
    "latency": latency,
    "storage": storage,
    "scaling": scaling,
    "skew": skew,
    "models": models,
    "prefill": prefill,
}
"""Tables by name."""
