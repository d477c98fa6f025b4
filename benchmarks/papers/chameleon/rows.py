"""Rows of the table: each figure of the paper, simulated, with its band."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from benchmarks.papers.chameleon.lab import BASELINE, Lab
from benchmarks.papers.chameleon.loading import load_share
from benchmarks.papers.chameleon.runs import Case, Numbers
from benchmarks.papers.chameleon.setting import A40, LMSYS, LMSYS_SLO_S, SLO_S, SLORA_KNEE_RPS, Platform

FRACTIONS: Final = (0.70, 0.93, 1.05)
"""Low, medium and high load over S-LoRA's knee (6, 8 and 9 RPS over 8.6)."""
CHAMELEON: Final = "chameleon"
A100: Final = "a100-80g"
TBT_SLO_MS: Final = 150.0
COUNTS: Final = (10, 50, 100, 150, 200)
VARIANTS: Final = (
    "slora-every-step",
    "no-sched-ten-steps",
    "chameleon-ten-steps",
    "chameleon-uncharged",
    "chameleon-chunked",
    "chunked",
    "sjf",
)


@dataclass(frozen=True)
class Row:
    """One figure: the paper's value, ours per seed, and the band of the mean."""

    figure: str
    paper: str
    values: Sequence[float]
    """Empty: a statement that holds or not."""
    band: tuple[float, float] | None = None
    unit: str = ""
    band_text: str = ""
    holds: bool | None = None
    """Whether we are inside; None: by the band, and without one the row is not judged."""

    def cells(self) -> list[str]:
        """Return the row as text."""
        inside = self.holds
        if inside is None and self.band is not None:
            inside = self.band[0] <= fmean(self.values) <= self.band[1]
        band = self.band_text or "–"
        if self.band is not None and not self.band_text:
            band = f"{_short(self.band[0])} to {_short(self.band[1])}"
        return [self.figure, self.paper, self._ours(), band, _said(inside)]

    def _ours(self) -> str:
        if not self.values:
            return _said(self.holds)
        low, high = _short(min(self.values)), _short(max(self.values))
        spread = f" ({low} to {high})" if low != high else ""
        return f"{_short(fmean(self.values))}{spread}{self.unit}"


def _said(holds: bool | None) -> str:
    return "–" if holds is None else "yes" if holds else "no"


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b if b else float("inf") for a, b in zip(above, below, strict=True)]


def _cuts(ours: Sequence[Numbers], theirs: Sequence[Numbers], key: str) -> list[float]:
    """Return the cut in percent per seed."""
    return [100.0 * (1.0 - a[key] / b[key]) for a, b in zip(ours, theirs, strict=True)]


def _all_of(numbers: Sequence[Numbers], key: str) -> list[float]:
    return [each[key] for each in numbers]


def knees(lab: Lab) -> Iterator[Row]:
    """Fig. 11: highest load within the SLO."""
    slora = lab.knees(BASELINE)
    yield Row("S-LoRA's knee, RPS (Fig. 11)", f"{SLORA_KNEE_RPS}", slora)
    for system, paper, band in (
        (CHAMELEON, "1.5", (1.25, 1.8)),
        ("no-sched", "1.2", (1.05, 1.4)),
        ("no-cache", "1.05", (1.0, 1.2)),
    ):
        yield Row(f"knee, {system} / S-LoRA (Fig. 11)", paper, _ratios(lab.knees(system), slora), band)


def variants(lab: Lab) -> Iterator[Row]:
    """Knees of further systems, and what all finish under overload; not judged."""
    slora = lab.knees(BASELINE)
    for system in VARIANTS:
        yield Row(f"knee, {system} / S-LoRA", "–", _ratios(lab.knees(system), slora))
    for system in (BASELINE, CHAMELEON, *VARIANTS):
        served = _all_of(lab.at(system, 2.0 * lab.knee()), "finished_rps")
        yield Row(f"requests finished at twice S-LoRA's knee, {system}", "–", served, unit=" RPS")


