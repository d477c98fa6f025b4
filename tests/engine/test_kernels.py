"""Triton kernels against float64, under the interpreter where there is no GPU.

Inputs are fresh, everything that a kernel must not read is poisoned with NaN, and so is what it must write.
"""

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels need triton (extra `engine`)")

from capplan.engine import ModelConfig, Segment
from capplan.engine._input_batch import ModelInputs, Prefill
from capplan.engine._pool import PagePool, kv_page_elements
from capplan.engine.kernels import Kind, TritonLoRA
from capplan.engine.kernels._triton_attention import (
    TritonAttention,
    attention_splits,
    decode_launches,
    prompt_launch,
    prompt_tiles,
)
from capplan.engine.kernels._triton_layers import TritonPointwise
from capplan.engine.kernels._triton_lora import TILE_TOKENS, StepLoRA
from capplan.engine.kernels._triton_lora_kernels import shrink_tiles, shrink_tokens
from capplan.engine.lora import MODULES, AdapterLayout, HostAdapter, RowTables
from capplan.engine.lora._adapter import SITES, pack
from capplan.engine.lora._memory import AdapterMemory, AdapterPlacement, StaticSlots, UnifiedPages
from capplan.engine.models._decoder import GATE_UP, QKV, KvCache, Pointwise, RopeTable, TorchAttention

