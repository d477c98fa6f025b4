"""How well the shipped surrogates predict the published runs, none of which they were trained on.

``python -m benchmarks.surrogate_fidelity REFERENCE_DIR`` prints a table; REFERENCE_DIR holds runs.csv.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from sklearn.metrics import f1_score

from benchmarks.fidelity_figures import markdown
from capplan import load_surrogate
from capplan.models.calibrate import smape
from capplan.twin.published_models import PUBLISHED
from capplan.twin.published_runs import MAX_NUM_SEQS, TOKEN_BUDGET, published_runs

HEADER = ("model", "n", "throughput", "of starved", "of not starved", "starvation macro-F1", "in range")


def rows(reference: Path) -> list[list[str]]:
    """Return one row per model."""
    table = []
    for model in PUBLISHED:
        surrogate = load_surrogate(model.profile)
        runs = published_runs(reference, model.key)
        answers = [
            surrogate.predict(
                run.workload,
                a_max=run.a_max,
                s_max=run.s_max,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=TOKEN_BUDGET,
            )
            for run in runs
        ]
        measured = np.array([run.throughput_tok_s for run in runs])
        predicted = np.array([answer.throughput_tok_s for answer in answers])
        starved = np.array([run.starved for run in runs])
        f1 = f1_score(starved, [answer.starved for answer in answers], average="macro")
        errors = [smape(predicted[kept], measured[kept]) for kept in (starved | True, starved, ~starved)]
        in_range = np.mean([answer.in_range for answer in answers])
        percents = [f"{error:.2f} %" for error in errors]
        table.append([model.arch.name, str(len(runs)), *percents, f"{f1:.3f}", f"{in_range:.1%}"])
    return table


if __name__ == "__main__":
    print(markdown(HEADER, rows(Path(sys.argv[1]))))
