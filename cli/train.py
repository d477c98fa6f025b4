"""`capplan train`: surrogates of a profile, from twin runs to files that can be shipped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from capplan.cli.console import number, percent, print_json, print_table, table
from capplan.cli.options import AsJson, command
from capplan.cli.output import require_writable_file
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from capplan.models.training.data import Manifest
    from capplan.models.training.model_selection import TrainingOptions
    from capplan.models.training.train import Trained
    from capplan.spec import Profile


_TABLE3: Final = "python -m benchmarks.surrogate_table3"


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Options of `capplan train`."""

    profile: str = typer.Argument(..., metavar="PROFILE", help="Shipped profile or path of a profile JSON.")
    data: str | None = typer.Option(
        None,
        metavar="DIR",
        help="Data: folders paper-grid and space-filling, made if missing; default: in the cache.",
    )
    scenarios: int | None = typer.Option(None, metavar="N", min=1, help="Space-filling ones; default: 7000.")
    grid_scenarios: int | None = typer.Option(
        None, metavar="N", min=1, help="Of the paper's grid; default: 3000."
    )
    seed: int = typer.Option(0, metavar="N", min=0, help="Same seed, same surrogates.")
    models: str | None = typer.Option(
        None, metavar="NAME[,NAME...]", help="Families: forest, xgboost; default: both."
    )
    budget: int = typer.Option(12, metavar="N", min=1, help="Settings tried for each family and task.")
    paper_space: bool = typer.Option(
        False, "--paper-space", help="Moved to python -m benchmarks.surrogate_table3."
    )
    workers: int | None = typer.Option(
        None, metavar="N", min=1, help="Processes, then threads; default: one per core."
    )
    ray_address: str | None = typer.Option(
        None, metavar="ADDRESS", help="Simulate on this Ray cluster instead."
    )
    report: str | None = typer.Option(None, metavar="FILE", help="Write a report as one HTML file.")
    output_dir: str | None = typer.Option(
        None,
        metavar="DIR",
        help="Write best.npz, forest.npz, tree.json there; default: where the profile's belong.",
    )
    as_json: AsJson = False


@command
def train(args: TrainArgs) -> None:
    """Simulate scenarios of one GPU, train surrogates on the results, and write the best ones.

    A run that was killed is continued by the same command.
    """
    from capplan.datasets import load_profile
    from capplan.models.surrogates.features import HORIZON_S
    from capplan.models.surrogates.files import profile_digest, surrogate_bytes
    from capplan.models.training.data import read_tables
    from capplan.models.training.train import train_surrogates

    loaded = load_profile(args.profile)
    asked = DataOptions(
        folder=None if args.data is None else Path(args.data),
        scenarios={"paper-grid": args.grid_scenarios, "space-filling": args.scenarios},
        seed=args.seed,
        workers=args.workers,
        ray_address=args.ray_address,
    )
    journal = data_folder(loaded, asked) / f"search-seed{args.seed}.journal"
    options = _options(args.models, args.budget, args.paper_space, args.seed, args.workers, journal)
    files = _files(loaded, args.output_dir)
    _require_places(files, args.report)
    found = datasets(loaded, asked)
    known = read_tables(found, profile_digest=profile_digest(loaded))
    require_writable_file(str(journal))
    if any(each.asked.duration_s != HORIZON_S for each in found.values()):
        typer.echo(f"some of the data is not of {HORIZON_S:,.0f} s, which surrogates answer about", err=True)
    with progress_bars() as on_progress:
        trained = train_surrogates(loaded, known, options, on_progress)
    contents = {kind: surrogate_bytes(each) for kind, each in trained.surrogates.items()}
    sizes = {kind: len(content) for kind, content in contents.items()}
    page = None
    if args.report is not None:
        from capplan.cli.report.training import training_page

        page = training_page(loaded, list(found.values()), trained, sizes)
    _write(files, contents, args.report, page)
    if args.as_json:
        print_json(
            {
                "profile": loaded.name,
                "data": {str(folder): each.model_dump(mode="json") for folder, each in found.items()},
                "files": {kind: {"path": str(files[kind]), "bytes": size} for kind, size in sizes.items()},
                "report": trained.report,
            }
        )
        return
    _print(trained)
    _print_files(files, sizes)
    typer.echo(
        f"learned from {data_folder(loaded, asked)}" + (f", report in {args.report}" if args.report else "")
    )


def _options(
    models: str | None, budget: int, paper_space: bool, seed: int, workers: int | None, journal: Path
) -> TrainingOptions:
    from capplan.models.training.candidates import FAMILIES, PAPER_FAMILIES
    from capplan.models.training.model_selection import TrainingOptions
    from capplan.twin.sweep import cores

    if paper_space:
        raise InputError(f"the paper's grids are searched by {_TABLE3}", location="--paper-space")
    families = FAMILIES if models is None else tuple(name.strip() for name in models.split(","))
    for name in families:
        if name in PAPER_FAMILIES:
            raise InputError(f"must be of {', '.join(FAMILIES)}; compared by {_TABLE3}", name, "--models")
        if name not in FAMILIES:
            raise InputError(f"must be of {', '.join(FAMILIES)}", name, "--models")
    return TrainingOptions(
        families=families,
        budget=budget,
        seed=seed,
        n_jobs=workers or cores(),
        storage=journal,
    )


def _files(profile: Profile, output_dir: str | None) -> dict[str, Path]:
    """Return where each kind goes."""
    from capplan.datasets import surrogate_path
    from capplan.models.surrogates.files import KINDS

    places = {kind: surrogate_path(profile.name, kind) for kind in KINDS}
    if output_dir is None:
        return places
    return {kind: Path(output_dir) / f"{kind}{place.suffix}" for kind, place in places.items()}


