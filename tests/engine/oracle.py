"""Random tiny models and adapters written by transformers and peft, and their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # they take ten seconds to import
    from peft import LoraConfig
    from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def llama(**fields: Any) -> LlamaConfig:
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "bos_token_id": None,
        "initializer_range": 0.3,
    }
    return LlamaConfig(**(sizes | fields))


def qwen2(**fields: Any) -> Qwen2Config:
    from transformers import Qwen2Config

    sizes = llama().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = (
        "num_key_value_heads",
        "max_position_embeddings",
        "eos_token_id",
        "bos_token_id",
        "initializer_range",
    )
    return Qwen2Config(**({name: sizes[name] for name in (*names, *more)} | fields))


@dataclass(frozen=True)
class Oracle:
    """A model with adapters on disk, and in transformers and peft, one copy per adapter."""

    folder: Path
    adapters: dict[str, Path]
    models: dict[str | None, Any]

    def logits(self, tokens: Sequence[int], adapter: str | None) -> torch.Tensor:
        """Logits after every token, shape (tokens, vocabulary)."""
        with torch.no_grad():
            result: torch.Tensor = self.models[adapter](torch.tensor([list(tokens)])).logits[0]
        return result


def write_model(config: PretrainedConfig, folder: Path, seed: int) -> None:
    """Write a random model; biases and norms are random, too, so that an omitted one changes the output."""
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
    model.save_pretrained(folder)


def write_adapter(base: Path, config: LoraConfig, folder: Path, seed: int) -> Any:
    """Write a random adapter and return the model that has it."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model.eval()


def make_oracle(
    config: PretrainedConfig, adapters: dict[str, LoraConfig], folder: Path, seed: int = 0
) -> Oracle:
    """Return an oracle with these adapters."""
    from transformers import AutoModelForCausalLM

    base = folder / "model"
    write_model(config, base, seed)
    models: dict[str | None, Any] = {None: AutoModelForCausalLM.from_pretrained(base).eval()}
    for number, (name, chosen) in enumerate(adapters.items()):
        models[name] = write_adapter(base, chosen, folder / name, seed + 1 + number)
    return Oracle(base, {name: folder / name for name in adapters}, models)


def lora(rank: int, alpha: float | None = None, **fields: Any) -> LoraConfig:
    from peft import LoraConfig

    settings = {"r": rank, "lora_alpha": alpha or 2 * rank, "target_modules": list(ALL_MODULES)}
    return LoraConfig(**(settings | fields))
