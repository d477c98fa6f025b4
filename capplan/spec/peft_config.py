"""Reader of PEFT's ``adapter_config.json`` for planning: the layers that an adapter targets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from capplan.errors import InputError
from capplan.spec.files import read_json_object
from capplan.spec.lora_modules import ADAPTER_CONFIG, ALL_LINEAR, LORA_MODULES


def read_target_modules(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the targeted modules of an adapter in a PEFT folder, from its ``adapter_config.json``.

    ``target_modules`` there is a list of names or of ends of names, a regular expression that whole names
    match, or all-linear.

    Raises
    ------
    InputError
        If the file is unreadable, or targets no linear layer or another one.
    """
    file = Path(folder) / ADAPTER_CONFIG
    wanted = read_json_object(file).get("target_modules")
    location = f"{file}: target_modules"
    if wanted == ALL_LINEAR:
        return LORA_MODULES
    if isinstance(wanted, str):
        found = _matching(wanted, location)
    elif isinstance(wanted, Sequence) and all(isinstance(name, str) for name in wanted):
        ends = [name.rsplit(".", maxsplit=1)[-1] for name in wanted]
        for end in ends:
            if end not in LORA_MODULES:
                raise InputError(f"must be among {', '.join(LORA_MODULES)}", end, location)
        found = tuple(name for name in LORA_MODULES if name in ends)
    else:
        raise InputError("must be a list of names, a regular expression or all-linear", wanted, location)
    if not found:
        raise InputError(f"must target one of {', '.join(LORA_MODULES)}", wanted, location)
    return found


def _matching(pattern: str, location: str) -> tuple[str, ...]:
    """Return the modules whose whole names match; Arrow matches by RE2, which does not backtrack."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parents: Mapping[bool, str] = {True: "self_attn", False: "mlp"}
    names = [f"model.layers.0.{parents[name in LORA_MODULES[:4]]}.{name}" for name in LORA_MODULES]
    try:
        matched = pc.match_substring_regex(pa.array(names, pa.string()), f"^(?:{pattern})$").to_pylist()
    except (pa.ArrowInvalid, UnicodeError):  # half of a surrogate pair
        raise InputError("must be a regular expression", pattern, location) from None
    return tuple(name for name, found in zip(LORA_MODULES, matched, strict=True) if found)
