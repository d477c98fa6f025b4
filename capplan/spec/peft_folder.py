"""PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

Clients and other servers may name such folders, so nothing of a folder is trusted: see
`capplan.spec.tensor_files` for its files. Names and shapes are read before weights.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from capplan.errors import InputError
from capplan.spec.files import parse_json
from capplan.spec.lora_modules import ADAPTER_CONFIG, LORA_MODULES
from capplan.spec.tensor_files import SafetensorsFile, TensorEntry, open_regular, read_whole

WEIGHTS_FILE: Final = "adapter_model.safetensors"

MAX_CONFIG_BYTES: Final = 2**20
_MAX_NAME_LENGTH: Final = 512
_MAX_PATTERNS: Final = 2048
"""Twice the modules of a model of 126 layers."""

_MUST_BE_OFF = (
    "alora_invocation_tokens",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)

_REPLACES_BASE = re.compile(r"pissa.*|corda|olora|loftq|lora_ga")
"""Values of `init_lora_weights` with which PEFT replaces the weights of the base model."""

_TENSOR = re.compile(r"(?:.*\.)?(layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])(?:\.default)?\.weight")

_PATTERN = re.compile(r"(?:[\w.|()\[\]*+?^$:-]|\\[dw.]){1,256}", re.ASCII)
"""Regular expressions that are matched: in linear time, and without repetition counts, which enlarge them."""

Place = tuple[int, int]
"""(layer, module)"""


class _Half(NamedTuple):
    tensor: TensorEntry
    module: str


class MatrixPair(NamedTuple):
    """Entries of A and B of one module, and the scale of their product."""

    a: TensorEntry
    b: TensorEntry
    scale: float


@dataclass(frozen=True)
class PeftFiles:
    """Files of a PEFT folder on this machine.

    Parameters
    ----------
    name
        Shown in messages.
    config, weights
        Its files.
    root
        Folder that holds the files, with all links resolved; no link below it is followed when they are read.
        None: links are followed.
    """

    name: str
    config: Path
    weights: Path
    root: Path | None = None

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return a folder that the operator has named."""
        return cls(str(folder), folder / ADAPTER_CONFIG, folder / WEIGHTS_FILE)

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def opened(self) -> Iterator[tuple[SafetensorsFile, dict[Place, MatrixPair]]]:
        """Open the weights; yield them with A, B and scale of every (layer, module).

        Raises
        ------
        InputError
            If the files cannot be read, or hold something else than a plain LoRA adapter.
        """
        config = self.read_config()
        location = f"{self.name}/{WEIGHTS_FILE}"
        with open_regular(self.weights, self.root, location) as opened:
            file = SafetensorsFile(opened, location)
            yield file, _pairs(_halves(file.entries, location), config, location)

    def read_config(self) -> dict[str, Any]:
        """Return the fields of the config.

        Raises
        ------
        InputError
            If the engine does not support the adapter's kind: DoRA, trained biases, whole modules.
        """
        file = f"{self.name}/{ADAPTER_CONFIG}"
        with open_regular(self.config, self.root, file) as opened:
            size_bytes = os.fstat(opened.fileno()).st_size
            if size_bytes > MAX_CONFIG_BYTES:
                raise InputError(f"must be at most {MAX_CONFIG_BYTES} bytes", size_bytes, file)
            data = read_whole(opened, size_bytes, file)
        try:
            config = parse_json(data.decode("utf-8-sig"), file)
        except UnicodeDecodeError:
            raise InputError("must be UTF-8 text", location=file) from None
        if not isinstance(config, dict):
            raise InputError("must be a JSON object", location=file)
        _require_plain_lora(config, file)
        return config


def _require_plain_lora(config: dict[str, Any], file: str) -> None:
    if config.get("peft_type") != "LORA":
        raise InputError("must be a LoRA adapter: peft_type LORA", location=file)
    for key in _MUST_BE_OFF:
        if config.get(key):
            raise InputError(
                "must be off: the engine does not run such adapters", config[key], f"{file}: {key}"
            )
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and _REPLACES_BASE.fullmatch(initial):
        rule = "must be converted to plain LoRA: it replaces the weights of the base model"
        raise InputError(rule, initial, f"{file}: init_lora_weights")
    if config.get("bias", "none") != "none":
        raise InputError("must be none", config["bias"], f"{file}: bias")