def bounds(lab: Lab) -> Iterator[Row]:
    """What bounds the knees: arithmetic of prompts and memory, not judged."""
    at_knee = {
        system: lab.occupancy(system, fmean(lab.knees(system)))
        for system in (BASELINE, CHAMELEON, "no-sched")
    }
    prompt_ms = _all_of(at_knee[BASELINE], "prompt_ms")
    yield Row("prefill of the mean prompt in a large batch", "–", prompt_ms, unit=" ms")
    share = [100.0 * each / 1e3 * 1.5 * lab.knee() for each in prompt_ms]
    yield Row("share of time that prompts take at 1.5 of S-LoRA's knee", "–", share, unit=" %")
    yield Row("memory, tokens", "–", [float(A40.pool())])
    yield Row("all adapters, tokens", "–", _all_of(at_knee[BASELINE], "adapter_tokens"))
    for system, found in at_knee.items():
        yield Row(f"mean KV at its knee, {system}, tokens", "–", _all_of(found, "kv_tokens"))


def cuts(lab: Lab) -> Iterator[Row]:
    """Figs. 11 and 13: TTFT at low, medium and high load."""
    for name, papers, bounds in (
        ("p99", (14.7, 24.6, 80.7), (5.0, 12.0, 55.0)),
        ("p50", (13.9, 20.9, 48.1), (3.0, 8.0, 25.0)),
    ):
        means = []
        for fraction, paper, least in zip(FRACTIONS, papers, bounds, strict=True):
            rps = fraction * lab.knee()
            found = _cuts(lab.at(CHAMELEON, rps), lab.at(BASELINE, rps), f"ttft_{name}_s")
            means.append(fmean(found))
            figure = f"{name.upper()} TTFT cut at {fraction:.2f} of S-LoRA's knee"
            yield Row(figure, f"{paper} %", found, (least, 100.0), " %", f"> {least:g} %")
        if name == "p99":
            yield _statement("P99 TTFT cut increases with load", means == sorted(means))


def gaps(lab: Lab) -> Iterator[Row]:
    """Fig. 12: time between tokens at low, medium and high load, of the whole run."""
    means: dict[str, list[float]] = {}
    for fraction in FRACTIONS:
        rps = fraction * lab.knee()
        for system, name in ((BASELINE, "S-LoRA"), (CHAMELEON, "Chameleon")):
            found = _all_of(lab.at(system, rps), "tbt_p99_ms")
            means.setdefault(system, []).append(fmean(found))
            yield Row(f"P99 TBT at {fraction:.2f} of S-LoRA's knee, {name} (Fig. 12)", "–", found, unit=" ms")
    lower = all(ours < theirs for ours, theirs in zip(means[CHAMELEON], means[BASELINE], strict=True))
    yield _statement("Chameleon's is lower at every load", lower)
    yield _statement(f"all are below {TBT_SLO_MS:g} ms", max(map(max, means.values())) < TBT_SLO_MS)


def loading(lab: Lab) -> Iterator[Row]:
    """Fig. 14: hits and loads on the critical path at medium load."""
    rps = _medium(lab)
    ours, slora = lab.at(CHAMELEON, rps), lab.at(BASELINE, rps)
    hits = [100.0 * rate for rate in _all_of(ours, "hit_rate")]
    yield Row("hit rate at medium load (Fig. 14)", "75 %", hits, (60.0, 90.0), " %")
    waits = {name: _all_of(found, "load_wait_ms_p99") for name, found in (("S-LoRA", slora), ("ours", ours))}
    yield Row("load on the critical path, P99, S-LoRA", "30 ms", waits["S-LoRA"], unit=" ms")
    yield Row("load on the critical path, P99, Chameleon", "6 ms", waits["ours"], unit=" ms")
    at_least = fmean(waits["S-LoRA"]) >= 3.0 * fmean(waits["ours"])
    yield _statement("the former is at least 3 times the latter", at_least)


