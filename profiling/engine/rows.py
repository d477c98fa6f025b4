"""From what the engine says of a step to a row of a step table; see docs/calibration.md."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from capplan.engine.request import Request
from capplan.engine.scheduler_output import Decision
from capplan.engine.timing import StepRecord

Row = dict[str, float]

HOST_PHASES: Final = ("schedule_ms", "prepare_ms", "sample_ms", "commit_ms")


def step_row(
    record: StepRecord,
    decision: Decision,
    requests: Mapping[int, Request],
    emitted: Collection[int],
    rank_of: Mapping[int, int],
) -> Row:
    """Return the row of one step.

    Parameters
    ----------
    record, decision
        What the engine says of the step.
    requests
        Those in the step, by number.
    emitted
        Numbers of those that got a token in it.
    rank_of
        Rank of each adapter by its number.
    """
    row = dict.fromkeys(
        (
            "decodes",
            "prefills",
            "lora_decodes",
            "lora_prefills",
            "lora_prefill_tokens",
            "max_rank",
            "decode_rank_sum",
            "prefill_rank_sum",
            "prefill_rank_tokens",
        ),
        0.0,
    )
    for number, tokens in decision.tokens:
        request = requests[number]
        rank = rank_of.get(request.adapter, 0)
        had_output = len(request.output) > int(number in emitted)
        phase = "decode" if tokens == 1 and had_output else "prefill"
        row[f"{phase}s"] += 1.0
        row["max_rank"] = max(row["max_rank"], float(rank))
        row[f"{phase}_rank_sum"] += rank
        if request.adapter:
            row[f"lora_{phase}s"] += 1.0
            if phase == "prefill":
                row["lora_prefill_tokens"] += tokens
                row["prefill_rank_tokens"] += tokens * rank
    return {
        "step_ms": record.duration_ns * 1e-6,
        "tokens": float(record.tokens),
        "requests": float(record.requests),
        "kv_tokens": float(record.kv_tokens),
        "adapters": float(record.adapters),
        "waiting": float(record.waiting),
        "load_ms": 0.0,  # adapters are there before the steps that count
        **row,
        **{name: float(getattr(record, name)) for name in (*HOST_PHASES, "forward_ms")},
    }


def middle(rows: Sequence[Row]) -> Row:
    """Return steps of one state as a row: median times, means of what they held.

    Medians, since whatever else runs on a machine only ever makes a step longer.
    """
    times = {name for name in rows[0] if name.endswith("_ms")}
    return {
        name: float((np.median if name in times else np.mean)([row[name] for row in rows]))
        for name in rows[0]
    }


def recorded_rows(records: Any, pause_s: float) -> Any:
    """Return rows of a step table from the records that a server wrote, a row per step.

    A step takes from its beginning to the next one's: what the server does between two steps, waiting for the
    other threads of its process among it, is in it. Steps after which nothing runs have no next one and are
    left out, as are those before a pause.

    Parameters
    ----------
    records
        Table of `StepRecord` in the order of the steps.
    pause_s
        What counts as a pause.
    """
    import pandas as pd

    begin_ms = records["begin_ns"].to_numpy(np.float64) * 1e-6
    took_ms = np.append(np.diff(begin_ms), np.inf)
    parts = (records["decode_requests"] + records["prefill_requests"]).to_numpy(np.float64)
    goes_on = (records["requests"] + records["waiting"] - records["finished"]).to_numpy() > 0
    mean_rank = records["rank_sum"].to_numpy(np.float64) / np.maximum(parts, 1.0)
    decodes, prefills, prefill_tokens = (
        records[name].to_numpy(np.float64)
        for name in ("decode_requests", "prefill_requests", "prefill_tokens")
    )
    lora = (mean_rank > 0.0).astype(float)
    rows = pd.DataFrame(
        {
            "begin_ms": begin_ms,
            "step_ms": took_ms,
            **{n: records[n].astype(float) for n in ("tokens", "requests", "kv_tokens", "adapters")},
            "waiting": records["waiting"].astype(float),
            "load_ms": 0.0,
            "decodes": decodes,
            "prefills": prefills,
            "lora_decodes": decodes * lora,
            "lora_prefills": prefills * lora,
            "lora_prefill_tokens": prefill_tokens * lora,
            "max_rank": records["max_rank"].astype(float),
            "decode_rank_sum": decodes * mean_rank,
            "prefill_rank_sum": prefills * mean_rank,
            "prefill_rank_tokens": prefill_tokens * mean_rank,
            **{name: records[name].astype(float) for name in (*HOST_PHASES, "forward_ms")},
        }
    )
    keep = goes_on & (took_ms < pause_s * 1e3) & (records["loads"] == 0).to_numpy()
    return rows[keep].reset_index(drop=True)
