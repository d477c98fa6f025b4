"""`capplan train`: surrogates of a profile, from simulations to files that can be shipped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from capplan.cli.options import AsJson, HtmlFile, KnownProfile, RayAddress, command, fill, names
from capplan.cli.output import require_writable_files
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InputError
from capplan.reports import Table, number, percent, print_json, print_table

if TYPE_CHECKING:
    from capplan.models.training import Manifest, Trained, TrainingOptions
    from capplan.spec import Profile


_TABLE3: Final = "capplan reproduce twin table3"


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Options of `capplan train`."""

    profile: KnownProfile
    data: str | None = typer.Option(
        None,
        metavar="DIR",
        help="Folders of the datasets by design, generated if missing; default: in the cache.",
    )
    scenarios: int | None = typer.Option(None, metavar="N", min=1, help="Space-filling ones; default: 7000.")
    grid_scenarios: int | None = typer.Option(
        None, metavar="N", min=1, help="Of the paper's grid; default: 3000."
    )
    edge_scenarios: int | None = typer.Option(
        None, metavar="N", min=1, help="Near the edge of starvation; default: 10000."
    )
    seed: int = typer.Option(0, metavar="N", min=0, help="Same seed, same surrogates.")
    models: str | None = typer.Option(
        None, metavar="NAME[,NAME...]", help="Families: forest, xgboost; default: both."
    )
    kinds: str | None = typer.Option(
        None, metavar="KIND[,KIND...]", help="Surrogates to train: best, forest, tree; default: all."
    )
    budget: int = typer.Option(12, metavar="N", min=1, help="Settings tried for each family and task.")
    paper_space: bool = typer.Option(False, "--paper-space", help="Moved to capplan reproduce twin table3.")
    workers: int | None = typer.Option(
        None, metavar="N", min=1, help="Processes, then threads; default: one per core."
    )
    ray_address: RayAddress = None
    html: HtmlFile = None
    output: str | None = typer.Option(
        None,
        "--output",
        "-o",
        metavar="DIR",
        help="Write best.npz, forest.npz, tree.json there; default: where the profile's belong.",
    )
    as_json: AsJson = False


@command
def train(args: TrainArgs) -> None:
    """Simulate scenarios of one GPU, train surrogates on the results, and write them.

    The same command continues a run that was interrupted.
    """
    from capplan.datasets import load_profile
    from capplan.models.surrogates import HORIZON_S, profile_digest, surrogate_bytes
    from capplan.models.training import read_tables, train_surrogates
    from capplan.spec import write_bytes_atomic, write_text_atomic

    profile = load_profile(args.profile)
    wanted = fill(
        DataOptions,
        args,
        folder=None if args.data is None else Path(args.data),
        scenarios={
            "paper-grid": args.grid_scenarios,
            "space-filling": args.scenarios,
            "near-starvation": args.edge_scenarios,
        },
    )
    folder = data_folder(profile, wanted)
    journal = folder / f"search-seed{args.seed}.journal"
    options = _options(args, journal)
    files = _files(profile, args.output, options.kinds)
    if args.html is not None and args.kinds is not None:
        raise InputError("must be left out with --html, which compares all kinds", args.kinds, "--kinds")
    _require_places(files, args.html)
    data = datasets(profile, wanted)
    tables = read_tables(data, profile_digest=profile_digest(profile))
    require_writable_files(str(journal))
    if any(each.asked.duration_s != HORIZON_S for each in data.values()):
        typer.echo(f"some data is not of {HORIZON_S:,.0f} s, the horizon of surrogates", err=True)
    with progress_bars() as on_progress:
        trained = train_surrogates(profile, tables, options, on_progress)
    contents = {kind: surrogate_bytes(each) for kind, each in trained.surrogates.items()}
    sizes = {kind: len(content) for kind, content in contents.items()}
    for kind, path in files.items():
        _make_folder(path.parent)
        write_bytes_atomic(path, contents[kind])
    if args.html is not None:
        from capplan.reports.pages import training_page

        write_text_atomic(args.html, training_page(profile, list(data.values()), trained, sizes))
    if args.as_json:
        print_json(
            {
                "profile": profile.name,
                "data": {str(folder): each.model_dump(mode="json") for folder, each in data.items()},
                "files": {kind: {"path": str(files[kind]), "bytes": size} for kind, size in sizes.items()},
                "report": trained.report,
            }
        )
        return
    _print(trained)
    rows = [(kind, f"{sizes[kind]:,}", str(path)) for kind, path in files.items()]
    print_table(Table(("surrogate", "bytes", "written to"), rows, numbers_from=None))
    typer.echo(f"learned from {folder}" + (f", report in {args.html}" if args.html else ""))


