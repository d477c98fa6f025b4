"""Memory and loading models: KV tokens beside weights and adapter slots, and adapter load times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from capplan.datasets import GpuSheet
from capplan.errors import InfeasibleError
from capplan.serving import (
    VLLM_ENGINE,
    kv_bytes_per_token,
    lora_elements_per_rank,
    lora_matrices,
    release_of,
    slot_bytes,
    weight_bytes,
)
from capplan.spec import (
    LORA_MODULES,
    Coefficient,
    EngineArgs,
    EngineLimits,
    Fit,
    FittedModel,
    ModelArch,
    Profile,
)

Floats = NDArray[np.float64]
Slots = TypeVar("Slots", float, Floats)

MEMORY_FORM = "slots-and-reserve"
"""``gpu_memory * utilization - weights - reserved - a_max * (slot_factor * slot_bytes(s_max) + slot_overhead)
- max(bytes_per_batched_token * max_num_batched_tokens, bytes_per_seq * max(0, max_num_seqs -
seqs_in_reserve))``: vLLM's start-up run computes max_num_batched_tokens tokens and samples for max_num_seqs
requests, and either the activations of that run or its logits set the peak. Without the optional
``bytes_per_batched_token``, the activations are part of the reserve.
"""

_ACTIVATIONS = "bytes_per_batched_token"

LOADING_FORM = "copies-and-bytes"
"""``gpu_ms = serving_factor * (gpu_base + gpu_per_rank * rank + gpu_padding [rank < s_max])`` and
``disk_ms = disk_base + disk_per_rank * rank``.

