"""Rows of the table: each figure of the paper, simulated, with its band."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from benchmarks.chameleon.lab import BASELINE, Lab
from benchmarks.chameleon.loading import load_share
from benchmarks.chameleon.runs import Case, Numbers
from benchmarks.chameleon.setting import SLO_S, SLORA_KNEE_RPS, Platform

FRACTIONS: Final = (0.70, 0.93, 1.05)
"""Low, medium and high load over S-LoRA's knee (6, 8 and 9 RPS over 8.6)."""
CHAMELEON: Final = "chameleon"
A100: Final = "a100-80g"


@dataclass(frozen=True)
class Row:
    """One figure: the paper's value, ours per seed, and whether the mean is inside the band."""

    figure: str
    paper: str
    values: Sequence[float]
    band: tuple[float, float] | None
    inside: bool | None = None
    """None: as the band says."""
    unit: str = ""
    band_text: str = ""

    def cells(self) -> list[str]:
        """Return the row as text."""
        mean = fmean(self.values)
        low, high = self.band or (0.0, 0.0)
        inside = low <= mean <= high if self.inside is None else self.inside
        band = self.band_text or f"{_short(low)} to {_short(high)}"
        spread = (
            f" ({_short(min(self.values))} to {_short(max(self.values))})" if len(self.values) > 1 else ""
        )
        return [
            self.figure,
            self.paper,
            f"{_short(mean)}{spread}{self.unit}",
            band,
            "yes" if inside else "no",
        ]


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


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
    yield Row("S-LoRA's knee, RPS (Fig. 11)", f"{SLORA_KNEE_RPS}", slora, None, True, band_text="settled")
    for system, paper, band in (
        (CHAMELEON, "1.5", (1.25, 1.8)),
        ("no-sched", "1.2", (1.05, 1.4)),
        ("no-cache", "1.05", (1.0, 1.2)),
    ):
        yield Row(f"knee, {system} / S-LoRA (Fig. 11)", paper, _ratios(lab.knees(system), slora), band)


def variants(lab: Lab) -> Iterator[Row]:
    """Knees of systems that the paper has no figure for."""
    slora = lab.knees(BASELINE)
    for system in (
        "slora-every-step",
        "no-sched-ten-steps",
        "chameleon-ten-steps",
        "chameleon-uncharged",
        "chameleon-chunked",
        "chunked",
        "sjf",
    ):
        yield Row(
            f"knee, {system} / S-LoRA", "–", _ratios(lab.knees(system), slora), None, True, band_text="–"
        )


def cuts(lab: Lab) -> Iterator[Row]:
    """Figs. 11 and 13: TTFT at low, medium and high load."""
    for name, key, papers, bounds in (
        ("P99", "ttft_p99_s", (14.7, 24.6, 80.7), (5.0, 12.0, 55.0)),
        ("P50", "ttft_p50_s", (13.9, 20.9, 48.1), (3.0, 8.0, 25.0)),
    ):
        means = []
        for fraction, paper, least in zip(FRACTIONS, papers, bounds, strict=True):
            rps = fraction * lab.knee()
            found = _cuts(lab.at(CHAMELEON, rps), lab.at(BASELINE, rps), key)
            means.append(fmean(found))
            figure = f"{name} TTFT cut at {fraction:.2f} of S-LoRA's knee"
            yield Row(figure, f"{paper} %", found, (least, 100.0), unit=" %", band_text=f"> {least:g} %")
        if name == "P99":
            rising = means == sorted(means)
            yield Row(
                "P99 TTFT cut increases with load", "yes", [float(rising)], None, rising, band_text="yes"
            )


def loading(lab: Lab) -> Iterator[Row]:
    """Fig. 14: hits and loads on the critical path at medium load."""
    rps = _medium(lab)
    ours, slora = lab.at(CHAMELEON, rps), lab.at(BASELINE, rps)
    hits = [100.0 * rate for rate in _all_of(ours, "hit_rate")]
    yield Row("hit rate at medium load (Fig. 14)", "75 %", hits, (60.0, 90.0), unit=" %")
    both = _all_of(slora, "load_wait_ms_p99"), _all_of(ours, "load_wait_ms_p99")
    text = (
        f"load on the critical path, P99, S-LoRA {fmean(both[0]):.3g} ms / Chameleon {fmean(both[1]):.3g} ms"
    )
    yield Row(text, "30 / 6 ms", _ratios(*both), (3.0, float("inf")), band_text=">= 3")