def policies(lab: Lab) -> Iterator[Row]:
    """Fig. 17: eviction policies at medium load."""
    rps = _medium(lab)
    slora = lab.at(BASELINE, rps)
    means = []
    for system, paper in (("chameleon-lru", 18), ("chameleon-fairshare", 22), (CHAMELEON, 26)):
        found = _cuts(lab.at(system, rps), slora, "ttft_p99_s")
        means.append(fmean(found))
        yield Row(f"P99 TTFT cut over S-LoRA, {system} (Fig. 17)", f"{paper} %", found, unit=" %")
    yield _statement("LRU < FairShare < Chameleon", means[0] < means[1] < means[2])
    evictions = [float(count) for count in _all_of(lab.at(CHAMELEON, rps), "evictions")]
    yield Row("evictions in half an hour, Chameleon", "–", evictions)


def queueing(lab: Lab) -> Iterator[Row]:
    """Figs. 8 and 16: share of E2E spent queueing, by size, at high load."""
    rps = _high(lab)
    slora, sjf, ours = (lab.at(system, rps) for system in (BASELINE, "sjf", CHAMELEON))
    shares = {}
    for size, paper in (("small", "28.6 %"), ("large", "12 %")):
        shares[size] = [100.0 * each["queue_shares"][size] for each in slora]
        yield Row(f"queueing share of E2E, FIFO, {size} (Fig. 16)", paper, shares[size], unit=" %")
    yield _statement("FIFO: small above large", fmean(shares["small"]) > fmean(shares["large"]))
    worst = [100.0 * max(each["queue_shares"].values()) for each in ours]
    yield Row("queueing share, Chameleon, worst class", "< 8 %", worst, (0.0, 10.0), " %", "< 10 %")
    for size, paper in (("small", "1.5 s"), ("large", "5.15 s")):
        waits = [each["queue_s"][size] for each in sjf]
        yield Row(f"mean wait, SJF, {size} (Fig. 8)", paper, waits, unit=" s")


def predictors(lab: Lab) -> Iterator[Row]:
    """Fig. 19: accuracy of the predictor at medium load, with a burst at 300 s and every 600 s."""
    rps, mix = _medium(lab), "up-burst"
    growth = {}
    for name, systems in (
        ("", ("predictor-100", CHAMELEON, "predictor-60")),
        ("OutputOnly, ", ("output-only-100", "output-only", "output-only-60")),
    ):
        exact, *others = (lab.at(system, rps, mix) for system in systems)
        for accuracy, runs in zip((80, 60), others, strict=True):
            found = growth[name, accuracy] = [-cut for cut in _cuts(runs, exact, "ttft_p99_s")]
            judged = not name and accuracy == 80
            figure = f"{name}P99 TTFT, predictor {accuracy} % over 100 % (Fig. 19)"
            paper = "equal" if judged else "higher" if accuracy == 60 else "–"
            yield Row(figure, paper, found, (-10.0, 10.0) if judged else None, " %")
    more = fmean(growth["OutputOnly, ", 60]) > fmean(growth["", 60])
    yield _statement("60 %: OutputOnly is more sensitive", more)


def details(lab: Lab) -> Iterator[Row]:
    """Figs. 18 and 22: static queues at high load, histogram prefetch at medium load; squashes."""
    high, medium = _high(lab), _medium(lab)
    ours = lab.at(CHAMELEON, high)
    found = _cuts(ours, lab.at("static", high), "ttft_p99_s")
    yield Row("P99 TTFT cut over static queues, high load (Fig. 22)", "10 %", found, (3.0, 25.0), " %")
    found = _cuts(lab.at("chameleon-histogram", medium), lab.at(CHAMELEON, medium), "ttft_p99_s")
    yield Row("P99 TTFT cut by histogram prefetch, medium load (Fig. 18)", "8.8 %", found, (2.0, 15.0), " %")
    squashed = [100.0 * share for share in _all_of(ours, "squashed")]
    yield Row("squashed requests, high load (section 4.3.3)", "<= 5 %", squashed, (0.0, 5.0), " %", "<= 5 %")


