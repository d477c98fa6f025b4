"""Samples of requests, drawn and recorded."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from hypothesis import strategies as st

from capplan.planner.queues import RequestSample, with_base_model

RANKS = np.array([8, 16, 32, 64, 128])
BYTES_PER_RANK = 2 * 2**20
TOKENS_PER_RANK = 4
"""Llama-7B: 2 MiB of weights per rank (Chameleon, section 3.2), 512 KiB of keys and values per token."""
STEP_S = 0.035


def azure(traces: Path, seed: int, factor: float = 1.0) -> RequestSample:
    """Lengths of Azure's 2023 conversations, times a factor, with ranks drawn evenly."""
    table = pq.read_table(traces / "azure_llm_2023_conv.parquet")
    prompt, output = (
        np.maximum(1, np.round(table[name].to_numpy() * factor)).astype(np.int64)
        for name in ("prompt_tokens", "output_tokens")
    )
    adapter = np.random.default_rng(seed).integers(1, RANKS.size + 1, prompt.size)
    weights, tokens = with_base_model(RANKS * BYTES_PER_RANK, RANKS * TOKENS_PER_RANK)
    return RequestSample(prompt, output, adapter, output * STEP_S, weights, tokens)


@st.composite
def samples(draw: st.DrawFn) -> RequestSample:
    """A few requests, often alike, some of the base model, some whose time is unknown."""
    count = draw(st.integers(1, 40))
    lengths = st.integers(1, 3000) | st.sampled_from([1, 100])
    ranks = np.array(draw(st.lists(st.sampled_from(RANKS.tolist()), min_size=1, max_size=4)))
    weights, tokens = with_base_model(ranks * BYTES_PER_RANK, ranks * TOKENS_PER_RANK)
    column = st.lists(lengths, min_size=count, max_size=count).map(np.array)
    times = st.floats(0.001, 100.0) | st.just(np.nan)
    execution_s = np.array(draw(st.lists(times, min_size=count, max_size=count)))
    execution_s[0] = 1.0
    adapters = st.lists(st.integers(0, ranks.size), min_size=count, max_size=count).map(np.array)
    return RequestSample(draw(column), draw(column), draw(adapters), execution_s, weights, tokens)