def _require_places(files: Mapping[str, Path], report: str | None) -> None:
    """Check that all can be written before hours of work; folders are made when something goes into them."""
    for path in files.values():
        if path.parent.is_dir():
            require_writable_file(str(path))
            continue
        above = next(folder for folder in path.parents if folder.exists())
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            raise InputError("cannot be written: no folder can be made", location=str(path))
    if report is not None:
        require_writable_file(report)
        if Path(report).resolve() in {path.resolve() for path in files.values()}:
            raise InputError("must be another file than a surrogate's", report, "--report")


def _write(
    files: Mapping[str, Path], contents: Mapping[str, bytes], report: str | None, page: str | None
) -> None:
    from capplan.spec import write_bytes_atomic, write_text_atomic
    from capplan.spec.files import error_reason

    for kind, path in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot be written: {error_reason(error)}", location=str(path)) from None
        write_bytes_atomic(path, contents[kind])
    if report is not None and page is not None:
        write_text_atomic(report, page)


def _print(trained: Trained) -> None:
    kinds: dict[str, Any] = trained.report["kinds"]
    shown = (
        ("throughput: SMAPE, %", "throughput_smape", lambda value: number(value, 2)),
        ("starvation: macro-F1", "starvation_macro_f1", lambda value: number(value, 3)),
        ("inside the interval", "interval_coverage", percent),
    )
    for title, measure, text in shown:
        rows = table(title, *kinds, numbers_from=1)
        for regime in next(iter(kinds.values()))["throughput_smape"]:
            values = [each[measure].get(regime) for each in kinds.values()]
            if values != [None] * len(values):
                rows.add_row(regime, *(text(value) for value in values))
        print_table(rows)
    chosen = trained.report["chosen"]
    typer.echo(f"best: throughput by {chosen['throughput']}, starvation by {chosen['starvation']}")
    typer.echo("all on scenarios that the answering model had not learned from")


def _print_files(files: Mapping[str, Path], sizes: Mapping[str, int]) -> None:
    rows = table("surrogate", "bytes", "written to")
    for kind, path in files.items():
        rows.add_row(kind, f"{sizes[kind]:,}", str(path))
    print_table(rows)


SCENARIOS: Final[tuple[tuple[str, int], ...]] = (("paper-grid", 3_000), ("space-filling", 7_000))
"""What is learned from unless more or less is asked for."""


@dataclass(frozen=True)
class DataOptions:
    """What the command line says of the data.

    Attributes
    ----------
    folder
        Whose folders ``paper-grid`` and ``space-filling`` are the datasets; None: one in the cache.
    scenarios
        How many are asked for, by design; None where nothing is.
    seed
        Of data that is made.
    workers, ray_address
        As for `capplan.twin.sweep.in_parallel`.
    """

    folder: Path | None
    scenarios: Mapping[str, int | None]
    seed: int
    workers: int | None = None
    ray_address: str | None = None


def data_folder(profile: Profile, options: DataOptions) -> Path:
    """Return the folder of the data, whether or not it is there.

    In the cache it is named after all that the data depends on, so that none of another version is taken.
    """
    if options.folder is not None:
        return options.folder
    import capplan
    from capplan.compile import cache_dir
    from capplan.models.surrogates.features import FEATURES
    from capplan.models.surrogates.files import profile_digest

    told = "\0".join((profile_digest(profile), capplan.__version__, *FEATURES))
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    return cache_dir().parent / "training" / f"{profile.name.replace('/', '_')}-{digest}-seed{options.seed}"


def datasets(profile: Profile, options: DataOptions) -> dict[Path, Manifest]:
    """Return the datasets to learn from by their folders, made or completed first where need be.

    Datasets in a folder that the user gave are taken as they are if they are finished, and no number of
    scenarios was asked for.

    Raises
    ------
    InputError
        For a folder that cannot be used, or that holds data of another question.
    """
    from capplan.models.training.data import MANIFEST, read_manifest
    from capplan.spec.files import error_reason

    folder = data_folder(profile, options)
    if (folder / MANIFEST).exists():
        names = " and ".join(design for design, _ in SCENARIOS)
        raise InputError(f"is a dataset itself; give the directory that holds {names}", location=str(folder))
    found = {design: read_manifest(folder / design) for design, _ in SCENARIOS}
    is_finished = all(each is not None and each.answered is not None for each in found.values())
    is_asked = any(number is not None for number in options.scenarios.values())
    if options.folder is None or is_asked or not is_finished:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise InputError(f"cannot be written: {error_reason(error)}", location=str(folder)) from None
        # What is there comes first: if it does not fit, that is said before anything is simulated.
        for design in sorted(found, key=lambda each: found[each] is None):
            found[design] = _made(folder / design, design, profile, options)
    return {folder / design: each for design, each in found.items() if each is not None}


def _made(folder: Path, design: str, profile: Profile, options: DataOptions) -> Manifest:
    from capplan.twin.dataset import generate_dataset

    announce_compilation()
    with progress_bars(rate_of="scenarios") as on_progress:
        return generate_dataset(
            folder,
            profile,
            design=design,
            scenarios=options.scenarios[design] or dict(SCENARIOS)[design],
            seed=options.seed,
            workers=options.workers,
            ray_address=options.ray_address,
            progress=lambda done, total: on_progress(f"simulating {design}", done, total),
        )
