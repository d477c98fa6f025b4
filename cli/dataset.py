"""`capplan dataset`: training data for surrogates, made by the twin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from capplan.cli.options import AsJson, KnownProfile, RayAddress, Workers, command
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.reports import Table, print_json, print_table

if TYPE_CHECKING:
    from capplan.models.training import DatasetResult, Manifest


@dataclass(frozen=True, kw_only=True)
class DatasetArgs:
    """Options of `capplan dataset generate`."""

    profile: KnownProfile
    output: str = typer.Option(
        ...,
        "--output",
        "-o",
        metavar="DIR",
        help="Where to write: a new folder, or one to continue or extend.",
    )
    design: str = typer.Option(
        "space-filling",
        metavar="NAME",
        help="Which scenarios: paper-grid, space-filling or near-starvation.",
    )
    scenarios: int = typer.Option(10_000, metavar="N", min=1, help="How many to draw.")
    seed: int = typer.Option(0, metavar="N", min=0, help="Same seed, same bytes.")
    duration_s: float = typer.Option(3600.0, "--duration", metavar="SECONDS", help="Simulated time of each.")
    workers: Workers = None
    ray_address: RayAddress = None
    as_json: AsJson = False


@command
def generate(args: DatasetArgs) -> None:
    """Simulate scenarios of one GPU, and write the results as training data.

    The same command continues a run that was interrupted, with the same bytes in the end.
    """
    from capplan.datasets import load_profile
    from capplan.twin.dataset import generate_dataset

    loaded = load_profile(args.profile)
    announce_compilation()
    with progress_bars(rate_of="scenarios") as on_progress:
        manifest = generate_dataset(
            args.output,
            loaded,
            design=args.design,
            scenarios=args.scenarios,
            seed=args.seed,
            duration_s=args.duration_s,
            workers=args.workers,
            ray_address=args.ray_address,
            progress=lambda done, total: on_progress("simulating", done, total),
        )
    if manifest.answered is None:
        raise AssertionError("a generated dataset is finished")
    if args.as_json:
        print_json({"directory": args.output, **manifest.model_dump(mode="json")})
    else:
        _print(manifest, manifest.answered)
        typer.echo(f"written to {args.output}")


def _print(manifest: Manifest, answered: DatasetResult) -> None:
    counts = {
        "scenarios": manifest.asked.scenarios,
        "rows": answered.rows,
        "without a row: refused for memory": answered.refused_for_memory,
        "without a row: no request came": answered.without_requests,
        "files": len(answered.shards),
    }
    rows = [(name, f"{count:,}") for name, count in counts.items()]
    print_table(Table(("dataset", manifest.asked.design), rows))
