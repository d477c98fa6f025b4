"""`capplan train`: surrogates for a profile, from twin runs to a file that can be shipped."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from capplan.cli.console import print_table, table
from capplan.cli.inputs import AsJson
from capplan.cli.output import require_writable_file
from capplan.cli.progress import announce_compilation, progress_bars


def train(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="Shipped profile or path of a profile JSON.")
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write; default: where the profile's is looked for.",
        ),
    ] = None,
    scenarios: Annotated[
        int, typer.Option("--scenarios", metavar="N", min=64, help="Twin runs to learn from.")
    ] = 4096,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Same seed, same surrogate.")] = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", min=1, help="Processes; default: one per core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate scenarios of one GPU, train the forests that the planner asks, and write them."""
    import json

    from capplan.datasets import load_profile, surrogate_path
    from capplan.models.learning.train import train_surrogate
    from capplan.models.surrogates.files import surrogate_bytes
    from capplan.spec import write_bytes_atomic
    from capplan.twin.dataset.old import generate_dataset

    loaded = load_profile(profile)
    path = output or str(surrogate_path(loaded.name, "forest"))
    if output is None:
        surrogate_path(loaded.name, "forest").parent.mkdir(parents=True, exist_ok=True)
    require_writable_file(path)
    announce_compilation()
    with progress_bars() as on_progress:
        data = generate_dataset(
            loaded,
            scenarios,
            seed=seed,
            workers=workers or os.cpu_count() or 1,
            progress=lambda done, total: on_progress("simulating", done, total),
        )
    surrogate = train_surrogate(loaded, data.features, data.throughput_tok_s, data.served_fraction, seed)
    write_bytes_atomic(path, surrogate_bytes(surrogate))
    if as_json:
        typer.echo(json.dumps(surrogate.report, indent=2))
        return
    rows = table("measure", "value", numbers_from=2)
    for name, value in surrogate.report.items():
        rows.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    print_table(rows)
    typer.echo(f"written to {path}")