pytestmark = pytest.mark.long

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = ModelConfig(
    name="odd",
    layers=2,
    hidden_size=72,
    heads=20,  # more pairs than one program rotates
    kv_heads=2,
    head_dim=14,
    intermediate_size=440,  # more columns than one program takes
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
    offsets = np.concatenate([[0], np.cumsum(LAYOUT.row_lengths(adapter.ranks))])[:-1]
    views = AdapterPlacement(LAYOUT, adapter.flat.to(DEVICE), adapter.ranks, offsets).views[layer][site]
    result = out.double().clone()
    if views.rank:
        h = torch.cat([x.double() @ part.rows.double().t() for part in views.shrinks], dim=1)
        for part in views.expands:
            result[:, part.out_start : part.out_end] += h[:, part.start : part.end] @ part.rows.double()
    return result


class PlacedAdapters(NamedTuple):
    """Adapters of several ranks in memory, and segments of tokens of each and of the base model."""

    adapters: dict[int, HostAdapter]
    memory: AdapterMemory
    tables: RowTables
    placements: dict[int, AdapterPlacement]
    segments: list[Segment]


def placed_adapters(where: str, dtype: torch.dtype, most: int) -> PlacedAdapters:
    """Return adapters whose segments have fewer than `most` tokens."""
    rng = np.random.default_rng()
    ranks = [1, 5, 8, 17, 24]
    adapters = {number: random_adapter(rng, rank, dtype) for number, rank in enumerate(ranks, start=1)}
    memory = memory_of(where, len(ranks), dtype)
    tables = RowTables(LAYOUT, len(ranks), S_MAX, DEVICE)
    placements = {}
    for number, adapter in adapters.items():
        placements[number] = placement = memory.place(number, adapter.ranks)
        memory.clear(number)
        placement.copy_from(adapter)
        tables.add(number, placement, memory.padding(number, S_MAX))
    order = [0, *rng.permutation(list(adapters)).tolist(), 0]
    ends = np.cumsum(rng.integers(1, most, len(order)))
    segments = [
        Segment(a, int(e - n), int(e)) for a, e, n in zip(order, ends, np.diff(ends, prepend=0), strict=True)
    ]
    return PlacedAdapters(adapters, memory, tables, placements, segments)


@pytest.mark.parametrize(
    ("where", "dtype"),
    [("slots", torch.float32), ("pages", torch.float32), ("slots", torch.bfloat16), ("pages", torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bgmv", "mbgmv", "sgmv"])
def test_each_token_uses_its_own_adapter(where: str, kind: Kind, dtype: torch.dtype) -> None:
    adapters, memory, tables, _, segments = placed_adapters(where, dtype, 20 if kind == "sgmv" else 3)
    tokens = segments[-1].end
    applied = TritonLoRA(LAYOUT, tables, memory.storage, segments, tokens, kind)
    check_products(applied, adapters, segments, tokens, dtype)


def check_products(
    applied: StepLoRA,
    adapters: Mapping[int, HostAdapter],
    segments: Sequence[Segment],
    tokens: int,
    dtype: torch.dtype,
) -> None:
    """Compare the products at every site of a layer with float64; buffers hold NaN."""
    layer = int(np.random.default_rng().integers(CONFIG.layers))
    for site, modules in enumerate(SITES):
        width = sum(LAYOUT.sizes[module][1] for module in modules)
        x = torch.randn(tokens, LAYOUT.sizes[modules[0]][0] + 3, device=DEVICE).to(dtype)[:, :-3]
        base = torch.randn(tokens, width, device=DEVICE).to(dtype)
        right = base.double().clone()
        for adapter, start, end in segments:
            if adapter:
                right[start:end] = expected(adapters[adapter], layer, site, x[start:end], base[start:end])
        out, again = base.clone(), base.clone()
        poison(applied)
        applied.add(layer, site, x, out)
        pairs = [(out, right)]
        poison(applied)
        if site == GATE_UP:
            gated = applied.add_and_gate(layer, x, again, Pointwise(1e-5))
            pairs.append((gated, Pointwise(1e-5).gate(right)))
        if site == QKV:
            ours, exact = attention_of(tokens, dtype, dtype), attention_of(tokens, dtype, torch.float64)
            q = applied.add_and_rotate(layer, x, again, ours)
            pairs.append((q, exact.rotate_and_store(layer, right)))
            kv, right_kv = (each.cache.pool.tensor for each in (ours, exact))
            assert torch.equal(kv.isnan(), right_kv.isnan())
            pairs.append((kv.nan_to_num(), right_kv.nan_to_num()))
        for mine, correct in pairs:
            error = (mine.double() - correct).abs().max() / correct.abs().max()
            assert float(error) < TOLERANCE[dtype]


def poison(applied: StepLoRA) -> None:
    """Fill buffers with NaN."""
    applied._h.fill_(torch.nan)
    if applied._kind == "sgmv":
        applied._parts.fill_(torch.nan)


def attention_of(tokens: int, dtype: torch.dtype, stored: torch.dtype) -> TorchAttention:
    """Return attention with angles of `dtype`, whose tokens go to the first pages; all of them hold NaN."""
    pool = PagePool(tokens, kv_page_elements(CONFIG, 4), stored, DEVICE)
    pool.tensor.fill_(torch.nan)
    at = torch.arange(tokens, device=DEVICE).flip(0)
    nothing = torch.zeros(0, dtype=torch.int64)
    inputs = ModelInputs(at, at % 64, 1 + at // 4, at % 4, nothing, None, (), (), nothing)
    attention = TorchAttention(CONFIG, KvCache(CONFIG, pool, 4), RopeTable(CONFIG, 64, dtype, DEVICE), inputs)
    attention.cos, attention.sin = attention.cos.to(stored), attention.sin.to(stored)
    return attention


LONG_RANK = 128


@settings(max_examples=8, deadline=None)
@given(
    each=st.lists(
        st.tuples(
            st.integers(0, 40) | st.sampled_from([16, 17, 64, 65, 300]),
            st.sampled_from([8, 16, 33, 64, LONG_RANK]),
        ),
        min_size=1,
        max_size=5,
    ),
    base=st.integers(0, 3),
    padding=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
)
def test_tiles_of_a_captured_step(
    each: list[tuple[int, int]], base: int, padding: int, dtype: torch.dtype
) -> None:
    """Shapes are those of the largest adapters and the most tokens; some adapters have no token."""
    rng = np.random.default_rng()
    memory = StaticSlots(LAYOUT, len(each), LONG_RANK, dtype, DEVICE)
    tables = RowTables(LAYOUT, len(each), LONG_RANK, DEVICE)
    adapters, segments, numbers = {}, [], [-1] * base
    for adapter, (tokens, rank) in enumerate(each, start=1):
        adapters[adapter] = random_adapter(rng, rank, dtype)
        placement = memory.place(adapter, adapters[adapter].ranks)
        placement.copy_from(adapters[adapter])
        tables.add(adapter, placement, memory.padding(adapter, LONG_RANK))
        if tokens:
            segments.append(Segment(adapter, len(numbers), len(numbers) + tokens))
            numbers += [tables.number_of[adapter]] * tokens
    numbers += [-1] * (padding + (not numbers))
    row_of_token = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    applied = StepLoRA(LAYOUT, tables, memory.storage, row_of_token, "sgmv", LONG_RANK)
    applied.tiles_launch().run()
    count, *starts = applied._tiles.tolist()
    assert starts[:count] == [at for _, start, end in segments for at in range(start, end, TILE_TOKENS)]
    check_products(applied, adapters, segments, len(numbers), dtype)
    assert not applied._arrived.any()


@pytest.mark.parametrize(
    ("least", "tokens_each", "tiled"), [(None, 1, False), (None, 2, True), (3, 3, True), (9, 8, False)]
)
def test_tiles_are_used_from_the_measured_tokens_per_adapter(
    least: int | None, tokens_each: int, tiled: bool
) -> None:
    memory = StaticSlots(LAYOUT, 2, 8, torch.float32, DEVICE)
    tables = RowTables(LAYOUT, 2, 8, DEVICE)
    for number in (1, 2):
        tables.add(number, memory.place(number, LAYOUT.ranks(8)), memory.padding(number, 8))
    segments = [Segment(0, 0, 50), Segment(1, 50, 50 + 2 * tokens_each - 1)]
    segments.append(Segment(2, segments[-1].end, segments[-1].end + 1))
    step = TritonLoRA(LAYOUT, tables, memory.storage, segments, segments[-1].end, sgmv_from_tokens=least)
    x = torch.zeros(segments[-1].end, LAYOUT.sizes[3][0], device=DEVICE)
    assert step.shrink_launch(0, 1, x).kernel is (shrink_tiles if tiled else shrink_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_and_activation(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wide, more = torch.randn(2, 5, 1203, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(1200, generator=generator).to(DEVICE, dtype)
    x, ours, right = wide[:, 3:].clone(), TritonPointwise(1e-3), Pointwise(1e-3)
    total = (x + more[:, 3:]).double()
    pairs = [
        (ours.norm(x, weight), right.norm(x.double(), weight.double())),
        (ours.gate(wide[:, 3:]), right.gate(wide[:, 3:].double())),
        (ours.add_norm(x, more[:, 3:], weight), right.norm(total, weight.double())),
        (x, total),
    ]
    for mine, exact in pairs:
        assert float((mine.double() - exact).abs().max() / exact.abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [(6, 2, 14), (4, 4, 20), (8, 1, 64), (34, 2, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_writes_keys_and_values_to_the_page_of_each_token(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Everything else in memory stays as it is: NaN."""
    tokens, block_size = 7, 5
    generator = torch.Generator().manual_seed(1)
    cache = paged_requests([40], heads, block_size, dtype, 0).cache
    config = CONFIG.replace(heads=heads[0], kv_heads=heads[1], head_dim=heads[2])
    spots = torch.randperm(8 * block_size, generator=generator)[:tokens].to(DEVICE)
    nothing = torch.zeros(0, dtype=torch.int64)
    positions = torch.randint(64, (tokens,), generator=generator).to(DEVICE)
    inputs = ModelInputs(
        positions, positions, 1 + spots // block_size, spots % block_size, nothing, None, (), (), nothing
    )
    rope = RopeTable(config, 64, dtype, DEVICE)
    qkv = torch.randn(tokens, (heads[0] + 2 * heads[1]) * heads[2], generator=generator).to(DEVICE, dtype)
    found = []
    for attention in (TorchAttention, TritonAttention):
        cache.pool.tensor.fill_(torch.nan)
        q = attention(config, cache, rope, inputs).rotate_and_store(1, qkv.clone())
        found.append((q.double(), cache.pool.tensor.double()))
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs.isnan(), ours.isnan())
        assert float((theirs - ours).nan_to_num().abs().max()) < 4 * TOLERANCE[dtype]


class PagedRequests(NamedTuple):
    """Requests with random keys and values in random pages; everything else in memory is NaN."""

    cache: KvCache
    q: torch.Tensor
    tables: torch.Tensor
    context: torch.Tensor
    expected: torch.Tensor
    """Attention in float64."""


def paged_requests(
    lengths: Sequence[int], heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, seed: int
) -> PagedRequests:
    """Return requests of these contexts; `heads` are query heads, key heads and their width."""
    number, kv_heads, head_dim = heads
    shape = {"heads": number, "kv_heads": kv_heads, "head_dim": head_dim, "layers": 2}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "max_positions": 512}
    config = ModelConfig(name="attention", **shape, **sizes)
    blocks = [-(-length // block_size) for length in lengths]
    pool = PagePool(sum(blocks), kv_page_elements(config, block_size), dtype, DEVICE)
    pool.tensor.fill_(torch.nan)
    cache = KvCache(config, pool, block_size)
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(sum(blocks), generator=generator) + 1
    tables = torch.zeros((len(lengths), max(blocks)), dtype=torch.int64, device=DEVICE)
    q = torch.randn(len(lengths), number, head_dim, generator=generator).to(DEVICE, dtype)
    expected = torch.empty(q.shape, dtype=torch.float64, device=DEVICE)
    for i, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        pages, free = free[:count].to(DEVICE), free[count:]
        tables[i, :count] = pages
        k, v = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
        token = torch.arange(length, device=DEVICE)
        cache.pages[pages[token // block_size], 1, 0, token % block_size] = k
        cache.pages[pages[token // block_size], 1, 1, token % block_size] = v
        keys, values = (t.double().repeat_interleave(number // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("hd,thd->ht", q[i].double(), keys) * head_dim**-0.5
        expected[i] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
    return PagedRequests(cache, q, tables, torch.tensor(lengths, device=DEVICE), expected)


def attention_error(requests: PagedRequests, splits: int | None = None) -> float:
    """Return the largest error of decode attention relative to the largest output; buffers hold NaN."""
    out = torch.full_like(requests.q, torch.nan)
    cache, q, tables, context, expected = requests
    launches = decode_launches(cache, 1, q, tables, context, out, splits)
    for buffer in launches[0].arguments[4:6] if len(launches) > 1 else ():
        buffer.fill_(torch.nan)
    for launch in launches:
        launch.run()
    return float((out.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((6, 2, 14), torch.float32),
        ((4, 4, 20), torch.bfloat16),
        ((8, 1, 64), torch.float16),
        ((34, 2, 32), torch.float32),
    ],
    ids=str,
)
def test_decode_attention_reads_only_the_pages_of_its_request(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rng = np.random.default_rng()
    block_size = int(rng.integers(3, 20))
    requests = paged_requests([1, 2, block_size, block_size + 1, 70, 131], heads, block_size, dtype, 0)
    assert attention_error(requests, splits=1) < TOLERANCE[dtype]


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(
        st.integers(1, 800) | st.sampled_from([255, 256, 257, 512, 768]), min_size=1, max_size=3
    ),
    splits=st.integers(2, 20),
    group=st.integers(1, 5),
    block_size=st.integers(3, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_split_decode_attention_equals_attention_over_the_whole_context(
    lengths: list[int], splits: int, group: int, block_size: int, dtype: torch.dtype, seed: int
) -> None:
    requests = paged_requests(lengths, (2 * group, 2, 12), block_size, dtype, seed)
    assert attention_error(requests, splits) < TOLERANCE[dtype]


def prompts_error(
    prompts: Sequence[tuple[int, int]], group: int, block_size: int, dtype: torch.dtype
) -> float:
    """Return the largest error of the attention of prompts relative to the largest output.

    A prompt is its number of tokens in the step, and the number before them in its context. A token of no
    prompt follows each.
    """
    kv_heads, head_dim = 2, 20
    contexts = [tokens + before for tokens, before in prompts]
    cache, _, tables, _, _ = paged_requests(contexts, (group * 2, kv_heads, head_dim), block_size, dtype, 1)
    step = sum(tokens + 1 for tokens, _ in prompts)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(step, group * kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
    expected = torch.full(q.shape, torch.nan, dtype=torch.float64, device=DEVICE)
    start, prefills = 0, []
    for i, (tokens, before) in enumerate(prompts):
        pages = tables[i, : -(-contexts[i] // block_size)]
        prefills.append(Prefill(start, start + tokens, contexts[i], pages))
        known = (each[:, : contexts[i]].double() for each in cache.read(1, pages))
        k, v = (each.repeat_interleave(group, dim=0) for each in known)
        scores = torch.einsum("qhd,htd->hqt", q[start : start + tokens].double(), k) * head_dim**-0.5
        later = torch.ones(tokens, contexts[i], dtype=torch.bool, device=DEVICE).triu(before + 1)
        shares = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        expected[start : start + tokens] = torch.einsum("hqt,htd->qhd", shares, v)
        start += tokens + 1
    out = torch.full_like(q, torch.nan)
    tiles = prompt_tiles(prefills, group).to(DEVICE)
    prompt_launch(cache, 1, q, torch.cat([each.pages for each in prefills]), tiles, out).run()
    assert torch.equal(out.isnan(), expected.isnan()), "tokens of no prompt are not written"
    return float((out.double() - expected).nan_to_num().abs().max() / expected.nan_to_num().abs().max())


@settings(max_examples=15, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 90) | st.sampled_from([16, 32, 64]), st.integers(0, 150)),
        min_size=1,
        max_size=4,
    ),
    group=st.sampled_from([1, 2, 4, 7, 70]),
    block_size=st.integers(3, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_prompts_attend_to_their_own_context_up_to_each_token(
    prompts: list[tuple[int, int]], group: int, block_size: int, dtype: torch.dtype
) -> None:
    assert prompts_error(prompts, group, block_size, dtype) < TOLERANCE[dtype]


def test_split_decode_attention_over_32k_tokens() -> None:
    requests = paged_requests([32768, 5], (4, 1, 128), 16, torch.float32, 0)
    assert attention_splits(2, 32768, DEVICE) > 1
    assert attention_error(requests) < TOLERANCE[torch.float32]


def test_contexts_are_split_by_batch_and_length_but_not_by_their_contents() -> None:
    """A CUDA graph replays one grid for every context that its block tables can hold."""
    cpu = torch.device("cpu")
    small, large = attention_splits(8, 4096, cpu), attention_splits(256 * 8, 4096, cpu)
    assert small > large == 1
    assert attention_splits(8, 200, cpu) == 1
    assert attention_splits(256 * 8, 131072, cpu) > 1
    requests = paged_requests([700, 1], (4, 2, 12), 16, torch.float32, 0)
    grids = [
        [
            launch.grid
            for launch in decode_launches(requests.cache, 0, requests.q, requests.tables, context, requests.q)
        ]
        for context in (requests.context, torch.ones_like(requests.context))
    ]
    assert grids[0] == grids[1]
    assert len(grids[0]) == 2
