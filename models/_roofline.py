"""Profiles from datasheets: bytes over bandwidth, operations over arithmetic, kernel launches.

The step model is the additive form with coefficients that follow from datasheets and assumed
`Efficiencies`. A step takes the larger of reading the weights and computing its tokens. The form is linear,
so it uses the chord of that maximum from 0 to `GRAPH_TOKENS` tokens, beyond which every known GPU is limited
by arithmetic. The chord lies above the maximum in between, where real engines overlap the two only partly.

Two things are on no datasheet. The cost of vLLM's LoRA kernels per layer, slot and adapter is that of the
shipped H100 profiles (`VllmLora`): blocks with little work take their time on any GPU. So are the memory an
engine keeps back and its time per request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from capplan.datasets import GpuSheet
from capplan.errors import InputError
from capplan.models._memory import HOST_FORM, LOADING_FORM, assumed_model, memory_model
from capplan.models._step_latency import ADDITIVE, GRAPH_TOKENS
from capplan.serving import (
    SLORA_ENGINE,
    VLLM_ENGINE,
    adapter_bytes,
    kv_bytes_per_token,
    lora_elements_per_rank,
    rules_of_engine,
    weight_bytes,
)
from capplan.spec import (
    ATTENTION_MODULES,
    FittedModel,
    Gpu,
    Kernel,
    ModelArch,
    Profile,
    ProfileEngine,
    Provenance,
    ProvenanceKind,
)

_MATRICES: Final = 14
"""A and B of q, k, v, o, gate, up and down: copied one by one."""

_REQUEST_MS: Final = 10.5


@dataclass(frozen=True)
class Efficiencies:
    """Shares of a datasheet's peak that kernels reach, and the cost of starting one.

    Round numbers, none of them fitted. `compute` and `kernel_us` were chosen in view of the batch-1 and the
    prefill rows of another tool's predictions for an H100 and an H200.
    """

    bandwidth: float = 0.92
    """Share of the memory's peak. STREAM on an H100 SXM reaches 3.08 of 3.35 TB/s."""
    compute: float = 0.75
    """Share of the tensor cores' peak in large matrix products."""
    host_link: float = 0.8
    """Share of the peak of PCIe, from pinned memory."""
    kernel_us: float = 4.0
    """Time between the starts of two small dependent kernels in a CUDA graph."""
    kernels_per_layer: int = 10
    """Norms, rotary positions, writing KV, attention in two parts, activation, four matrix products."""
    lora_kernels_per_layer: int = 8
    """Shrink and expand at each of four places."""
    reduce_us: float = 10.0
    """Latency of one all-reduce with tensor parallelism; there are two per layer."""
    copy_us: float = 6.0
    """Copy of one of an adapter's matrices into its slot."""
    disk_bytes_per_s: float = 2e9
    disk_ms: float = 10.0
    """Time to open an adapter's file."""
    step_ms: float = 0.0
    """Host time in a step that does not overlap the GPU."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "compute", "host_link"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise InputError("must be a share above 0 and at most 1", getattr(self, name), name)
        if not 0.0 <= self.step_ms < float("inf"):
            raise InputError("must be a finite number >= 0", self.step_ms, "step_ms")

    def in_words(self) -> str:
        """Return the assumptions in one sentence."""
        return (
            f"Efficiencies assumed: bandwidth {self.bandwidth:g}, arithmetic {self.compute:g}, host link "
            f"{self.host_link:g} of the peak; {self.kernels_per_layer} kernels per layer (and "
            f"{self.lora_kernels_per_layer} for LoRA) of at least {self.kernel_us:g} us; {self.step_ms:g} ms "
            "of the host per step"
        )


def efficiencies_of(sheet: GpuSheet, **given: float) -> Efficiencies:
    """Return the shares that a GPU reaches: given ones, else those fitted on it, else the assumed ones."""
    fitted = {} if sheet.shares is None else sheet.shares.model_dump(exclude={"source"})
    return Efficiencies(**fitted | given)


@dataclass(frozen=True)
class VllmLora:
    """Cost of vLLM's LoRA kernels: both shipped H100 profiles (vLLM 0.8.5), rounded.

    Microseconds per layer, named as in the additive form. The two profiles agree within 20 % except for
    `us_per_slot` and `us_per_slot_rank16`, although their models differ in width, heads and layers.
    """

    traffic: float = 4.7
    """Time of the kernels per token over the time to move their activations once. The profiles have 3.9 to
    5.5 with the 1.56 TB/s of their memory."""
    us_per_slot: float = 0.4
    us_per_slot_ktoken: float = 5.7
    us_per_slot_rank16: float = 0.24
    us_per_adapter: float = 7.6
    us_per_adapter_rank16: float = 2.0
    us_per_adapter_small_rank16: float = 3.3
    us_per_adapter_krequest: float = 8.4
    us_per_adapter_queued: float = 1.5

    def coefficients(self, layers: int) -> dict[str, float]:
        """Return coefficients of the additive form."""
        per_layer = {name: us for name, us in vars(self).items() if name.startswith("us_")}
        return {f"ms_{name.removeprefix('us_')}": layers * us / 1e3 for name, us in per_layer.items()}


def step_coefficients(
    sheet: GpuSheet, arch: ModelArch, tp: int, engine: EngineChoice, assumptions: Assumptions
) -> dict[str, float]:
    """Return the coefficients of the step model.

    LoRA kernels of vLLM cost what they did on the GPU of the shipped profiles; others cost their bytes and
    operations at true or padded ranks. BGMV gathers A and B for every token, in prefill from the L2 cache.
    """
    physics, lora = assumptions.physics, engine.lora
    carried = assumptions.vllm_lora if engine.lora and engine.kernel is Kernel.VLLM else None
    bytes_per_ms = 1e-3 * physics.bandwidth * sheet.bytes_per_s
    flop_per_ms = 1e-3 * physics.compute * sheet.flop_per_s
    embedding = arch.dtype_bytes * arch.vocab_size * arch.hidden_size / tp
    embeddings = embedding * (1 if arch.tied_embeddings else 2)
    inside = weight_bytes(arch, tp) - embeddings - arch.other_weight_bytes / tp
    read_ms = (inside + embedding) / bytes_per_ms  # one row per token of the one, all of the head's
    # Two operations of 16 bits per weight and token, also of quantized ones; prompts need the head for their
    # last token only.
    plain = arch.replace(linear_dtype_bytes=None, other_weight_bytes=0)
    compute_ms = 1e3 * 2.0 * (weight_bytes(plain, tp) - embeddings) / arch.dtype_bytes / flop_per_ms
    decode_ms = compute_ms + 1e3 * 2.0 * embedding / arch.dtype_bytes / flop_per_ms
    graph_ktokens = GRAPH_TOKENS / 1e3
    chord_ms = max(0.0, decode_ms - read_ms / graph_ktokens)
    kernels = physics.kernels_per_layer + (physics.lora_kernels_per_layer if lora else 0)
    reduce_ms, reduce_ms_per_ktoken = _all_reduce(sheet, arch, tp, physics)
    traffic = activation_bytes(arch, tp) / bytes_per_ms if lora else 0.0
    traffic *= 1.0 if carried is None else carried.traffic
    found = dict.fromkeys(ADDITIVE.coefficients, 0.0) | {
        "base_ms": read_ms + arch.layers * kernels * physics.kernel_us / 1e3 + reduce_ms + physics.step_ms,
        "ms_per_ktoken": chord_ms + reduce_ms_per_ktoken + 1e3 * traffic,
        "ms_per_ktoken_beyond_graphs": compute_ms - chord_ms,  # below 0 where the head outweighs what is read
        "ms_per_kv_ktoken": 1e3 * kv_bytes_per_token(arch, tp) / bytes_per_ms,
    }
    if carried is not None:
        return found | carried.coefficients(arch.layers)
    if lora:
        elements = lora_elements_per_rank(arch, tp, engine.profile_engine().target_modules)
        found["ms_per_decode_krank"] = 1e3 * elements * arch.dtype_bytes / bytes_per_ms
        found["ms_per_prefill_krank"] = 1e3 * 2.0 * elements / flop_per_ms
        if engine.kernel is Kernel.BGMV and sheet.l2_bytes_per_s is not None:
            found["ms_per_prefill_krank"] = 1e6 * elements * arch.dtype_bytes / sheet.l2_bytes_per_s
    return found


def activation_bytes(arch: ModelArch, tp: int) -> float:
    """Return the bytes per token that shrink reads and expand reads and writes, all layers."""
    query, kv = arch.heads * arch.head_dim // tp, arch.kv_heads * arch.head_dim // tp
    hidden, inner = arch.hidden_size, arch.intermediate_size // tp
    read = 5 * hidden + query + inner
    written = query + 2 * kv + 2 * inner + 2 * hidden
    return float(arch.layers * arch.dtype_bytes * (read + 2 * written))


def _all_reduce(sheet: GpuSheet, arch: ModelArch, tp: int, physics: Efficiencies) -> tuple[float, float]:
    """Return milliseconds per step and per 1000 tokens of two ring all-reduces per layer."""
    if tp == 1:
        return 0.0, 0.0
    moved = 2.0 * (tp - 1) / tp * arch.hidden_size * arch.dtype_bytes
    per_token_ms = 2 * arch.layers * moved / (1e-3 * physics.host_link * sheet.peer_bytes_per_s)
    return 2 * arch.layers * physics.reduce_us / 1e3, 1e3 * per_token_ms


NOT_MEASURED: Final = "analytic roofline, not measured"
_CARRIED: Final = (
    "What LoRA kernels cost per layer, slot and adapter, and per token over the traffic of activations, is "
    "carried over from the H100 profiles of vLLM 0.8.5"
)


@dataclass(frozen=True)
class EngineChoice:
    """Engine of a profile; what is None follows from the rest, and without any of it is the newest vLLM."""

    name: str | None = None
    version: str | None = None
    rules: str | None = None
    kernel: Kernel = Kernel.VLLM
    lora: bool = True
    """Whether adapters are served."""
    lora_extra_vocab: int | None = None
    """Rows of extra vocabulary in an adapter slot."""
    target_modules: tuple[str, ...] | None = None
    """Linear layers with adapters; None: all, and with S-LoRA those of attention."""
    quantization: str | None = None
    """Dtype into which the engine quantizes the weights on loading."""

    def profile_engine(self) -> ProfileEngine:
        """Return the engine with its rules.

        Raises
        ------
        InputError
            If the version or the rules are unknown, or the version follows other rules.
        """
        rules, version = rules_of_engine(self.version, self.rules)
        extra = rules.lora_extra_vocab if self.lora_extra_vocab is None else self.lora_extra_vocab
        engine = ProfileEngine(
            name=self.name or rules.engine,
            version=version,
            rules=rules.name,
            kernel=self.kernel,
            lora_extra_vocab=extra,
            target_modules=self.target_modules,
            quantization=self.quantization,
        )
        if rules.engine != SLORA_ENGINE:
            return engine
        modules = self.target_modules or ATTENTION_MODULES
        return engine.replace(block_size=1, target_modules=modules)  # pages of one token


@dataclass(frozen=True)
class Assumptions:
    """Quantities that are not on a datasheet."""

    physics: Efficiencies = field(default_factory=Efficiencies)
    vllm_lora: VllmLora = field(default_factory=VllmLora)


def roofline_profile(
    sheet: GpuSheet,
    arch: ModelArch,
    engine: EngineChoice | None = None,
    tp: int = 1,
    assumptions: Assumptions | None = None,
    command: str = "capplan profile roofline",
) -> Profile:
    """Return the analytic profile of a GPU and a model.

    Parameters
    ----------
    sheet
        The GPU.
    arch
        The model; its `dtype_bytes` must be 2.
    engine
        The engine; vLLM by default.
    tp
        GPUs per copy of the model.
    assumptions
        Quantities that are not on a datasheet; by default with the shares of `efficiencies_of`.
    command
        Recorded in the provenance.

    Raises
    ------
    InputError
        When weights are not of 16 bits, `tp` does not divide the heads, or the weights do not fit.
    """
    choice, given = engine or EngineChoice(), assumptions or Assumptions(physics=efficiencies_of(sheet))
    _check(sheet, arch, tp)
    profiled = choice.profile_engine()
    physics = given.physics
    carried = given.vllm_lora if choice.lora and choice.kernel is Kernel.VLLM else None
    fitted = sheet.shares if physics == efficiencies_of(sheet) else None
    notes = [
        "Nothing here was measured on this GPU"
        if fitted is None
        else f"Bandwidth and arithmetic fitted on {fitted.source}",
        physics.in_words(),
        *([_CARRIED] if carried else []),
    ]
    source = f"{sheet.source}. {physics.in_words()}"
    formula = f"none: {NOT_MEASURED}"
    host = {"request_ms": _REQUEST_MS, "client_itl_factor": 1.0}
    shipped = "of the shipped H100 profiles, rounded"
    steps = step_coefficients(sheet, arch, tp, choice, given)
    return Profile(
        name=f"roofline/{sheet.key}/{arch.name.lower()}/{profiled.name}-{profiled.version}",
        gpu=Gpu(name=sheet.name, memory_bytes=sheet.memory_bytes),
        tp=tp,
        model=arch,
        engine=profiled,
        step_latency=assumed_model(ADDITIVE.name, steps, source, formula),
        memory=memory_model(sheet, arch, tp, profiled.version if profiled.name == VLLM_ENGINE else None),
        loading=loading_model(sheet, arch, tp, physics, error_formula=formula),
        host=assumed_model(HOST_FORM, host, f"time per request {shipped}", formula),
        provenance=Provenance(
            kind=ProvenanceKind.ROOFLINE,
            source=f"{NOT_MEASURED}: {sheet.source}",
            command=command,
            notes=". ".join(notes),
        ),
    )


def loading_model(
    sheet: GpuSheet,
    arch: ModelArch,
    tp: int = 1,
    physics: Efficiencies | None = None,
    error_formula: str = "none: nothing was measured",
) -> FittedModel:
    """Return adapter loading by the host link of a GPU: copies over PCIe one by one, files from disk."""
    physics = physics or Efficiencies()
    on_gpu = arch.dtype_bytes * lora_elements_per_rank(arch, tp)
    values = {
        "serving_factor": 1.0,
        "gpu_base_ms": arch.layers * _MATRICES * physics.copy_us / 1e3,
        "gpu_ms_per_rank": 1e3 * on_gpu / (physics.host_link * sheet.host_bytes_per_s),
        "gpu_padding_ms": 0.0,
        "disk_base_ms": physics.disk_ms,
        "disk_ms_per_rank": 1e3 * adapter_bytes(arch, 1) / physics.disk_bytes_per_s,
    }
    return assumed_model(LOADING_FORM, values, f"{sheet.source}. {physics.in_words()}", error_formula)


def _check(sheet: GpuSheet, arch: ModelArch, tp: int) -> None:
    if arch.dtype_bytes != 2:
        raise InputError(
            "must be 2: datasheets give the arithmetic of 16-bit floats", arch.dtype_bytes, "dtype"
        )
    if arch.experts is not None:
        rule = "must be a dense model: `capplan profile compose` has the operators of experts"
        raise InputError(rule, arch.name, "--model")
    if tp < 1 or arch.heads % tp or arch.intermediate_size % tp:
        raise InputError(f"must divide the {arch.heads} heads of {arch.name}", tp, "--tp")
    require_weights_fit(sheet, arch, tp)


def require_weights_fit(sheet: GpuSheet, arch: ModelArch, tp: int) -> None:
    """Check that a GPU holds its share of the weights."""
    if weight_bytes(arch, tp) >= sheet.memory_bytes:
        size, room = weight_bytes(arch, tp) / 2**30, sheet.memory_bytes / 2**30
        rule = f"must be more: {size:.1f} GiB of weights per GPU do not fit into {room:.1f} GiB"
        raise InputError(rule, tp, "--tp")
