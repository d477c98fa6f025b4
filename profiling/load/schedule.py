"""When which request is due, and how long it is: the very draw that the twin simulates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.spec import Profile, Workload

DEFAULT_MAX_MODEL_LEN: Final = 8192
_NS_PER_S: Final = 1e9
BASE: Final = ""
"""Name in place of an adapter's, of requests that ask for the base model."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Requests in the order in which they are due; the arrays have shape (requests,)."""

    due_s: NDArray[np.float64]
    """Seconds from the start."""
    adapter: NDArray[np.int32]
    """Position in `names`."""
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    names: tuple[str, ...]
    """The base model (as the empty name), then the adapters of the workload in order."""
    shared_prefix_tokens: int = 0
    """Tokens that all prompts of an adapter begin with."""

    def __len__(self) -> int:
        return self.due_s.size


def schedule_of(
    workload: Workload,
    horizon_s: float,
    seed: int = 0,
    max_model_len: int = DEFAULT_MAX_MODEL_LEN,
    *,
    rate_scale: float = 1.0,
    profile: Profile | None = None,
) -> Schedule:
    """Draw the requests of a workload as `capplan simulate` does: same seed, same requests.

    Parameters
    ----------
    workload
        Adapters, rates and lengths, or a trace, which is replayed.
    horizon_s
        Time in which requests are due; the twin's ``duration_s``.
    seed
        As the twin's.
    max_model_len
        As the twin's. An output ends where prompt and output reach it.
    rate_scale
        What rates are multiplied by; see `scaled`.
    profile
        Of the engine; says how lengths of prompt and output go together where the workload does not.

    Raises
    ------
    InputError
        For a parameter out of range or lengths that cannot be drawn.
    """
    from capplan.workload import draw_requests

    asked = scaled(workload, rate_scale)
    drawn_pairs = asked.trace is None and asked.length_pairs is None
    if profile is not None and drawn_pairs and asked.length_correlation is None:
        asked = asked.model_copy(update={"length_correlation": profile.length_correlation})
    drawn = draw_requests(asked, horizon_s, seed, max_model_len, max(1, max_model_len - 1))
    room = np.maximum(max_model_len - drawn.prompt_tokens, 1)
    return Schedule(
        due_s=drawn.arrival_ns / _NS_PER_S,
        adapter=drawn.adapter,
        prompt_tokens=drawn.prompt_tokens,
        output_tokens=np.minimum(drawn.output_tokens, room).astype(np.int32),
        names=(BASE, *(adapter.name for adapter in workload.adapters)),
        shared_prefix_tokens=workload.shared_prefix_tokens,
    )


def scaled(workload: Workload, rate_scale: float) -> Workload:
    """Return the workload with all rates multiplied; a trace is replayed that much faster.

    Raises
    ------
    InputError
        Unless the factor is a finite number above 0.
    """
    if not 0.0 < rate_scale < float("inf"):
        raise InputError("must be a finite number above 0", rate_scale, "rate_scale")
    if rate_scale == 1.0:
        return workload
    adapters = tuple(a.model_copy(update={"rate_rps": a.rate_rps * rate_scale}) for a in workload.adapters)
    trace = workload.trace
    if trace is not None:
        names = np.array(trace.names, dtype=object)[trace.adapter].tolist()
        arrival_s = trace.arrival_ns / _NS_PER_S / rate_scale
        trace = type(trace).from_arrays(
            arrival_s, names, trace.prompt_tokens, trace.output_tokens, trace.duration_s / rate_scale
        )
    return workload.model_copy(update={"adapters": adapters, "trace": trace})