def _options(args: TrainArgs, journal: Path) -> TrainingOptions:
    from capplan.models.surrogates import KINDS
    from capplan.models.training import FAMILIES, PAPER_FAMILIES, TrainingOptions
    from capplan.twin import cores

    if args.paper_space:
        raise InputError(f"the paper's grids are searched by {_TABLE3}", location="--paper-space")
    families = FAMILIES if args.models is None else names(args.models, "--models")
    for name in families:
        if name not in FAMILIES:
            more = f"; compared by {_TABLE3}" if name in PAPER_FAMILIES else ""
            raise InputError(f"must be of {', '.join(FAMILIES)}{more}", name, "--models")
    kinds = KINDS if args.kinds is None else names(args.kinds, "--kinds")
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(f"must be of {', '.join(KINDS)}", kind, "--kinds")
    n_jobs = args.workers or cores()
    return fill(TrainingOptions, args, families=families, kinds=kinds, n_jobs=n_jobs, storage=journal)


def _files(profile: Profile, output_dir: str | None, kinds: Iterable[str]) -> dict[str, Path]:
    from capplan.datasets import surrogate_path

    places = {kind: surrogate_path(profile.name, kind) for kind in kinds}
    if output_dir is None:
        return places
    return {kind: Path(output_dir) / f"{kind}{place.suffix}" for kind, place in places.items()}


def _require_places(files: Mapping[str, Path], report: str | None) -> None:
    """Check before the training that all files can be written; their folders are made afterwards."""
    for path in files.values():
        if path.parent.is_dir():
            require_writable_files(str(path))
            continue
        above = next(folder for folder in path.parents if folder.exists())
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            raise InputError("cannot be written: no folder can be made", location=str(path))
    require_writable_files(report)
    if report is not None and Path(report).resolve() in {path.resolve() for path in files.values()}:
        raise InputError("must be another file than a surrogate's", report, "--html")


def _make_folder(folder: Path) -> None:
    from capplan.spec import error_reason

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot be written: {error_reason(error)}", location=str(folder)) from None


def _print(trained: Trained) -> None:
    kinds: dict[str, Any] = trained.report["kinds"]
    shown = (
        ("throughput: SMAPE, %", "throughput_smape", lambda value: number(value, 2)),
        ("starvation: macro-F1", "starvation_macro_f1", lambda value: number(value, 3)),
        ("inside the interval", "interval_coverage", percent),
    )
    for title, measure, text in shown:
        rows = []
        for regime in next(iter(kinds.values()))["throughput_smape"]:
            values = [each[measure].get(regime) for each in kinds.values()]
            if values != [None] * len(values):
                rows.append((regime, *map(text, values)))
        print_table(Table((title, *kinds), rows))
    chosen = trained.report["chosen"]
    typer.echo(f"best: throughput by {chosen['throughput']}, starvation by {chosen['starvation']}")
    typer.echo("all on scenarios left out of the training of the answering model")


SCENARIOS: Final[tuple[tuple[str, int], ...]] = (
    ("paper-grid", 3_000),
    ("space-filling", 7_000),
    ("near-starvation", 10_000),
)
"""Default number of scenarios by design."""


@dataclass(frozen=True)
class DataOptions:
    """Options of the training data.

    `folder` holds a dataset of each design of `SCENARIOS`; None: a folder in the cache. `scenarios` are by
    design; None: the default, or as in an existing dataset.
    """

    folder: Path | None
    scenarios: Mapping[str, int | None]
    seed: int
    workers: int | None = None
    ray_address: str | None = None


def data_folder(profile: Profile, options: DataOptions) -> Path:
    """Return the folder of the data; in the cache, its name has a digest of everything it depends on."""
    if options.folder is not None:
        return options.folder
    import capplan
    from capplan._jit import cache_dir
    from capplan.models.surrogates import FEATURES, profile_digest

    key = "\0".join((profile_digest(profile), capplan.__version__, *FEATURES))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_dir().parent / "training" / f"{profile.name.replace('/', '_')}-{digest}-seed{options.seed}"


def datasets(profile: Profile, options: DataOptions) -> dict[Path, Manifest]:
    """Return the datasets by their folders, generated or completed if needed.

    Finished datasets in a folder of the user are taken as they are, unless a number of scenarios is given.
    """
    from capplan.models.training import MANIFEST, read_manifest

    folder = data_folder(profile, options)
    if (folder / MANIFEST).exists():
        names = ", ".join(design for design, _ in SCENARIOS)
        raise InputError(f"is a dataset itself; give the directory that holds {names}", location=str(folder))
    found = {design: read_manifest(folder / design) for design, _ in SCENARIOS}
    is_finished = all(each is not None and each.answered is not None for each in found.values())
    is_asked = any(number is not None for number in options.scenarios.values())
    if options.folder is None or is_asked or not is_finished:
        _make_folder(folder)
        # Existing datasets first: one that does not fit is reported before anything is simulated.
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
