"""A random model, its tokenizer and adapters, as files that any engine can load."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@dataclass(frozen=True)
class Size:
    """A Llama."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def parameters(self) -> int:
        """Weights, embeddings and head included."""
        kv = self.num_key_value_heads * self.head_dim
        layer = self.hidden_size * (2 * self.hidden_size + 2 * kv + 3 * self.intermediate_size)
        return self.num_hidden_layers * layer + 2 * self.vocab_size * self.hidden_size


SIZES = {
    "3m": Size(128, 4, 4, 2, 352, 4096),
    "20m": Size(384, 6, 6, 2, 1024, 8192),
    "60m": Size(640, 10, 10, 5, 1728, 8192),
}
_MODULES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


def write_model(size: Size, folder: Path) -> None:
    """Write a model with random weights and a tokenizer in which every token has a text of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.06

    tensors = {
        "model.embed_tokens.weight": random(size.vocab_size, size.hidden_size),
        "lm_head.weight": random(size.vocab_size, size.hidden_size),
        "model.norm.weight": torch.ones(size.hidden_size),
    }
    for layer in range(size.num_hidden_layers):
        place = f"model.layers.{layer}"
        for module, (rows, columns) in shapes(size).items():
            tensors[f"{place}.{_MODULES[module]}.{module}.weight"] = random(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{place}.{norm}.weight"] = torch.ones(size.hidden_size)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": size.head_dim,
    }
    (folder / "config.json").write_text(json.dumps(config | asdict(size)), encoding="utf-8")
    _write_tokenizer(size.vocab_size, folder)


def write_adapter(size: Size, rank: int, seed: int, folder: Path) -> None:
    """Write a random adapter on all linear maps, as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1000 + seed)
    tensors = {}
    for layer in range(size.num_hidden_layers):
        for module, (rows, columns) in shapes(size).items():
            name = f"base_model.model.model.layers.{layer}.{_MODULES[module]}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * columns**-0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(_MODULES)}
    more = {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "model"}
    (folder / "adapter_config.json").write_text(json.dumps(config | more), encoding="utf-8")


def shapes(size: Size) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every linear map of a layer."""
    hidden, kv, inner = size.hidden_size, size.num_key_value_heads * size.head_dim, size.intermediate_size
    return {
        "q_proj": (hidden, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: 2 + at for at, letter in enumerate(alphabet)}
    vocabulary |= {f"\u0120{number:x}": number for number in range(len(vocabulary), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