def adapters(lab: Lab) -> Iterator[Row]:
    """Fig. 20: most adapters within the SLO at 9.5 / 8.6 of S-LoRA's knee."""
    rps = 9.5 / SLORA_KNEE_RPS * lab.knee()
    for mix, name, papers in (("up", "uniform", (10, 100)), ("pp", "power law", (10, 150))):
        most = []
        for system, paper in zip((BASELINE, CHAMELEON), papers, strict=True):
            held = [count for count in COUNTS if _p99_s(lab, system, rps, f"{mix}-{count}") <= SLO_S]
            most.append(max(held, default=0))
            yield Row(f"adapters within the SLO, {name}, {system} (Fig. 20)", f"{paper}", [most[-1]])
        yield _statement(f"{name}: at least 5 times as many", most[1] >= 5 * most[0] and most[1] > 0)


def traces(lab: Lab) -> Iterator[Row]:
    """Fig. 21: other lengths at 9.5 / 8.6 of S-LoRA's knee, those of LMSYS-Chat-1M by their means."""
    rps = 9.5 / SLORA_KNEE_RPS * lab.knee()
    for mix, name, slo_s in (("up", "Azure", SLO_S), (LMSYS, "LMSYS-Chat-1M", LMSYS_SLO_S)):
        slora, ours = (_all_of(lab.at(system, rps, mix), "ttft_p99_s") for system in (BASELINE, CHAMELEON))
        yield Row(
            f"P99 TTFT, {name}, S-LoRA (Fig. 21)",
            f"> {slo_s:g} s",
            slora,
            (slo_s, 1e9),
            " s",
            f"> {slo_s:g} s",
        )
        yield Row(
            f"P99 TTFT, {name}, Chameleon (Fig. 21)",
            f"< {slo_s:g} s",
            ours,
            (0.0, slo_s),
            " s",
            f"< {slo_s:g} s",
        )
        if mix == LMSYS:
            yield Row(f"P99 TTFT, {name}, S-LoRA / Chameleon (Fig. 21)", "4", _ratios(slora, ours))


def scale(lab: Lab) -> Iterator[Row]:
    """Figs. 23 and 24: A100 by memory and by model."""
    means = []
    for gib, paper in ((24.0, 1.4), (48.0, 1.6), (None, 1.9)):
        found = _knee_ratios(lab, "a100-7b", Platform(A100, memory_gib=gib))
        means.append(fmean(found))
        yield Row(f"knee ratio, A100 {gib or 80:g} GB, 7B (Fig. 24)", f"{paper}", found)
    yield _statement("knee ratio increases with memory", means == sorted(means))
    for size, paper in (("7b", 1.86), ("13b", 1.41), ("30b", 1.67)):
        found = _knee_ratios(lab, f"a100-{size}", Platform(A100, f"llama-{size}"))
        yield Row(f"knee ratio, A100 80 GB, {size} (Fig. 23)", f"{paper}", found, (1.2, 10.0), "", "> 1.2")


def models(lab: Lab) -> Iterator[Row]:
    """Fig. 23, left: P99 TTFT by model on the A100, over low, medium and high load."""
    for size, paper in (("7b", 60.0), ("13b", 61.3), ("30b", 59.3)):
        mix, platform = f"a100-{size}", Platform(A100, f"llama-{size}")
        cut = []
        for fraction in FRACTIONS:
            rps = fraction * lab.knee(mix, platform)
            ours, slora = (lab.at(system, rps, mix, platform) for system in (CHAMELEON, BASELINE))
            cut.append(_cuts(ours, slora, "ttft_p99_s"))
        found = [fmean(of_seed) for of_seed in zip(*cut, strict=True)]
        figure = f"P99 TTFT cut, A100 80 GB, {size}, mean of three loads (Fig. 23)"
        yield Row(figure, f"{paper} %", found, unit=" %")