An engine copies every matrix of a slot separately, so the number of copies weighs more than the bytes. A rank
below the slot's is copied into a strided view, which is slower. The copies were timed on an idle engine;
between the steps of a busy one they take `serving_factor` times as long.
"""

HOST_FORM = "per-request"

ASSUMED = "assumed, not measured"


@dataclass(frozen=True)
class KvBudget:
    """Memory of one GPU of a profile, for KV tokens under many settings."""

    memory_bytes: float
    """GPU memory that the engine may use."""
    weight_bytes: int
    reserved_bytes: float
    slot_bytes_per_rank: int
    slot_factor: float
    slot_overhead_bytes: float
    bytes_per_seq: float
    seqs_in_reserve: float
    bytes_per_batched_token: float
    block_bytes: int
    block_tokens: int

    def tokens(self, args: EngineArgs | EngineLimits, a_max: int | None = None) -> int:
        """Return the KV tokens beside the slots, or beside `a_max` of that rank, in whole blocks."""
        blocks = self._blocks(args.max_loras if a_max is None else a_max, args)
        return max(0, int(blocks)) * self.block_tokens

    def tokens_beside(self, a_max: Floats, args: EngineArgs | EngineLimits) -> Floats:
        """Return `tokens` for several numbers of slots, of the shape of `a_max`."""
        return np.maximum(0.0, self._blocks(a_max, args)) * self.block_tokens

    def _blocks(self, a_max: Slots, args: EngineArgs | EngineLimits) -> Slots:
        slot = self.slot_factor * (args.max_lora_rank * self.slot_bytes_per_rank)
        logits = self.bytes_per_seq * max(0.0, args.max_num_seqs - self.seqs_in_reserve)
        taken = (
            self.weight_bytes
            + self.reserved_bytes
            + a_max * (slot + self.slot_overhead_bytes)
            + max(logits, self.bytes_per_batched_token * args.max_num_batched_tokens)
        )
        return (self.memory_bytes - taken) // self.block_bytes


def kv_budget(profile: Profile, gpu_memory_utilization: float) -> KvBudget:
    """Return the memory of one GPU of a profile."""
    memory, engine, arch = profile.memory, profile.engine, profile.model
    if engine.name == VLLM_ENGINE and not release_of(engine.version).start_up.windows_save_kv:
        arch = arch.replace(window_layers=None)  # one kind of blocks for all layers
    return KvBudget(
        memory_bytes=profile.gpu.memory_bytes * gpu_memory_utilization,
        weight_bytes=weight_bytes(profile.model, profile.tp),
        reserved_bytes=memory.value("reserved_bytes"),
        slot_bytes_per_rank=slot_bytes(profile.model, engine, 1, profile.tp),
        slot_factor=memory.value("slot_factor"),
        slot_overhead_bytes=memory.value("slot_overhead_bytes"),
        bytes_per_seq=memory.value("bytes_per_seq"),
        seqs_in_reserve=memory.value("seqs_in_reserve"),
        bytes_per_batched_token=memory.value(_ACTIVATIONS) if _ACTIVATIONS in memory.coefficients else 0.0,
        block_bytes=kv_bytes_per_token(arch, profile.tp) * engine.block_size,
        block_tokens=engine.block_size,
    )


def require_kv_tokens(profile: Profile, args: EngineArgs, a_max: int) -> int:
    """Return the KV tokens beside `a_max` slots, at least one request of `max_model_len`.

    Raises
    ------
    InfeasibleError
        With reason ``memory`` when it does not fit: the engine would refuse to start.
    """
    tokens = kv_budget(profile, args.gpu_memory_utilization).tokens(args, a_max)
    if tokens < args.max_model_len:
        raise InfeasibleError(
            f"memory: weights, {a_max} adapter slots of rank {args.max_lora_rank} and max_num_seqs "
            f"{args.max_num_seqs} leave {tokens} KV tokens in {args.gpu_memory_utilization:g} of a "
            f"{profile.gpu.name}, fewer than one "
            f"request of max_model_len {args.max_model_len}",
            reason="memory",
        )
    return tokens


class LoadShare(NamedTuple):
    """Parts of a load that an adapter causes, as shares of one that targets all modules of the engine."""

    matrices: float = 1.0
    elements: float = 1.0


WHOLE: Final = LoadShare()


def load_share(profile: Profile, modules: Sequence[str] | None) -> LoadShare:
    """Return the share of an adapter that targets these modules; None: all that the engine adapts."""
    if modules is None:
        return WHOLE
    every = profile.engine.target_modules or LORA_MODULES
    elements = [lora_elements_per_rank(profile.model, modules=each) for each in (modules, every)]
    pairs = [lora_matrices(profile.model, each) for each in (modules, every)]
    return LoadShare(pairs[0] / pairs[1], elements[0] / elements[1])


def gpu_load_ms(loading: FittedModel, rank: int, s_max: int, share: LoadShare = WHOLE) -> float:
    """Return the milliseconds of one copy from host memory into a slot."""
    padding = loading.value("gpu_padding_ms") if rank < s_max else 0.0
    copies_ms = share.matrices * (loading.value("gpu_base_ms") + padding)
    bytes_ms = share.elements * loading.value("gpu_ms_per_rank") * rank
    return loading.value("serving_factor") * (copies_ms + bytes_ms)


def disk_load_ms(loading: FittedModel, rank: int, share: LoadShare = WHOLE) -> float:
    """Return the milliseconds of one read from disk into host memory."""
    return loading.value("disk_base_ms") + share.elements * loading.value("disk_ms_per_rank") * rank


def memory_model(
    sheet: GpuSheet, arch: ModelArch, tp: int = 1, engine_version: str | None = None
) -> FittedModel:
    """Return the memory that vLLM, by default the newest, keeps back beside weights, slots and KV tokens."""
    start_up = release_of(engine_version).start_up
    is_linked = sheet.peer_bytes_per_s > sheet.host_bytes_per_s
    reserved = start_up.reserved_bytes if is_linked else start_up.reserved_bytes_by_pcie
    values = {
        "slot_factor": 1.0,
        "slot_overhead_bytes": 0.0,
        "reserved_bytes": reserved + (start_up.collectives_bytes if tp > 1 else 0.0),
        "bytes_per_seq": start_up.logit_copies * 4.0 * arch.vocab_size,
        "seqs_in_reserve": start_up.seqs_in_reserve,
    }
    if not start_up.activations_in_reserve:
        # One layer's activations live at a time: gate and up, their product, and the residual stream twice.
        values[_ACTIVATIONS] = float(arch.dtype_bytes * (_mlp_width(arch, tp) + 2 * arch.hidden_size))
    return assumed_model(MEMORY_FORM, values, start_up.source if is_linked else start_up.source_by_pcie)


def _mlp_width(arch: ModelArch, tp: int) -> int:
    """Return the elements per token that the MLP or the experts of a layer hold at a time."""
    experts = arch.experts
    if experts is None:
        return 3 * arch.intermediate_size // tp
    inner = experts.intermediate_size // tp
    return experts.per_token * (max(2 * inner, arch.hidden_size) + inner)


def assumed_model(
    form: str,
    values: Mapping[str, float],
    source: str = ASSUMED,
    error_formula: str = "none: nothing was measured",
) -> FittedModel:
    """Return a model of coefficients that were not fitted."""
    return FittedModel(
        form=form,
        coefficients={name: Coefficient(value=value) for name, value in values.items()},
        fit=Fit(source=source, samples=0, error_formula=error_formula, error=0.0),
    )
