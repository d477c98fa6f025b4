"""Regenerate the shipped H100 profiles with `capplan calibrate` from the published tables.

``python -m benchmarks.shipped_profiles REFERENCE_DIR OUT_DIR [GROUP...] [--workers N]`` writes one profile
JSON per model below OUT_DIR, fitted to the named groups of runs or to all. REFERENCE_DIR holds the published
tables, which `capplan.datasets.published` converts. With ``--keep-coefficients`` the profiles are the shipped
ones with the same coefficients; only ranges and uncertainties are computed, the latter by a new fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import command_line
from capplan import Profile, load_profile
from capplan.datasets.published import GROUPS, PROMPT_TOKENS, PUBLISHED, PublishedModel, write_tables
from capplan.models.calibration import fit_memory, read_steps
from capplan.models.calibration._step_model import step_ranges
from capplan.reproduce.twin._setting import base_profile, published_profile
from capplan.spec import write_text_atomic


def with_facts(profile: Profile, fresh: Profile, reference: Path, model: PublishedModel) -> Profile:
    """Return a profile with the ranges of the published tables, and the uncertainties of a fresh fit."""
    with TemporaryDirectory() as folder:
        write_tables(reference, model, Path(folder), GROUPS)
        table = read_steps(Path(folder) / "steps.parquet")
        memory = fit_memory(Path(folder) / "memory.csv", base_profile(model))
    prompts = {"prompt_tokens": (float(PROMPT_TOKENS[0]), float(PROMPT_TOKENS[1]))}
    ranges = {"step_latency": step_ranges(table) | prompts, "memory": memory.fitted_range}
    parts = {part: getattr(profile, part).replace(fitted_range=found) for part, found in ranges.items()}
    profile = profile.replace(**parts)
    uncertain = {
        part: getattr(profile, part).replace(uncertainty=getattr(fresh, part).uncertainty)
        for part in ("step_latency", "memory", "loading")
    }
    return profile.replace(**uncertain)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("reference", type=Path, metavar="REFERENCE_DIR")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("groups", nargs="*", metavar="GROUP")
    parser.add_argument("--workers", type=int, default=1, metavar="N")
    parser.add_argument("--keep-coefficients", action="store_true")
    arguments = parser.parse_args()
    for model in PUBLISHED:
        groups = tuple(arguments.groups) or GROUPS
        fresh = published_profile(arguments.reference, model, groups, arguments.workers)
        kept = load_profile(model.profile) if arguments.keep_coefficients else fresh
        profile = with_facts(kept, fresh, arguments.reference, model)
        path = arguments.out / f"{model.profile}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps(profile.model_dump(mode="json"), indent=2) + "\n")
        print(f"{path}: step SMAPE {profile.step_latency.fit.cross_validated_error:.2f} % on left-out runs")


if __name__ == "__main__":
    main()
