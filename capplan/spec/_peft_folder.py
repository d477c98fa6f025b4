"""PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

Planner, registry, exporters and engine check folders here. Clients and other servers may name such folders,
so nothing of a folder is trusted. Names and shapes are read before weights. Bytes are read, not mapped: a
file that is truncated while it is mapped kills the process.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, NamedTuple, Self

from capplan.errors import NO_VALUE, InputError
from capplan.spec._files import error_reason, open_regular, parse_json
from capplan.spec._lora_modules import (
    ADAPTER_CONFIG,
    ALL_LINEAR,
    ALL_MODULES,
    ATTENTION_MODULES,
    EMBEDDING_MODULES,
    FUSED_MODULES,
    LORA_MODULES,
    parts_of_modules,
)
from capplan.spec._validation import LORA_RANKS

if TYPE_CHECKING:
    from capplan.spec._profile import ModelArch


_MAX_HEADER_BYTES: Final = 4 * 2**20
"""Names and shapes of the 14 matrices of each of 126 layers take 0.3 MiB."""
_MAX_SIZE: Final = 2**32
"""Of one dimension; products of a few remain small integers."""
_TYPE_BYTES: Final = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1})


def read_whole(file: BinaryIO, size_bytes: int, location: str) -> bytearray:
    """Return the next bytes of a file; if it has fewer, or cannot be read, raise an input error."""
    data = bytearray(size_bytes)
    view, at = memoryview(data), 0
    while at < size_bytes:
        try:
            n = file.readinto(view[at:])  # type: ignore[attr-defined]
        except OSError as error:
            raise InputError(f"cannot be read: {error_reason(error)}", location=location) from None
        if not n:
            raise InputError("cannot be read: it is truncated", location=location)
        at += n
    return data


class TensorEntry(NamedTuple):
    """Entry of a tensor in the header of a safetensors file; `start` is within the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """Tensors of an open safetensors file.

    The format is an eight-byte length, a JSON header with type, shape and place of every tensor, and the data
    of the tensors without gaps (https://github.com/huggingface/safetensors#format).

    Attributes
    ----------
    entries
        In the order of the data.

    Raises
    ------
    InputError
        If the header is larger than 4 MiB or broken, or does not cover the file.
    """

    def __init__(self, file: BinaryIO, location: str) -> None:
        self._file = file
        self._location = location
        size_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(read_whole(file, 8, location), "little") if size_bytes >= 8 else 0
        if not 2 <= header_bytes <= size_bytes - 8:
            raise self._broken("it has no header of its length")
        if header_bytes > _MAX_HEADER_BYTES:
            raise InputError(
                f"must have a header of at most {_MAX_HEADER_BYTES} bytes", header_bytes, location
            )
        self._data_at = 8 + header_bytes
        self.entries = self._entries(read_whole(file, header_bytes, location))
        end = self.entries[-1].stop if self.entries else 0
        if end != size_bytes - self._data_at:
            raise self._broken(f"its tensors take {end} bytes of {size_bytes - self._data_at}")

    def read(self, entries: Iterable[TensorEntry]) -> Iterator[tuple[TensorEntry, bytearray]]:
        """Yield tensors with their bytes."""
        for entry in entries:
            self._file.seek(self._data_at + entry.start)
            yield entry, read_whole(self._file, entry.stop - entry.start, self._location)

    def _entries(self, header: bytearray) -> list[TensorEntry]:
        try:
            fields = parse_json(header.decode(), self._location)
        except UnicodeDecodeError:
            raise self._broken("the header is not UTF-8") from None
        if not isinstance(fields, dict):
            raise self._broken("the header is no JSON object")
        fields.pop("__metadata__", None)
        entries = sorted((self._entry(name, each) for name, each in fields.items()), key=lambda e: e.start)
        at = 0
        for entry in entries:
            if entry.start != at:
                raise self._broken(f"{entry.name} starts at byte {entry.start} and not at {at}")
            at = entry.stop
        return entries

    def _entry(self, name: str, fields: Any) -> TensorEntry:
        try:
            dtype, shape = fields["dtype"], tuple(fields["shape"])
            type_bytes = _TYPE_BYTES[dtype]
            start, stop = fields["data_offsets"]
        except (KeyError, TypeError, ValueError):
            rule = f"must have a shape, data_offsets and a dtype of {', '.join(_TYPE_BYTES)}"
            raise InputError(rule, name, self._location) from None
        where = f"{self._location}: {name}"
        if len(shape) != 2 or not all(type(n) is int and 0 < n < _MAX_SIZE for n in shape):
            raise InputError("must be a matrix", shape, where)
        if type(start) is not int or stop != start + math.prod(shape) * type_bytes:
            raise InputError("must have the bytes of its shape", (shape, start, stop), where)
        return TensorEntry(name, dtype, shape, start, stop)

    def _broken(self, reason: str) -> InputError:
        return InputError(f"cannot be read: {reason}", location=self._location)


