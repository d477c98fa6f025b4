"""Write the published measurements as input tables of `capplan calibrate`.

``python -m capplan.datasets.published REFERENCE_DIR OUT_DIR [GROUP...]`` writes steps.parquet, runs.csv,
memory.csv and loading.csv of each model below OUT_DIR. Groups of runs: dt_real_results and ml_test_dataset,
both by default.
"""

import argparse
import sys
from pathlib import Path

from capplan.datasets.published._runs import GROUPS, PUBLISHED, TABLES, write_tables


def main() -> None:
    """Write the tables of both models."""
    parser = argparse.ArgumentParser(prog="python -m capplan.datasets.published")
    parser.add_argument("reference", type=Path, metavar="REFERENCE_DIR")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("groups", nargs="*", metavar="GROUP")
    arguments = parser.parse_args()
    for model in PUBLISHED:
        folder = arguments.out / model.profile
        write_tables(arguments.reference, model, folder, tuple(arguments.groups) or GROUPS)
        sys.stdout.write(f"{folder}: {', '.join(TABLES)}\n")


if __name__ == "__main__":
    main()
