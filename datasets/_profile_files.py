"""Profile files: the shipped ones by name, others by path."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Final

from capplan.datasets._catalog import known_arch, other_gpu, other_model
from capplan.errors import InputError
from capplan.spec import Profile, format_key, is_profile_path, parse_json, read_text, validate_document

_SHIPPED: Final = Path(__file__).parent / "profiles"
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_SURROGATES: Final = Path(__file__).parent / "surrogates"


def list_profiles() -> tuple[str, ...]:
    """Return the names of the shipped profiles, sorted: ``GPU/MODEL/ENGINE-VERSION``."""
    files = _SHIPPED.glob("*/*/*.json")
    return tuple(sorted(file.relative_to(_SHIPPED).as_posix().removesuffix(".json") for file in files))


def surrogate_path(profile_name: str, kind: str) -> Path:
    """Return the path of the surrogate of a profile, whether or not it exists.

    Raises
    ------
    InputError
        For a name that would lead out of the folder of surrogates.
    """
    if not _SAFE_NAME.fullmatch(profile_name):
        raise InputError(
            "must be words of letters, digits, . _ - between slashes", profile_name, "profile: name"
        )
    ending = "json" if kind == "tree" else "npz"
    return _SURROGATES / f"{profile_name}.{kind}.{ending}"


def profiles_with_surrogates() -> tuple[str, ...]:
    """Return the names of the shipped profiles whose surrogates ship, too."""
    return tuple(name for name in list_profiles() if surrogate_path(name, "tree").is_file())


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """Return a shipped profile, or one from a file.

    Parameters
    ----------
    name_or_path : str or path-like
        A name of :func:`list_profiles`, or the path of a profile JSON.

    Raises
    ------
    InputError
        For an unknown name, with the nearest shipped one; for a file that is unreadable, not JSON or
        against the schema, as ``FILE: key: rule (got VALUE)``.
    """
    name = os.fspath(name_or_path)
    if not is_profile_path(name):
        # One file is asked for: a list of all takes as long as a short simulation.
        if _SAFE_NAME.fullmatch(name) and _is_file(f"{_SHIPPED}/{name}.json"):
            return _read(_SHIPPED / f"{name}.json")
        if not _is_file(name):
            raise InputError(_unknown(name, list_profiles()), name, "profile")
    elif not _is_file(name):
        hint = "profile: give an existing file or a shipped name (`capplan profiles` lists them)"
        raise InputError(f"cannot be read: not a file; {hint}", location=name)
    return _read(Path(name))


def _read(path: Path) -> Profile:
    document = parse_json(read_text(path), str(path))
    profile = validate_document(
        Profile, document, lambda key: f"{path}: {format_key(key)}" if key else str(path)
    )
    if profile.model.max_positions is not None:
        return profile
    known = known_arch(profile.model.hf_ids)  # files of earlier versions do not hold the positions
    positions = None if known is None else known.max_positions
    return profile.replace(model=profile.model.replace(max_positions=positions))


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a path, or with a null byte: then it is no file
        return False


def _unknown(name: str, shipped: tuple[str, ...]) -> str:
    rule = "must be the path of a profile JSON or the name of a shipped profile"
    if not shipped:
        return rule
    gpu, _, rest = name.lower().partition("/")
    models = {each.split("/")[1] for each in shipped if each.startswith(f"{gpu}/")}
    if rest and not models:
        gpus = dict.fromkeys(each.split("/")[0] for each in shipped)
        return f"{rule}, which are of {', '.join(gpus)}; {other_gpu(gpu)}"
    if rest and (model := rest.split("/")[0]) not in models:
        near = difflib.get_close_matches(model, models, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{rule}, those of {gpu} for {', '.join(sorted(models))}; {hint}{other_model(gpu)}"
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{rule}; {hint}`capplan profiles` lists all {len(shipped)}"