WEIGHTS_FILE: Final = "adapter_model.safetensors"
_PICKLED_FILE: Final = "adapter_model.bin"
_CONVERT: Final = (
    "import torch; from safetensors.torch import save_file; save_file(torch.load('adapter_model.bin', "
    "map_location='cpu', weights_only=True), 'adapter_model.safetensors')"
)

MAX_CONFIG_BYTES: Final = 2**20
_MAX_NAME_LENGTH: Final = 512
_MAX_PATTERNS: Final = 2048
"""Twice the modules of a model of 126 layers."""
_MAX_TARGETS: Final = 8192
"""Names of target_modules, or characters of a regular expression there."""

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

_TENSOR = re.compile(
    r"(?P<prefix>(?:.*\.)?)"
    r"(?:(?P<linear>layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.\w+|lm_head)"
    r"\.lora_(?P<half>[AB])(?:\.default)?\.weight"
    r"|(?P<embedding>embed_tokens)\.lora_embedding_(?P<embedding_half>[AB])(?:\.default)?)"
)
_WRAPPER: Final = "base_model.model."
"""Prefix of PEFT before the names of the base model's modules."""

_PATTERN = re.compile(r"(?:[\w.|()\[\]*+?^$:-]|\\[dw.]){1,256}", re.ASCII)
"""Regular expressions that are matched: in linear time, and without repetition counts, which enlarge them."""

_MODULES: Final = (*ALL_MODULES, *FUSED_MODULES)

_NO_LAYER: Final = -1

Place = tuple[int, int]
"""(layer, module); -1 is the layer of `EMBEDDING_MODULES`, and those beyond `ALL_MODULES` are fused ones."""


class _Half(NamedTuple):
    tensor: TensorEntry
    prefix: str
    module: str


class MatrixPair(NamedTuple):
    """Entries of A and B of one module, and the scale of their product."""

    a: TensorEntry
    b: TensorEntry
    scale: float