def policies(lab: Lab) -> Iterator[Row]:
    """Fig. 17: eviction policies at medium load."""
    rps = _medium(lab)
    slora = lab.at(BASELINE, rps)
    means = []
    for system, paper in (("chameleon-lru", 18), ("chameleon-fairshare", 22), (CHAMELEON, 26)):
        found = _cuts(lab.at(system, rps), slora, "ttft_p99_s")
        means.append(fmean(found))
        yield Row(f"P99 TTFT cut, {system} (Fig. 17)", f"{paper} %", found, None, True, " %", "order")
    ordered = means[0] < means[1] < means[2]
    yield Row("LRU < FairShare < Chameleon", "yes", [float(ordered)], None, ordered, band_text="yes")


def queueing(lab: Lab) -> Iterator[Row]:
    """Figs. 8 and 16: share of E2E spent queueing, by size, at high load."""
    rps = _high(lab)
    slora, sjf, ours = (lab.at(system, rps) for system in (BASELINE, "sjf", CHAMELEON))
    small = [100.0 * each["queue_shares"]["small"] for each in slora]
    large = [100.0 * each["queue_shares"]["large"] for each in slora]
    yield Row("queueing share, FIFO, small (Fig. 16)", "28.6 %", small, None, True, " %", "order")
    ordered = fmean(small) > fmean(large)
    yield Row("queueing share, FIFO, large", "12 %", large, None, ordered, " %", "below small")
    worst = [100.0 * max(each["queue_shares"].values()) for each in ours]
    yield Row(
        "queueing share, Chameleon, worst class", "< 8 %", worst, (0.0, 10.0), unit=" %", band_text="< 10 %"
    )
    waits = [[each["queue_s"][name] for each in sjf] for name in ("large", "small")]
    text = f"wait, SJF, large {fmean(waits[0]):.3g} s / small {fmean(waits[1]):.3g} s (Fig. 8)"
    yield Row(text, "5.15 / 1.5 s", _ratios(*waits), (1.0, float("inf")), band_text="order")


def predictors(lab: Lab) -> Iterator[Row]:
    """Fig. 19: accuracy of the predictor at medium load with a burst at 300 s."""
    rps, mix = _medium(lab), "up-burst"
    exact = lab.at("predictor-100", rps, mix)
    for system, paper, band in ((CHAMELEON, "equal", (-10.0, 10.0)), ("predictor-60", "worse", None)):
        found = [-cut for cut in _cuts(lab.at(system, rps, mix), exact, "ttft_p99_s")]
        accuracy = 80 if system == CHAMELEON else 60
        figure = f"P99 TTFT, predictor {accuracy} % against 100 % (Fig. 19)"
        yield Row(figure, paper, found, band, None if band else True, " %", "" if band else "–")


def details(lab: Lab) -> Iterator[Row]:
    """Figs. 18 and 22: static queues at high load, histogram prefetch at medium load; squashes."""
    high, medium = _high(lab), _medium(lab)
    found = _cuts(lab.at(CHAMELEON, high), lab.at("static", high), "ttft_p99_s")
    yield Row("P99 TTFT cut over static queues, high load (Fig. 22)", "10 %", found, (3.0, 25.0), unit=" %")
    ours = lab.at(CHAMELEON, medium)
    found = _cuts(lab.at("chameleon-histogram", medium), ours, "ttft_p99_s")
    yield Row(
        "P99 TTFT cut by histogram prefetch, medium load (Fig. 18)", "8.8 %", found, (2.0, 15.0), unit=" %"
    )
    squashed = [100.0 * share for share in _all_of(lab.at(CHAMELEON, high), "squashed")]
    yield Row("squashed requests, high load (4.3.3)", "<= 5 %", squashed, (0.0, 5.0), unit=" %")


def adapters(lab: Lab) -> Iterator[Row]:
    """Fig. 20: most adapters within the SLO at 9.5 RPS of the paper."""
    rps = 9.5 / SLORA_KNEE_RPS * lab.knee()
    most = {}
    for system in (CHAMELEON, BASELINE):
        for mix in ("up", "pp"):
            held = [
                count
                for count in (10, 50, 100, 150, 200)
                if fmean(_all_of(lab.at(system, rps, f"{mix}-{count}"), "ttft_p99_s")) <= SLO_S
            ]
            most[system, mix] = max(held, default=0)
    for mix, name, paper in (("up", "uniform", 100), ("pp", "power law", 150)):
        ours, slora = most[CHAMELEON, mix], most[BASELINE, mix]
        text = f"adapters within the SLO at 1.10 of S-LoRA's knee, {name}: S-LoRA {slora}, Chameleon"
        yield Row(text, f"10, {paper}", [ours], None, ours >= 5 * slora and ours > 0, band_text=">= 5 x")


