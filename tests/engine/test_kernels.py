"""Triton kernels against float64, under the interpreter where there is no GPU.

Inputs are fresh, everything that a kernel must not read is poisoned with NaN, and so is what it must write.
"""

import gc
import weakref

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton (extra `engine`)")

from capplan.engine import ModelConfig
from capplan.engine.input_batch import Segment
from capplan.engine.kernels.triton_attention import paged_decode
from capplan.engine.kernels.triton_lora import Kind, TritonLoRA
from capplan.engine.lora import AdapterLayout, HostAdapter
from capplan.engine.lora.adapter import MODULES, SITES, pack
from capplan.engine.lora.memory import AdapterMemory, RowTables, StaticSlots, UnifiedPages
from capplan.engine.models.decoder import KvCache
from capplan.engine.pool import PagePool, kv_page_elements

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = ModelConfig(
    name="odd",
    layers=2,
    hidden_size=72,
    heads=6,
    kv_heads=2,
    head_dim=14,
    intermediate_size=100,
    vocab_size=10,
    max_positions=64,
)
LAYOUT = AdapterLayout(CONFIG)
S_MAX = 24
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_adapter(rng: np.random.Generator, rank: int, dtype: torch.dtype) -> HostAdapter:
    """Return an adapter with different ranks per module, 0 on some."""
    matrices = {}
    for layer in range(CONFIG.layers):
        for module in range(len(MODULES)):
            size_in, size_out = LAYOUT.sizes[module]
            here = int(rng.choice([0, rank, rank, rng.integers(1, rank + 1)]))
            if here:
                a = torch.from_numpy(rng.standard_normal((here, size_in)))
                matrices[layer, module] = a, torch.from_numpy(rng.standard_normal((size_out, here)))
    return pack(LAYOUT, matrices, dtype, pin=False, location="test")


def memory_of(kind: str, adapters: int, dtype: torch.dtype) -> AdapterMemory:
    if kind == "slots":
        return StaticSlots(LAYOUT, adapters, S_MAX, dtype, DEVICE)
    pool = PagePool(900, kv_page_elements(CONFIG, 4), dtype, DEVICE)
    pool.tensor[1:] = torch.nan
    return UnifiedPages(LAYOUT, pool)


def test_slots_are_freed_with_their_last_reference() -> None:
    slots = StaticSlots(LAYOUT, 2, S_MAX, torch.float32, DEVICE)
    adapter = random_adapter(np.random.default_rng(), 8, torch.float32)
    slots.place(1, adapter.ranks).copy_from(adapter)
    storage = weakref.ref(slots.storage)
    gc.disable()
    try:
        del slots
        assert storage() is None
    finally:
        gc.enable()


def expected(adapter: HostAdapter, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the expected `out` in float64."""
    from capplan.engine.lora.memory import AdapterPlacement

    offsets = np.concatenate([[0], np.cumsum(LAYOUT.row_lengths(adapter.ranks))])[:-1]
    views = AdapterPlacement(LAYOUT, adapter.flat.to(DEVICE), adapter.ranks, offsets).views[layer][site]
    result = out.double().clone()
    if views.rank:
        h = torch.cat([x.double() @ part.rows.double().t() for part in views.shrinks], dim=1)
        for part in views.expands:
            result[:, part.out_start : part.out_end] += h[:, part.start : part.end] @ part.rows.double()
    return result


@pytest.mark.parametrize(
    ("where", "dtype"),
    [("slots", torch.float32), ("pages", torch.float32), ("slots", torch.bfloat16), ("pages", torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bgmv", "mbgmv", "sgmv"])
def test_each_token_uses_its_own_adapter(where: str, kind: Kind, dtype: torch.dtype) -> None:
    rng = np.random.default_rng()
    ranks = [1, 5, 8, 17, 24]
    adapters = {number: random_adapter(rng, rank, dtype) for number, rank in enumerate(ranks, start=1)}
    memory = memory_of(where, len(ranks), dtype)
    tables = RowTables(LAYOUT, len(ranks), S_MAX, DEVICE)
    for number, adapter in adapters.items():
        placement = memory.place(number, adapter.ranks)
        memory.clear(number)
        placement.copy_from(adapter)
        tables.add(number, placement, memory.padding(number, S_MAX))
    order = [0, *rng.permutation(list(adapters)).tolist(), 0]
    ends = np.cumsum(rng.integers(1, 20 if kind == "sgmv" else 3, len(order)))
    segments = [
        Segment(a, int(e - n), int(e)) for a, e, n in zip(order, ends, np.diff(ends, prepend=0), strict=True)
    ]
    tokens = int(ends[-1])
    applied = TritonLoRA(LAYOUT, tables, memory.storage, segments, tokens, kind)
    for layer in [int(rng.integers(CONFIG.layers))]:
        for site, modules in enumerate(SITES):
            width = sum(LAYOUT.sizes[module][1] for module in modules)
            x = torch.randn(tokens, LAYOUT.sizes[modules[0]][0] + 3, device=DEVICE).to(dtype)[:, :-3]
            out = torch.randn(tokens, width, device=DEVICE).to(dtype)
            right = out.double().clone()
            for adapter, start, end in segments:
                if adapter:
                    right[start:end] = expected(adapters[adapter], layer, site, x[start:end], out[start:end])
            applied._h.fill_(torch.nan)
            applied.add(layer, site, x, out)
            error = (out.double() - right).abs().max() / right.abs().max()
            assert float(error) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (6, 2, 14, torch.float32),
        (4, 4, 20, torch.bfloat16),
        (8, 1, 64, torch.float16),
        (34, 2, 32, torch.float32),
    ],
    ids=str,
)
def test_decode_attention_reads_only_the_pages_of_its_request(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng()
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "layers": 2}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "max_positions": 512}
    config = ModelConfig(name="attention", **shape, **sizes)
    block_size = int(rng.integers(3, 20))
    pool = PagePool(120, kv_page_elements(config, block_size), dtype, DEVICE)
    pool.tensor.fill_(torch.nan)
    cache = KvCache(config, pool, block_size)
    lengths = [1, 2, block_size, block_size + 1, 70, 131]
    tables = torch.zeros((len(lengths), 131 // block_size + 1), dtype=torch.int64, device=DEVICE)
    q = torch.randn(len(lengths), heads, head_dim, device=DEVICE).to(dtype)
    right = torch.empty(q.shape, dtype=torch.float64, device=DEVICE)
    for i, length in enumerate(lengths):
        pages = torch.from_numpy(pool.allocate(-(-length // block_size))).to(DEVICE)
        tables[i, : pages.numel()] = pages
        k, v = torch.randn(2, length, kv_heads, head_dim, device=DEVICE).to(dtype)
        token = torch.arange(length, device=DEVICE)
        cache.pages[pages[token // block_size], 1, 0, token % block_size] = k
        cache.pages[pages[token // block_size], 1, 1, token % block_size] = v
        group = heads // kv_heads
        keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("hd,thd->ht", q[i].double(), keys) * head_dim**-0.5
        right[i] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
    context = torch.tensor(lengths, device=DEVICE)
    got = paged_decode(cache, 1, q, tables, context)
    assert float((got.double() - right).abs().max() / right.abs().max()) < TOLERANCE[dtype]
