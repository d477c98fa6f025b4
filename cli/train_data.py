"""Where `capplan train` takes its data from: two folders of datasets, made unless they are there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.models.learning.manifest import Manifest
    from capplan.spec import Profile

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
    from capplan.models.surrogates.documents import profile_digest
    from capplan.models.surrogates.features import FEATURES

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
    from capplan.models.learning.manifest import MANIFEST, read_manifest
    from capplan.spec.files import reason

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
            raise InputError(f"cannot be written: {reason(error)}", location=str(folder)) from None
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
