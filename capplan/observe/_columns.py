"""Fields of a source with arrival, lengths, adapter and outcome of a request: guessed by name, or named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from capplan.errors import InputError
from capplan.observe._source import Field, Kind, Source, listed

TIMESTAMP: Final = "timestamp"
PROMPT: Final = "prompt_tokens"
OUTPUT: Final = "output_tokens"
ADAPTER: Final = "adapter"
STATUS: Final = "status"
ERROR: Final = "error"
HASHES: Final = "hash_ids"


def _words(*lines: str) -> tuple[str, ...]:
    return tuple(" ".join(lines).split())


_NAMES: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {  # the first name that a source has; letters and digits alone count
        TIMESTAMP: _words(
            "timestamp arrival_s arrival arrived_at arrival_time arrival_timestamp timestamp_s",
            "request_start_ns request_start_time request_start start_time start_times started_at",
            "received_at created_at created event_time time datetime date ts t when msec",
            "time_iso8601 time_local start_ts start start_ns start_ms timestamp_ms timestamp_ns",
            "time_unix epoch logged_at request_time",  # nginx's request_time is a duration
        ),
        PROMPT: _words(
            "prompt_tokens input_tokens context_tokens request_tokens input_length prompt_length",
            "input_lens prompt_lens num_prompt_tokens num_input_tokens input_len prompt_len",
            "input_sequence_length.value input_sequence_length tokens_in in_tokens input_token_count",
            "prompt_token_count prompt_tokens_total isl n_prompt_tokens",
        ),
        OUTPUT: _words(
            "output_tokens completion_tokens generated_tokens response_tokens output_length",
            "output_lens num_output_tokens num_generated_tokens output_len completion_length",
            "output_sequence_length.value output_sequence_length tokens_out out_tokens",
            "output_token_count candidates_token_count completion_token_count generation_tokens osl",
        ),
        ADAPTER: _words(
            "adapter lora lora_name lora_adapter adapter_name adapter_id lora_id lora_modules",
            "lora_request model model_name model_group model_id served_model served_model_name model_path",
            "client client_id tenant tenant_id",
        ),
        STATUS: _words("status status_code http_status response_code code http_code success"),
        ERROR: _words("error errors error_message error_type exception"),
        HASHES: _words("hash_ids block_hashes prefix_hashes"),
    }
)
_PERHAPS_DURATIONS: Final = frozenset({"requesttime", "time", "t"})
"""Names of times of arrival that durations have, too."""
REQUIRED: Final = (TIMESTAMP, PROMPT, OUTPUT)
_KINDS: Final[Mapping[str, Sequence[Kind]]] = MappingProxyType(
    {
        TIMESTAMP: ("text", "number", "time"),
        PROMPT: ("text", "number"),
        OUTPUT: ("text", "number"),
        ADAPTER: ("text", "number"),
        STATUS: ("text", "number", "other"),
        ERROR: ("text", "number", "other"),
        HASHES: ("list", "object"),
    }
)


@dataclass(frozen=True)
class Column:
    """The field that was chosen for something."""

    field: Field
    stated: bool
    """Whether ``--map`` named it."""
    others: tuple[str, ...] = ()
    """Fields whose names would do as well."""


def choose_columns(
    source: Source, stated: Mapping[str, str], are_times: Callable[[Field], bool]
) -> dict[str, Column]:
    """Return the field of each of `_NAMES` that the source has.

    Parameters
    ----------
    stated
        Fields by what they hold, as ``--map`` names them; an empty name: none.
    are_times
        Tells whether the first values of a field may be times of arrival, by which it is guessed.

    Raises
    ------
    InputError
        If a stated one or a required one is missing, is named twice, or holds something else.
    """
    by_name = {each.name: each for each in source.fields}
    for what, name in stated.items():
        if what not in _NAMES:
            raise InputError(f"must be one of {', '.join(_NAMES)}", what, "map")
        if name and name not in by_name:
            raise InputError(f"must be a column of the file: {source.names}", name, f"map: {what}")
    found: dict[str, Column] = {}
    named = [name for name in stated.values() if name]
    if twice := next((name for name in named if named.count(name) > 1), None):
        raise InputError("must hold one thing alone", twice, "map")
    taken = set(named)
    for what in _NAMES:
        if what in stated:
            if stated[what]:
                found[what] = Column(_checked(by_name[stated[what]], what, source), stated=True)
            continue
        free = [each for each in source.fields if each.name not in taken and each.kind in _KINDS[what]]
        column = _guessed(what, free, are_times)
        if column is not None:
            found[what] = column
            taken.add(column.field.name)
    for what in REQUIRED:
        if what not in found:
            rule = f"no column of that name among {source.names}: name it by --map {what}=COLUMN"
            doubtful = [each.name for each in source.fields if _is_doubtful(each)]
            if what == TIMESTAMP and doubtful:
                rule = (
                    f"{listed(doubtful)} holds neither dates nor numbers that rise, so no times of arrival; "
                    f"there is {rule}"
                )
            raise InputError(rule, location=f"{source.path}: {what}")
    return found


def _guessed(what: str, free: Sequence[Field], are_times: Callable[[Field], bool]) -> Column | None:
    """Return the first of the fields with a known name."""
    matches = list(dict.fromkeys(_matches(free, _NAMES[what])))
    if what == TIMESTAMP:
        matches = [each for each in matches if not _is_doubtful(each) or are_times(each)]
    if not matches:
        return None
    repeated = re.compile(rf"{re.escape(matches[0].name)}_\d+")  # as DuckDB names columns of one name
    others = (*matches[1:4], *(each for each in free if repeated.fullmatch(each.name)))
    return Column(matches[0], stated=False, others=tuple(dict.fromkeys(each.name for each in others)))


def _is_doubtful(field: Field) -> bool:
    return _letters(field.name.rpartition(".")[2]) in _PERHAPS_DURATIONS


def _checked(field: Field, what: str, source: Source) -> Field:
    if field.kind not in _KINDS[what]:
        kinds = " or ".join(_KINDS[what])
        raise InputError(
            f"must be a column of {kinds}, not of {field.kind}", field.name, f"{source.path}: {what}"
        )
    return field


def _matches(fields: Iterable[Field], names: Sequence[str]) -> Iterable[Field]:
    """Yield the fields with one of the names, in the order of the names; within others, their last parts."""
    wanted = [_letters(name) for name in names]
    ends = [(each, _ends(each.name)) for each in fields]
    for name in wanted:
        for each, own in ends:
            if name in own:
                yield each


def _ends(name: str) -> set[str]:
    """Return the letters and digits of a name, and of its last one and two parts."""
    parts = name.split(".")
    return {_letters(".".join(parts[-n:])) for n in (1, 2, len(parts))}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