@dataclass(frozen=True)
class FolderAdapter:
    """Properties of an adapter by its files, from the tensors where there are any, otherwise by the config.

    Attributes
    ----------
    config
        Its config, as shown in messages.
    rank
        Largest rank.
    target_modules
        What it adapts, in the order of `ALL_MODULES`.
    base_model
        Model that it was trained on, as the config names it; None: not stated.
    sizes
        (in, out) of its matrices by (layer, module); empty without tensors.
    """

    config: str
    rank: int
    target_modules: tuple[str, ...]
    base_model: str | None
    sizes: Mapping[Place, tuple[int, int]]


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
    def opened(self, every: bool = False) -> Iterator[tuple[SafetensorsFile, dict[Place, MatrixPair]]]:
        """Open the weights; yield them with A, B and scale of every (layer, module).

        Parameters
        ----------
        every
            Whether matrices of fused layers, embedding and output head may be among them.

        Raises
        ------
        InputError
            If the files cannot be read, contradict each other, or hold something else than a plain LoRA
            adapter.
        """
        config = self.read_config()
        location = f"{self.name}/{WEIGHTS_FILE}"
        self._has_tensors()
        with open_regular(self.weights, self.root, location) as opened:
            file = SafetensorsFile(opened, location)
            halves = _halves(file.entries, _MODULES if every else LORA_MODULES, location)
            _require_targets(halves["A"], config, location)
            yield file, _pairs(halves, config, location)

    def _has_tensors(self) -> bool:
        """Return whether there is a file of tensors; refuse pickled ones without it."""
        found = os.path.lexists(self.weights)
        if not found and os.path.lexists(self.weights.with_name(_PICKLED_FILE)):
            rule = "is not supported, because pickled files can run code; convert it there"
            raise InputError(f'{rule}: python -c "{_CONVERT}"', location=f"{self.name}/{_PICKLED_FILE}")
        return found

    def describe(self) -> FolderAdapter:
        """Return the properties of the adapter; weights are not read.

        Raises
        ------
        InputError
            If the files cannot be read, contradict each other, or hold something else than a plain LoRA
            adapter.
        """
        config, file = self.read_config(), f"{self.name}/{ADAPTER_CONFIG}"
        base_model = config.get("base_model_name_or_path")
        if not isinstance(base_model, str | None):
            raise InputError("must be text", base_model, f"{file}: base_model_name_or_path")
        rank, sizes = _whole_rank(config.get("r", 8), f"{file}: r"), {}
        if self._has_tensors():
            with self.opened(every=True) as (_, pairs):
                if not pairs:
                    raise InputError("must hold at least one adapted module", location=str(self.weights))
                rank = max(rank, *(pair.a.shape[0] for pair in pairs.values()))
                sizes = {place: (a.shape[1], b.shape[0]) for place, (a, b, _) in pairs.items()}
            modules = parts_of_modules({_MODULES[module] for _, module in pairs})
        else:
            patterns = _patterns(config, "rank_pattern", file).values()
            rank = max([rank, *(_whole_rank(value, f"{file}: rank_pattern") for value in patterns)])
            modules = _targets(config.get("target_modules"), f"{file}: target_modules")
        return FolderAdapter(file, rank, modules, base_model or None, sizes)

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
    if (kind := config.get("peft_type", NO_VALUE)) != "LORA":
        raise InputError("must be a LoRA adapter, LORA: no other kind is served", kind, f"{file}: peft_type")
    for key in _MUST_BE_OFF:
        if config.get(key):
            rule = "must be off: such adapters are not served; merge it into the base model, or train without"
            raise InputError(rule, config[key], f"{file}: {key}")
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and _REPLACES_BASE.fullmatch(initial):
        rule = "must be converted to plain LoRA: it replaces the weights of the base model"
        raise InputError(rule, initial, f"{file}: init_lora_weights")
    if config.get("bias", "none") != "none":
        raise InputError("must be none", config["bias"], f"{file}: bias")


def _halves(
    entries: Sequence[TensorEntry], modules: Sequence[str], location: str
) -> dict[str, dict[Place, _Half]]:
    """Return the tensors A and B of every (layer, module)."""
    halves: dict[str, dict[Place, _Half]] = {"A": {}, "B": {}}
    for entry in entries:
        match = _TENSOR.fullmatch(entry.name) if len(entry.name) <= _MAX_NAME_LENGTH else None
        path = match and (match["linear"] or match["embedding"])
        if match is None or path is None or (name := path.rpartition(".")[2]) not in modules:
            rule = f"must hold lora_A and lora_B of {', '.join(modules)} only"
            raise InputError(rule, entry.name, location)
        place = int(match["layer"] or _NO_LAYER), modules.index(name)
        half = halves[match["half"] or match["embedding_half"]]
        if place in half:
            raise InputError("must hold every matrix once", entry.name, location)
        half[place] = _Half(entry, match["prefix"].removeprefix(_WRAPPER), path)
    for place in halves["A"].keys() ^ halves["B"].keys():
        raise InputError("must hold both lora_A and lora_B", location=f"{location}: {_named(place)}")
    return halves


def _named(place: Place) -> str:
    layer, module = place
    return _MODULES[module] if layer == _NO_LAYER else f"layer {layer} {_MODULES[module]}"


def _pairs(
    halves: dict[str, dict[Place, _Half]], config: dict[str, Any], location: str
) -> dict[Place, MatrixPair]:
    """Return A, B and scale of every (layer, module); check the declared ranks."""
    modules = [half.module for half in halves["A"].values()]
    declared = _by_pattern(_patterns(config, "rank_pattern", location), modules, config.get("r", 8), location)
    alphas = _by_pattern(
        _patterns(config, "alpha_pattern", location), modules, config.get("lora_alpha", 8), location
    )
    pairs = {}
    for (place, half), wanted, alpha in zip(halves["A"].items(), declared, alphas, strict=True):
        rank, b = half.tensor.shape[0], halves["B"][place].tensor
        if wanted != rank:
            rule = f"must have the rank {wanted:g} that {ADAPTER_CONFIG} says"
            raise InputError(rule, rank, f"{location}: {half.tensor.name}")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if b.shape[1] != rank:
            where = f"{location}: {_named(place)}"
            raise InputError("A must be (rank, in) and B (out, rank)", (half.tensor.shape, b.shape), where)
        pairs[place] = MatrixPair(half.tensor, b, scale)
    return pairs


