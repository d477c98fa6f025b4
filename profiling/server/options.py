"""What a measuring of a server is told: how the server was started, and how much to measure."""

from __future__ import annotations

from dataclasses import dataclass

from capplan.profiling.load.prompts import PromptForm


@dataclass(frozen=True)
class EngineSetting:
    """How the server was started, as far as it matters for what a step takes.

    Attributes
    ----------
    a_max : int, optional
        Adapter slots; None: what the server says.
    s_max : int
        Rank of a slot.
    max_num_seqs, max_num_batched_tokens : int
        Limits of a step.
    max_model_len : int, optional
        Longest request; None: what the server says.
    """

    a_max: int | None
    s_max: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None


@dataclass(frozen=True)
class ProfilingOptions:
    """How much is measured.

    Attributes
    ----------
    budget_s : float
        Time for closed loops; those that do not fit any more are left out.
    point_s : float
        Time of one.
    passes : int
        How often all of them are gone through. The speed of a machine drifts over minutes: what a state takes
        is told from that only by coming back to it.
    max_streams : int, optional
        Largest batch; None: as many as run at once, 64 at most.
    prompt_tokens, output_tokens : int
        Typical lengths.
    prompt_form : PromptForm, optional
        None: the first that the server takes.
    idle_repeats : int
        How often each prompt length is asked for on the idle server.
    load_rounds : int
        How often each adapter is loaded.
    """

    budget_s: float = 600.0
    point_s: float = 8.0
    passes: int = 1
    max_streams: int | None = None
    prompt_tokens: int = 128
    output_tokens: int = 64
    prompt_form: PromptForm | None = None
    idle_repeats: int = 15
    load_rounds: int = 6
