"""Steps put together of measured layers (``layers_rtx4090``): Llama-3.1-8B on an RTX 4090, vLLM 0.19.

Source: github.com/casys-kaist/LLMServingSim, commit 5daddb2, MIT. A step is 32 times the layer, and once
embedding, last norm, output head and sampler. No host is in it, nor the gaps between kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pandas as pd

from benchmarks.measured.case import Deployment
from benchmarks.measured.step_times import StepCase

FOLDER: Final = "layers_rtx4090"
_LAYERS: Final = 32
_IN_LAYER: Final = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
_NORMS_IN_LAYER: Final = 2
_BATCHES: Final = (1, 8, 32, 64, 128, 256)
_CONTEXTS: Final = (128, 512, 2048)
_CHUNKS: Final = (128, 512, 2048)
_MOST_KV_TOKENS: Final = 70_000
"""KV tokens beyond the memory of the GPU are left out."""


def read(folder: Path) -> list[StepCase]:
    """Return decode and prefill steps of several sizes."""
    root = folder / FOLDER
    dense = pd.read_csv(root / "dense.csv").set_index(["layer", "tokens"])["time_us"]
    last = pd.read_csv(root / "per_sequence.csv").set_index(["layer", "sequences"])["time_us"]
    shape = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
    attention = pd.read_csv(root / "attention.csv").set_index(shape)["time_us"]
    deployment = Deployment("rtx-4090", "meta-llama/Llama-3.1-8B", 1, "0.19.0")
    steps = []
    for name, chunk, decodes, context in _shapes():
        tokens, requests = chunk + decodes, decodes + (chunk > 0)
        layer_us = (
            sum(dense[kind, tokens] for kind in _IN_LAYER) + _NORMS_IN_LAYER * dense["layernorm", tokens]
        )
        layer_us += attention[chunk, 0, decodes, context]
        once_us = dense["embedding", tokens] + dense["final_layernorm", tokens]
        once_us += last["lm_head", requests] + last["sampler", requests]
        measured = {"step_ms": float(_LAYERS * layer_us + once_us) / 1e3}
        steps.append(StepCase(name, deployment, chunk, decodes, context, measured))
    return steps


def _shapes() -> Iterator[tuple[str, int, int, int]]:
    for decodes in _BATCHES:
        for context in _CONTEXTS:
            if decodes * context <= _MOST_KV_TOKENS:
                yield f"decode {decodes} x {context}", 0, decodes, context
    for chunk in _CHUNKS:
        yield f"prefill {chunk}", chunk, 0, 0