def _patterns(config: dict[str, Any], key: str, location: str) -> dict[str, Any]:
    """Return the values of a config by pattern."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise InputError("rank_pattern and alpha_pattern must be mappings", patterns, location)
    if len(patterns) > _MAX_PATTERNS:
        raise InputError(f"must have at most {_MAX_PATTERNS} patterns", len(patterns), location)
    return patterns


def _by_pattern(patterns: dict[str, Any], modules: Sequence[str], default: Any, location: str) -> list[float]:
    """Return the value of the first pattern that matches the end of each module's name, as in PEFT."""
    values = [default] * len(modules)
    if patterns:
        # In reverse, so that the first pattern has the last word.
        for pattern, value in reversed(patterns.items()):
            matched = _matches(pattern, modules, location)
            values = [value if found else before for found, before in zip(matched, values, strict=True)]
    return [_finite(value, location) for value in values]


def _matches(pattern: str, modules: Sequence[str], location: str) -> list[bool]:
    """Return the modules whose names end with a match."""
    rule = "must be a regular expression of at most 256 letters, digits and . | ( ) [ ] * + ? ^ $ : - \\d \\w"
    if _PATTERN.fullmatch(pattern) is None:
        raise InputError(rule, pattern, location)
    matched = _searched(rf"^(.*\.)?({pattern})$", [f"model.{module}" for module in modules])
    if matched is None:
        raise InputError(rule, pattern, location)
    return matched


