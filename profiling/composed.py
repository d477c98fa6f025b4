"""Composed profiles that ship: ``python -m capplan.profiling.composed [FOLDER]`` writes them again.

Every GPU with measured operators, with the models of `MODELS` whose dtype it has, at the tensor parallelism
that fits: weights and a request of the model's default length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import capplan.datasets
from capplan.errors import CapplanError
from capplan.models import require_kv_tokens
from capplan.models.compose import SYSTEMS, compose_profile, known_decoder
from capplan.serving import rules_of_version
from capplan.spec import EngineArgs, Profile, write_text_atomic

MODELS: Final = (
    ("llama-3.1-8b", "bfloat16"),
    ("llama-3.1-8b", "fp8"),
    ("qwen2.5-7b", "bfloat16"),
    ("qwen3-14b", "bfloat16"),
    ("qwen3-32b", "bfloat16"),
    ("qwen3-32b", "fp8"),
    ("llama-3.1-70b", "bfloat16"),
    ("llama-3.1-70b", "fp8"),
    ("qwen3-30b-a3b", "bfloat16"),
    ("qwen3-30b-a3b-fp8", None),
    ("gpt-oss-20b", None),
    ("gpt-oss-120b", None),
    ("minimax-m2", None),
)
"""Models with the dtype of their weights; None: that of their config.json."""

VERSION: Final = "0.15.1"
"""Version of vLLM whose host terms rest on most rows."""

EXPERTS_VERSION: Final = "0.19.0"
"""Version whose mixtures of experts were compared most."""

MAX_NUM_BATCHED_TOKENS: Final = 8192

_TPS: Final = (1, 2, 4, 8)
_COMMAND: Final = "python -m capplan.profiling.composed"


def shipped_profiles() -> Iterator[Profile]:
    """Yield the composed profiles that ship."""
    for system in SYSTEMS:
        for name, dtype in MODELS:
            decoder = known_decoder(name, dtype)
            version = VERSION if decoder.arch.experts is None else EXPERTS_VERSION
            rules = rules_of_version(version)
            for tp in _TPS:
                try:
                    profile = compose_profile(system.key, decoder, rules, version, tp=tp, command=_COMMAND)
                    require_kv_tokens(profile, _engine_args(profile), a_max=0)
                except CapplanError:  # no operators of the dtype, heads that `tp` does not divide, or memory
                    continue
                yield profile


def _engine_args(profile: Profile) -> EngineArgs:
    """Return vLLM's defaults without adapters."""
    return EngineArgs(
        max_loras=0,
        max_lora_rank=0,
        max_num_seqs=256,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        gpu_memory_utilization=0.9,
        max_model_len=profile.model.default_max_model_len,
    )


def main() -> None:
    """Write the profiles."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(capplan.datasets.__file__).parent / "profiles"
    )
    folder = parser.parse_args().folder
    for profile in shipped_profiles():
        path = folder / f"{profile.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, profile.model_dump_json(indent=1) + "\n")
        sys.stderr.write(f"{profile.name}\n")


if __name__ == "__main__":
    main()