def _halves(entries: Sequence[TensorEntry], location: str) -> dict[str, dict[Place, _Half]]:
    """Return the tensors A and B of every (layer, module)."""
    halves: dict[str, dict[Place, _Half]] = {"A": {}, "B": {}}
    for entry in entries:
        match = _TENSOR.fullmatch(entry.name) if len(entry.name) <= _MAX_NAME_LENGTH else None
        if match is None or match[3] not in LORA_MODULES:
            raise InputError(
                f"must hold lora_A and lora_B of {', '.join(LORA_MODULES)} only", entry.name, location
            )
        place = int(match[2]), LORA_MODULES.index(match[3])
        if place in halves[match[4]]:
            raise InputError("must hold every matrix once", entry.name, location)
        halves[match[4]][place] = _Half(entry, match[1])
    for layer, module in halves["A"].keys() ^ halves["B"].keys():
        where = f"{location}: layer {layer} {LORA_MODULES[module]}"
        raise InputError("must hold both lora_A and lora_B", location=where)
    return halves


def _pairs(
    halves: dict[str, dict[Place, _Half]], config: dict[str, Any], location: str
) -> dict[Place, MatrixPair]:
    """Return A, B and scale of every (layer, module); check the declared ranks."""
    modules = [half.module for half in halves["A"].values()]
    declared = _by_pattern(config.get("rank_pattern"), modules, config.get("r", 8), location)
    alphas = _by_pattern(config.get("alpha_pattern"), modules, config.get("lora_alpha", 8), location)
    pairs = {}
    for (place, half), wanted, alpha in zip(halves["A"].items(), declared, alphas, strict=True):
        rank = half.tensor.shape[0]
        if wanted != rank:
            rule = f"must have the rank {wanted:g} that {ADAPTER_CONFIG} says"
            raise InputError(rule, rank, f"{location}: {half.tensor.name}")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        pairs[place] = MatrixPair(half.tensor, halves["B"][place].tensor, scale)
    return pairs


def _by_pattern(patterns: Any, modules: Sequence[str], default: Any, location: str) -> list[float]:
    """Return the value of the first pattern that matches the end of each module's name, as in PEFT."""
    if not isinstance(patterns or {}, dict):
        raise InputError("rank_pattern and alpha_pattern must be mappings", patterns, location)
    if len(patterns or {}) > _MAX_PATTERNS:
        raise InputError(f"must have at most {_MAX_PATTERNS} patterns", len(patterns), location)
    values = [default] * len(modules)
    if patterns:
        # In reverse, so that the first pattern has the last word.
        for pattern, value in reversed(patterns.items()):
            matched = _matches(pattern, modules, location)
            values = [value if found else before for found, before in zip(matched, values, strict=True)]
    return [_finite(value, location) for value in values]


def _matches(pattern: str, modules: Sequence[str], location: str) -> list[bool]:
    """Return the modules whose names end with a match; Arrow matches by RE2, which does not backtrack."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rule = "must be a regular expression of at most 256 letters, digits and . | ( ) [ ] * + ? ^ $ : - \\d \\w"
    if _PATTERN.fullmatch(pattern) is None:
        raise InputError(rule, pattern, location)
    names = pa.array([f"model.{module}" for module in modules], pa.string())
    try:
        found = pc.match_substring_regex(names, rf"^(.*\.)?({pattern})$")
    except pa.ArrowInvalid:
        raise InputError(rule, pattern, location) from None
    matched: list[bool] = found.to_pylist()
    return matched


def _finite(value: Any, location: str) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError("rank and alpha must be finite numbers", value, location)
    except OverflowError:
        raise InputError("rank and alpha must be finite numbers", location=location) from None
    return float(value)