def _searched(expression: str, names: Sequence[str]) -> list[bool] | None:
    """Return the names with a match by RE2, which does not backtrack; None for an unknown expression."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        found: list[bool] = pc.match_substring_regex(pa.array(names, pa.string()), expression).to_pylist()
    except (pa.ArrowInvalid, UnicodeError):  # half of a surrogate pair
        return None
    return found


def _finite(value: Any, location: str) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError("rank and alpha must be finite numbers", value, location)
    except OverflowError:
        raise InputError("rank and alpha must be finite numbers", location=location) from None
    return float(value)


def _whole_rank(value: Any, location: str) -> int:
    rank = _finite(value, location)
    if not 1 <= rank <= LORA_RANKS[-1] or rank != int(rank):
        raise InputError(f"must be a whole number from 1 to {LORA_RANKS[-1]}", value, location)
    return int(rank)


def _targets(wanted: Any, location: str) -> tuple[str, ...]:
    """Return the modules that ``target_modules`` of a config targets, by their names in the first layer.

    It is a list of names or of ends of names, a regular expression that whole names match, or all-linear.
    """
    if wanted == ALL_LINEAR:
        return LORA_MODULES
    if isinstance(wanted, str):
        names = [_name_in_model(name) for name in _MODULES]
        matched = _full_matches(wanted, names)
        if matched is None:
            raise InputError("must be a regular expression", wanted, location)
        found = parts_of_modules(name for name, matches in zip(_MODULES, matched, strict=True) if matches)
    else:
        ends = [name.rsplit(".", maxsplit=1)[-1] for name in _names(wanted, location)]
        for end in ends:
            if end not in _MODULES:
                raise InputError(f"must be among {', '.join(_MODULES)}", end, location)
        found = parts_of_modules(ends)
    if not found:
        raise InputError(f"must target one of {', '.join(_MODULES)}", wanted, location)
    return found


def _names(wanted: Any, location: str) -> list[str]:
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise InputError("must be a list of names, a regular expression or all-linear", wanted, location)
    if len(wanted) > _MAX_TARGETS:
        raise InputError(f"must be at most {_MAX_TARGETS} names", len(wanted), location)
    return wanted


def _require_targets(halves: Mapping[Place, _Half], config: dict[str, Any], location: str) -> None:
    """Check that the config's ``target_modules`` and ``layers_to_transform`` are those of the tensors.

    A regular expression that RE2 does not have, such as one with a look-ahead, is not checked.
    """
    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    if layers:
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise InputError("layers_to_transform must be a list of layers", layers, location)
        for layer in sorted({layer for layer, _ in halves if layer != _NO_LAYER} ^ set(layers))[:1]:
            rule = (
                f"must have tensors of the layers_to_transform that {ADAPTER_CONFIG} names, and of no others"
            )
            raise InputError(rule, layer, f"{location}: layer")
    wanted, names = config.get("target_modules"), [half.prefix + half.module for half in halves.values()]
    if wanted is None:
        return
    absent: Sequence[str]
    if isinstance(wanted, str):
        parts = parts_of_modules(_MODULES[module] for _, module in halves)
        candidates = dict.fromkeys(
            f"{half.prefix}{half.module.rsplit('.', 2)[0]}.{_parent(name)}.{name}"
            for half in halves.values()
            for name in LORA_MODULES
            if name not in parts and half.module not in EMBEDDING_MODULES
        )
        matched = _full_matches(wanted, [*names, *candidates])
        if matched is None:
            return
        targeted = matched[: len(names)]
        absent = [name for name, found in zip(candidates, matched[len(names) :], strict=True) if found]
    else:
        targets, hit = set(_names(wanted, f"{location}: target_modules")), set[str]()
        targeted = []
        for name in names:
            ends = targets.intersection(name.split(".", n)[-1] for n in range(name.count(".") + 1))
            targeted.append(bool(ends))
            hit |= ends
        absent = sorted(targets - hit)
    for name, found in zip(names, targeted, strict=True):
        if not found:
            rule = f"must be among the target_modules that {ADAPTER_CONFIG} names"
            raise InputError(rule, name, location)
    if absent and not config.get("exclude_modules"):
        raise InputError(f"must hold tensors of all target_modules of {ADAPTER_CONFIG}", absent[0], location)


def _name_in_model(module: str) -> str:
    """Return the name of a module within a model, in its first layer."""
    if module in EMBEDDING_MODULES:
        return module if module == "lm_head" else f"model.{module}"
    return f"model.layers.0.{_parent(module)}.{module}"


def _parent(module: str) -> str:
    return "self_attn" if module in (*ATTENTION_MODULES, "qkv_proj") else "mlp"


def _full_matches(pattern: str, names: Sequence[str]) -> list[bool] | None:
    """Return the names that a ``target_modules`` matches as a whole; None for a pattern unknown to RE2."""
    if pattern == ALL_LINEAR:
        return [True] * len(names)
    return _searched(f"^(?:{pattern})$", names) if len(pattern) <= _MAX_TARGETS else None


def require_fit(
    sizes: Mapping[Place, tuple[int, int]],
    layers: int,
    model_sizes: Sequence[tuple[int, int]],
    location: str,
) -> None:
    """Check that matrices are those of a model.

    Parameters
    ----------
    sizes
        (in, out) by (layer, module).
    layers, model_sizes
        Layers of the model, and (in, out) of each of `ALL_MODULES`, or of `LORA_MODULES` alone.

    Raises
    ------
    InputError
        If they are of a layer that the model does not have, or of other dimensions.
    """
    for (layer, module), size in sizes.items():
        where = f"{location}: {_named((layer, module))}"
        if layer >= layers:
            raise InputError(f"must be below the model's {layers} layers", layer, where)
        parts = [model_sizes[ALL_MODULES.index(part)] for part in parts_of_modules([_MODULES[module]])]
        size_in, size_out = parts[0][0], sum(out for _, out in parts)
        if size != (size_in, size_out):
            rule = f"must go from {size_in} to {size_out} dimensions as the model does"
            raise InputError(rule, size, where)


PathKind = Literal["folder", "hub", "url"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def path_kind(path: str) -> PathKind:
    """Return whether the path of an adapter is a folder, an id of the Hugging Face Hub, or a URL.

    Engines load folders; vLLM also downloads by id. Neither loads from a URL such as ``s3://bucket/name``.
    """
    if _URL.fullmatch(path):
        return "url"
    return "hub" if _HUB_ID.fullmatch(path) else "folder"


def local_folder(path: str | None, beside: str | os.PathLike[str] = "") -> Path | None:
    """Return the folder on this machine that the path of an adapter names; None if there is none.

    Parameters
    ----------
    beside
        Folder that relative paths start from; by default the current one.
    """
    if path is None or path_kind(path) == "url":
        return None
    folder = os.path.abspath(Path(beside, os.path.expanduser(path)))  # noqa: PTH100, PTH111 - links are kept
    return Path(folder) if os.path.isdir(folder) else None  # noqa: PTH112 - False for a NUL


def placed_path(path: str, beside: str | os.PathLike[str], location: str) -> str:
    """Return the path of an adapter as a plan holds it: a folder by its absolute path.

    A folder that is not on this machine is of the machine that serves, and its path must be absolute then.

    Raises
    ------
    InputError
        If it is none of a folder, a Hub id and a URL.
    """
    found = local_folder(path, beside)
    if found is not None:
        return str(found)
    if path_kind(path) != "folder":
        return path
    whole = os.path.expanduser(path)  # noqa: PTH111
    if not os.path.isabs(whole) or os.path.exists(whole):  # noqa: PTH110, PTH117
        rule = f"must be a folder, relative to {os.fspath(beside) or 'the current one'}"
        raise InputError(f"{rule}; a path on another machine must be absolute", path, location)
    return whole


def require_described(
    found: FolderAdapter,
    rank: int,
    target_modules: tuple[str, ...] | None,
    base_model: str,
    locate: Callable[[str], str],
) -> None:
    """Check that an adapter is as its folder says.

    Parameters
    ----------
    found
        The folder.
    rank, target_modules
        Those of the adapter as stated; layers that are not stated are not checked.
    base_model
        Model that serves it.
    locate
        Location of a key of the adapter, for messages.

    Raises
    ------
    InputError
        If the rank, the layers or the base model is another one.
    """
    said, hint = f"as {found.config} says", "a workload may leave it out"
    if rank != found.rank:
        raise InputError(f"must be {found.rank}, {said} by r and rank_pattern; {hint}", rank, locate("rank"))
    if target_modules is not None and target_modules != found.target_modules:
        rule = f"must be {', '.join(found.target_modules)}, {said}; {hint}"
        raise InputError(rule, ", ".join(target_modules), locate("target_modules"))
    if found.base_model is not None and is_other_model(found.base_model, base_model):
        rule = (
            f"must be an adapter of {base_model}, and base_model_name_or_path in {found.config} names another"
        )
        raise InputError(rule, found.base_model, locate("path"))


def require_adapter(
    path: str | None,
    rank: int,
    target_modules: tuple[str, ...] | None,
    base_model: str,
    location: str,
    arch: ModelArch | None = None,
) -> None:
    """Check an adapter whose path is a folder on this machine; others are not read.

    Parameters
    ----------
    path, rank, target_modules
        Those of the adapter, as for `require_described`.
    base_model, arch
        Model that serves it, and its shape; None: layers and dimensions are not checked.
    location
        The adapter, for messages.

    Raises
    ------
    InputError
        If the folder cannot be read, holds no plain LoRA adapter, or contradicts itself, the adapter or the
        model.
    """
    folder = local_folder(path)
    if folder is None:
        return
    found = PeftFiles.of(folder).describe()
    require_described(found, rank, target_modules, base_model, lambda key: f"{location}: {key}")
    if arch is not None:
        require_fit(found.sizes, arch.layers, arch.module_sizes, f"{folder}/{WEIGHTS_FILE}")


_FAMILIES: Final = (
    "llama|mistral|mixtral|qwen|gemma|phi|falcon|deepseek|granite|olmo|opt|bloom|gpt|starcoder|internlm|"
    "baichuan|chatglm|glm|yi|mpt|exaone|nemotron|command|dbrx|smollm|tinyllama|codellama"
)
_FAMILY = re.compile(rf"(?<![a-z])({_FAMILIES})(?![a-z])")
_BILLIONS = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?[bm])(?![a-z0-9])|(?<=x)(\d+b)")
_VERSION = re.compile(rf"(?:(?:{_FAMILIES})[-_]?|(?<![a-z0-9])v)(\d+(?:\.\d+)*)(?![\d.]*[a-z])")


def is_other_model(name: str, base_model: str) -> bool:
    """Return whether a model is clearly another one than the base model, by families, sizes and versions.

    Copies, quantized ones and those tuned to instructions have the same. A name without any, such as that of
    a local folder, is not known to be another model.
    """
    if name.startswith(("/", ".", "~")):
        return False
    words = [each.lower().rstrip("/").rsplit("/", 1)[-1] for each in (name, base_model)]
    for pattern in (_FAMILY, _BILLIONS, _VERSION):
        first, second = (
            {match[0] if pattern is _BILLIONS else match[1] for match in pattern.finditer(word)}
            for word in words
        )
        if first and second and first.isdisjoint(second):
            return True
    return False
