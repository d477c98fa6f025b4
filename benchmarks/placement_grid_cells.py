"""The cells of section 8.4 of the adapter-caching paper: which workload goes on how many GPUs.

Printed there: the sets of rates and sizes, one and four GPUs, two models. Counts of adapters stand only on
the axes of its figures: up to 384 ours are the testing points of its algorithm, beyond in steps of 128 to the
1,280 that the text names. Every adapter draws its rate and its size from the sets at random; a cell has the
first of the 1,280 adapters that its sets drew, the same for both models and for any number of GPUs.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from capplan.errors import InputError
from capplan.spec import Adapter, EngineConfig, Workload
from capplan.twin.published_models import PUBLISHED, PublishedModel
from capplan.twin.published_runs import LENGTHS, MAX_NUM_SEQS, TOKEN_BUDGET

RATES_RPS: Final = MappingProxyType(
    {
        "high": (2.4, 1.2, 0.6, 0.3, 0.15),
        "low": (0.075, 0.0375, 0.01875, 0.009375, 0.0046875),
        "mixed": (0.6, 0.3, 0.15, 0.075, 0.0375),
    }
)
SIZES: Final = MappingProxyType({"high": (32,), "low": (8,), "mixed": (8, 16, 32)})
ADAPTERS: Final = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280)
GPUS: Final = (1, 4)
MODELS: Final = MappingProxyType({model.key.split("-")[0]: model for model in PUBLISHED})
CI: Final = (
    "llama.1gpu.mixed-rates.mixed-sizes.160",
    "llama.4gpu.low-rates.mixed-sizes.1280",
    "qwen.1gpu.low-rates.high-sizes.384",
    "qwen.4gpu.high-rates.low-sizes.96",
)
"""The subset that continuous integration runs."""


@dataclass(frozen=True)
class Cell:
    """One workload on so many GPUs."""

    model: str
    gpus: int
    rates: str
    sizes: str
    adapters: int

    @property
    def curve(self) -> str:
        """What it has in common with cells of more or fewer adapters."""
        return f"{self.model}.{self.gpus}gpu.{self.rates}-rates.{self.sizes}-sizes"

    @property
    def name(self) -> str:
        return f"{self.curve}.{self.adapters}"

    @property
    def published(self) -> PublishedModel:
        return MODELS[self.model]


@dataclass(frozen=True)
class Settings:
    """What all cells of a run have in common."""

    headroom: float = 0.0
    """The paper keeps none."""
    draw: int = 0
    """Which of many draws of rates and sizes."""
    max_num_seqs: int | None = MAX_NUM_SEQS
    """As the paper's servers had it; None leaves it to the planner."""
    seed: int = 0
    seeds: int = 5
    time_limit_s: float = 60.0


def cells(counts: Sequence[int] = ADAPTERS) -> Iterator[Cell]:
    """Yield all cells, small ones first within each curve."""
    for model, gpus, rates, sizes in itertools.product(MODELS, GPUS, RATES_RPS, SIZES):
        for count in counts:
            yield Cell(model, gpus, rates, sizes, count)


def chosen(pattern: str, counts: Sequence[int] = ADAPTERS) -> list[Cell]:
    """Return the cells whose names match a pattern, or one of several between commas; ``ci``: the subset.

    Raises
    ------
    InputError
        When there is none.
    """
    patterns = CI if pattern == "ci" else pattern.split(",")
    found = [cell for cell in cells(counts) if any(fnmatch.fnmatchcase(cell.name, each) for each in patterns)]
    if not found:
        rule = f"must match names of cells, such as {next(cells()).name}"
        raise InputError(rule, pattern, "--cells")
    return found


def workload(cell: Cell, settings: Settings) -> Workload:
    """Return the workload of a cell; lengths are those of the published runs of its model."""
    rates, sizes = RATES_RPS[cell.rates], SIZES[cell.sizes]
    sets = (list(RATES_RPS).index(cell.rates), list(SIZES).index(cell.sizes))
    random = np.random.default_rng((settings.draw, *sets))
    most = max(ADAPTERS[-1], cell.adapters)
    rate_rps, rank = random.choice(rates, most), random.choice(sizes, most)
    prompt, output = LENGTHS[cell.published.key]
    return Workload(
        base_model=cell.published.arch.hf_ids[0],
        profile=cell.published.profile,
        prompt_tokens=prompt,
        output_tokens=output,
        headroom=settings.headroom,
        engine=EngineConfig(max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=TOKEN_BUDGET),
        adapters=tuple(
            Adapter(name=f"a{i}", rank=int(rank[i]), rate_rps=float(rate_rps[i]))
            for i in range(cell.adapters)
        ),
    )