def scale(lab: Lab) -> Iterator[Row]:
    """Figs. 23 and 24: A100 by memory and by model."""
    means = []
    for gib, paper in ((24.0, 1.4), (48.0, 1.6), (None, 1.9)):
        found = _knee_ratios(lab, "a100-7b", Platform(A100, memory_gib=gib))
        means.append(fmean(found))
        yield Row(
            f"knee ratio, A100 {gib or 80:g} GB, 7B, 500 adapters (Fig. 24)",
            f"{paper}",
            found,
            None,
            True,
            "",
            "–",
        )
    rising = means == sorted(means)
    yield Row("knee ratio increases with memory", "yes", [float(rising)], None, rising, band_text="yes")
    for size, paper in (("7b", 1.86), ("13b", 1.41), ("30b", 1.67)):
        found = _knee_ratios(lab, f"a100-{size}", Platform(A100, f"llama-{size}"))
        yield Row(
            f"knee ratio, A100 80 GB, {size} (Fig. 23)", f"{paper}", found, (1.2, 10.0), band_text="> 1.2"
        )


def parallel(lab: Lab) -> Iterator[Row]:
    """Fig. 25: tensor parallelism at high load."""
    means = []
    for tp in (1, 2, 4):
        platform = Platform(A100, tp=tp)
        rps = FRACTIONS[2] * lab.knee("a100-7b", platform)
        found = _cuts(
            lab.at(CHAMELEON, rps, "a100-7b", platform),
            lab.at(BASELINE, rps, "a100-7b", platform),
            "ttft_p99_s",
        )
        means.append(fmean(found))
        yield Row(
            f"P99 TTFT cut, TP {tp}, high load (Fig. 25)",
            "95.8 %" if tp == 4 else "–",
            found,
            None,
            True,
            " %",
            "–",
        )
    rising = means[0] < means[1] < means[2]
    yield Row("cut: TP 4 > TP 2 > TP 1", "yes", [float(rising)], None, rising, band_text="yes")


def link(lab: Lab) -> Iterator[Row]:
    """Fig. 4: S-LoRA with 1, 50 and 500 adapters of rank 32 at 8 RPS of the paper; Fig. 5: 70B."""
    rps = _medium(lab)
    one = lab.at(BASELINE, rps, "pcie-1")
    for count, paper in ((50, 1.69), (500, 2.60)):
        many = lab.at(BASELINE, rps, f"pcie-{count}")
        found = _ratios(_all_of(many, "ttft_p99_s"), _all_of(one, "ttft_p99_s"))
        yield Row(
            f"P99 TTFT, LoRA-{count} / LoRA-1 (Fig. 4)", f"{paper}", found, (paper - 0.35, paper + 0.35)
        )
    for tp in (2, 4, 8):
        for rank in (8, 32, 128):
            found = [100.0 * load_share(rank, tp)]
            ours = rank == 32 and tp == 4
            yield Row(
                f"loading share of TTFT, 70B, rank {rank}, TP {tp} (Fig. 5)",
                "68 %" if ours else "rising",
                found,
                (53.0, 83.0) if ours else None,
                None if ours else True,
                " %",
                "" if ours else "–",
            )


def starvation(lab: Lab) -> Iterator[Row]:
    """One hour at 0.95 of Chameleon's knee, and predictions that are always wrong."""
    rps = 0.95 * fmean(lab.knees(CHAMELEON))
    hour = [Case(CHAMELEON, rps, seed, horizon_s=3600.0) for seed in range(lab.seeds)]
    waits = _all_of(lab.measure(hour), "ttft_max_s")
    yield Row(
        "longest TTFT in an hour at 0.95 of Chameleon's knee",
        "bounded",
        waits,
        (0.0, 60.0),
        unit=" s",
        band_text="< 60 s",
    )
    wrong = lab.at("predictor-0", _medium(lab))
    lost = [float(each["rejected"]) for each in wrong]
    yield Row("requests lost, predictions always wrong", "0", lost, (0.0, 0.0), band_text="0")


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
        cuts,
        loading,
        policies,
        queueing,
        predictors,
        details,
        adapters,
        scale,
        parallel,
        link,
        starvation,
        variants,
    )
}