def parallel(lab: Lab) -> Iterator[Row]:
    """Fig. 25: tensor parallelism at high load."""
    means = []
    for tp in (1, 2, 4):
        platform = Platform(A100, tp=tp)
        rps = FRACTIONS[2] * lab.knee("a100-7b", platform)
        ours, slora = (lab.at(system, rps, "a100-7b", platform) for system in (CHAMELEON, BASELINE))
        found = _cuts(ours, slora, "ttft_p99_s")
        means.append(fmean(found))
        paper = "95.8 %" if tp == 4 else "–"
        yield Row(f"P99 TTFT cut, TP {tp}, high load (Fig. 25)", paper, found, unit=" %")
    yield _statement("cut: TP 4 > TP 2 > TP 1", means[0] < means[1] < means[2])


def link(lab: Lab) -> Iterator[Row]:
    """Fig. 4: S-LoRA with 1, 50 and 500 adapters of rank 32 at medium load; Fig. 5: Llama-70B."""
    rps = _medium(lab)
    one = _all_of(lab.at(BASELINE, rps, "pcie-1"), "ttft_p99_s")
    for count, paper in ((50, 1.69), (500, 2.60)):
        found = _ratios(_all_of(lab.at(BASELINE, rps, f"pcie-{count}"), "ttft_p99_s"), one)
        band = (round(paper - 0.35, 2), round(paper + 0.35, 2))
        yield Row(f"P99 TTFT, LoRA-{count} / LoRA-1 (Fig. 4)", f"{paper}", found, band)
    shares = {(rank, tp): 100.0 * load_share(rank, tp) for rank in (8, 32, 128) for tp in (2, 4, 8)}
    for (rank, tp), share in shares.items():
        band, paper = ((53.0, 83.0), "68 %") if (rank, tp) == (32, 4) else (None, "–")
        yield Row(f"loading share of TTFT, 70B, rank {rank}, TP {tp} (Fig. 5)", paper, [share], band, " %")
    rising = all(shares[8, tp] < shares[32, tp] < shares[128, tp] for tp in (2, 4, 8))
    rising = rising and all(shares[rank, 2] < shares[rank, 4] < shares[rank, 8] for rank in (8, 32, 128))
    yield _statement("it rises with rank and TP", rising)


def starvation(lab: Lab) -> Iterator[Row]:
    """One hour at 0.95 of Chameleon's knee, and predictions that are always wrong."""
    rps = 0.95 * fmean(lab.knees(CHAMELEON))
    hour = [Case(CHAMELEON, rps, seed, horizon_s=3600.0) for seed in range(lab.seeds)]
    waits = _all_of(lab.measure(hour), "ttft_max_s")
    figure = "longest TTFT in an hour at 0.95 of Chameleon's knee"
    yield Row(figure, "bounded", waits, (0.0, 60.0), " s", "< 60 s")
    wrong = lab.at("predictor-0", _medium(lab))
    lost = [float(count) for count in _all_of(wrong, "rejected")]
    yield Row("requests lost, predictions always wrong", "0", lost, (0.0, 0.0), band_text="0")
    preempted = [float(count) for count in _all_of(wrong, "preemptions")]
    yield Row("preemptions, predictions always wrong", "–", preempted)


def _statement(figure: str, holds: bool) -> Row:
    return Row(figure, "yes", (), band_text="yes", holds=holds)


def _p99_s(lab: Lab, system: str, rps: float, mix: str) -> float:
    return fmean(_all_of(lab.at(system, rps, mix), "ttft_p99_s"))


def _knee_ratios(lab: Lab, mix: str, platform: Platform) -> list[float]:
    return _ratios(lab.knees(CHAMELEON, mix, platform), lab.knees(BASELINE, mix, platform))


def _medium(lab: Lab) -> float:
    return FRACTIONS[1] * lab.knee()


def _high(lab: Lab) -> float:
    return FRACTIONS[2] * lab.knee()


PARTS: Final[Mapping[str, Callable[[Lab], Iterator[Row]]]] = {
    each.__name__: each
    for each in (
        knees,
        bounds,
        cuts,
        gaps,
        loading,
        policies,
        queueing,
        predictors,
        details,
        adapters,
        traces,
        scale,
        models,
        parallel,
        link,
        starvation,
        variants,
    )
}
