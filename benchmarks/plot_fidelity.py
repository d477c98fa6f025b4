"""Draw predicted against measured throughput and inter-token latency of the published runs.

``python -m benchmarks.plot_fidelity REFERENCE_DIR docs/img/fidelity.png``
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from benchmarks.fidelity import Options, shipped
from benchmarks.fidelity_figures import Prediction

COLOURS = {"kept up": "#1b6ca8", "starved": "#d1495b"}


def main(reference: Path, picture: Path) -> None:
    """Simulate every run once and write the picture."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 8), constrained_layout=True)
    for row, comparison in zip(axes, shipped(Options(reference)), strict=True):
        name, predictions = comparison.model.arch.name, comparison.predictions
        _panel(row[0], name, "throughput, tok/s", [_throughput(p) for p in predictions])
        reliable = [p for p in predictions if p.run.itl_is_reliable]
        _panel(row[1], name, "mean inter-token latency, ms", [_itl(p) for p in reliable])
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def _throughput(prediction: Prediction) -> tuple[float, float, bool]:
    return prediction.run.throughput_tok_s, prediction.throughput_tok_s, prediction.run.starved


def _itl(prediction: Prediction) -> tuple[float, float, bool]:
    return prediction.run.itl_ms_mean, prediction.itl_ms_mean, prediction.run.starved


def _panel(axes: plt.Axes, model: str, what: str, points: list[tuple[float, float, bool]]) -> None:
    for starved, name in ((False, "kept up"), (True, "starved")):
        chosen = [
            (measured, predicted) for measured, predicted, is_starved in points if is_starved is starved
        ]
        axes.scatter(
            *zip(*chosen, strict=True), s=9, alpha=0.6, color=COLOURS[name], label=name, linewidths=0
        )
    low, high = min(p[0] for p in points), max(p[0] for p in points)
    axes.plot([low, high], [low, high], color="#333333", linewidth=0.8)
    axes.set(
        xscale="log", yscale="log", xlabel=f"measured {what}", ylabel="predicted", title=f"{model}: {what}"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
