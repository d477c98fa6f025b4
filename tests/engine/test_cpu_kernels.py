"""CPU kernels against float64, with NaN in memory that must not be read."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the helpers are those of the GPU's kernels (extra `engine`)")

from capplan.engine import ModelConfig
from capplan.engine._input_batch import Decodes, ModelInputs
from capplan.engine._pool import PagePool, kv_page_elements
from capplan.engine.kernels._cpu import GEMM_FROM, CompiledAttention, CompiledLoRA, CompiledPointwise
from capplan.engine.lora import B
from capplan.engine.lora._adapter import SITES
from capplan.engine.models._decoder import KvCache, RopeTable
from capplan.engine.models._weights import Linear
from tests.engine.test_kernels import CONFIG, LAYOUT, expected, placed_adapters

CPU = torch.device("cpu")


@pytest.mark.parametrize("where", ["slots", "pages"])
@pytest.mark.parametrize("most", [3, GEMM_FROM + 9], ids=["decode", "prefill"])
def test_each_token_uses_its_own_adapter(where: str, most: int) -> None:
    adapters, memory, tables, placements, segments = placed_adapters(where, torch.float32, most)
    tokens = segments[-1].end
    applied = CompiledLoRA(
        LAYOUT, tables, memory.storage, segments, tokens, lambda number: placements[number].views
    )
    layer = int(np.random.default_rng().integers(CONFIG.layers))
    for site, modules in enumerate(SITES):
        x = torch.randn(tokens, LAYOUT.sizes[modules[0]][0])
        out = torch.randn(tokens, sum(LAYOUT.sizes[module][B] for module in modules))
        right = out.double().clone()
        for adapter, start, end in segments:
            if adapter:
                here = expected(adapters[adapter], layer, site, x[start:end], out[start:end])
                right[start:end] = here
        applied.add(layer, site, x, out)
        assert float((out.double() - right).abs().max() / right.abs().max()) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 14), (4, 4, 8), (8, 1, 64)])
def test_decodes_attend_to_their_own_pages_and_new_keys(heads: int, kv_heads: int, head_dim: int) -> None:
    rng = np.random.default_rng()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "max_positions": 512}
    config = ModelConfig(
        name="attention", layers=2, heads=heads, kv_heads=kv_heads, head_dim=head_dim, **sizes
    )
    block_size = int(rng.integers(3, 20))
    pool = PagePool(120, kv_page_elements(config, block_size), torch.float32, CPU)
    pool.tensor.fill_(torch.nan)
    cache = KvCache(config, pool, block_size)
    rope = RopeTable(config, 512, torch.float32, CPU)
    lengths = torch.tensor([1, 2, block_size, block_size + 1, 70, 131])
    tables = torch.zeros((len(lengths), 131 // block_size + 1), dtype=torch.int64)
    known = []
    for i, length in enumerate(lengths.tolist()):
        pages = torch.from_numpy(pool.allocate(-(-length // block_size)))
        tables[i, : pages.numel()] = pages
        k, v = torch.randn(2, length - 1, kv_heads, head_dim)
        token = torch.arange(length - 1)
        cache.pages[pages[token // block_size], 1, 0, token % block_size] = k
        cache.pages[pages[token // block_size], 1, 1, token % block_size] = v
        known.append((k, v))
    positions = lengths - 1
    own = tables[torch.arange(len(lengths)), positions // block_size]
    none = torch.zeros(0, dtype=torch.int64)
    decodes = Decodes(torch.arange(len(lengths)), lengths, tables)
    batch = ModelInputs(none, positions, own, positions % block_size, none, decodes, (), (), none)
    # Scores far apart: small ones underflow.
    qkv = torch.randn(len(lengths), (heads + 2 * kv_heads) * head_dim) * 6
    before = qkv.clone()
    attention = CompiledAttention(config, cache, rope, batch)
    got = attention(1, attention.rotate_and_store(1, qkv))
    assert float((got.double() - right_answer(config, rope, positions, before, known)).abs().max()) < 1e-4


def right_answer(
    config: ModelConfig,
    rope: RopeTable,
    positions: torch.Tensor,
    qkv: torch.Tensor,
    known: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Return the attention of each token over known keys and values and its own, in float64."""
    cos, sin = (table.double() for table in rope.at(positions))
    heads = qkv.double().view(qkv.shape[0], -1, config.head_dim)
    turned = heads * cos + heads.roll(config.head_dim // 2, dims=-1) * sin
    group = config.heads // config.kv_heads
    answers = []
    for i, (k, v) in enumerate(known):
        own_k = turned[i, config.heads : config.heads + config.kv_heads]
        own_v = heads[i, config.heads + config.kv_heads :]
        keys = torch.cat([k.double(), own_k[None]]).repeat_interleave(group, dim=1)
        values = torch.cat([v.double(), own_v[None]]).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", turned[i, : config.heads], keys) * config.head_dim**-0.5
        answers.append(torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values).flatten())
    return torch.stack(answers)


def test_norms_equal_float64_rms_norms() -> None:
    x, more, weight = torch.randn(5, 37), torch.randn(5, 37), torch.randn(37)
    norms = CompiledPointwise(1e-3)
    total = x.double() + more.double()

    def right(value: torch.Tensor) -> torch.Tensor:
        return value * (value.pow(2).mean(dim=1, keepdim=True) + 1e-3).rsqrt() * weight.double()

    assert torch.allclose(norms.norm(x, weight).double(), right(x.double()), atol=1e-5)
    assert torch.allclose(norms.add_norm(x, more, weight).double(), right(total), atol=1e-5)
    assert torch.allclose(x.double(), total, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_a_packed_linear_equals_the_plain_one(tokens: int, bias: bool) -> None:
    linear = Linear(torch.randn(500, 300), torch.randn(500) if bias else None)
    x = torch.randn(tokens, 300)
    right = x.double() @ linear.weight.double().t() + (0.0 if linear.bias is None else linear.bias.double())
    assert linear.pack().packed == torch.backends.mkldnn.is_available()
    assert float((linear.pack()(x).double() - right).abs().max() / right.abs().max()) < 1e-5
    assert not Linear(torch.randn(9, 9)).pack().packed
