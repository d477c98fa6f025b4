"""Step-latency models: milliseconds of one engine step.

A form is an entry of `FORMS` with named coefficients and compiled functions. Inside the twin a form is a
number and its coefficients are an array, since functions passed as arguments disable numba's disk cache.

A step takes ``step_ms + rank_ms``. The second part depends on the ranks of the requests in the step. It is
separate, so that the twin counts ranks only for profiles with `uses_ranks`.

Step tables are piecewise-linear functions in one flat array, stored by cells. The cell of a point
reaches to the next point of every axis, that of a last point to infinity, and holds the value at its lower
corner and the slopes from there. The function is thus exact at the points, continuous, and non-decreasing in
every argument:

- below the first point of an axis it is constant;
- within the grid it is linear in one quantity, and bilinear in two;
- beyond the last point of an axis the last slope goes on. If these slopes fall along the other axis, the
  nearest ones that do not fall apply: otherwise more requests would take less time, far enough out.

The cell of a value is found through its binary exponent and the first bits of its mantissa. They number a
bucket of 6 to 12 % of the value, and an index holds the cell at the beginning of each bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner, jit
from capplan.errors import InputError
from capplan.spec import TABLE_FORM, FittedModel, Kernel, StepTable, unknown_key


class StepFeatures(NamedTuple):
    """Contents of one step."""

    tokens: float
    """Tokens computed, prefill and decode."""
    requests: float
    """Requests that run."""
    kv_tokens: float
    """Tokens whose keys and values are held for running requests."""
    adapters: float
    """Distinct adapters of running requests."""
    a_max: float
    s_max: float
    waiting: float
    slots_per_adapter: float
    """a_max over adapters served, at most 1: the share of waiting requests that find their adapter."""
    adapters_served: float
    """Adapters of the workload, in slots or not."""


class StepRanks(NamedTuple):
    """Ranks and prefills of one step, which only some profiles depend on.

    A request *decodes* in a step when it computes one token there and has emitted one before; any other that
    computes tokens there is in *prefill* (its first pass, and recomputing after a preemption). Requests that
    the token budget leaves out of the step are in neither. Requests of the base model have no rank and count
    in the first two fields only.
    """

    decodes: float
    """Requests that decode, with an adapter or without."""
    prefills: float
    """Requests in prefill, with an adapter or without."""
    lora_decodes: float
    """Requests with an adapter that decode."""
    lora_prefills: float
    """Requests with an adapter in prefill."""
    lora_prefill_tokens: float
    """Tokens that `lora_prefills` compute."""
    max_rank: float
    """Largest rank among `lora_decodes` and `lora_prefills` together, 0 without any."""
    decode_rank_sum: float
    """Sum over `lora_decodes` of the rank of each request's adapter."""
    prefill_rank_sum: float
    """The same over `lora_prefills`."""
    prefill_rank_tokens: float
    """Sum over `lora_prefills` of tokens computed times rank."""
    prefill_mpairs: float = 0.0
    """Million pairs of a query token and a key token in the attention of `prefills`. A request that computes
    n tokens after c others, computed before or found in the prefix cache, has ``n * (c + (n + 1) / 2)``.
    """


@dataclass(frozen=True)
class LatencyForm:
    """One form of the model."""

    name: str
    coefficients: tuple[str, ...]
    optional: Mapping[str, str | None] = field(default_factory=lambda: MappingProxyType({}))
    """Optional coefficients, each with the one that it defaults to; None: 0."""
    step: Any = None
    """Function with `@inner` of (coefficients, `StepFeatures`) that returns milliseconds; None: 0."""
    ranks: Any = None
    """Function with `@inner` of (coefficients, s_max, `StepRanks`) that returns the further milliseconds, or
    one per kernel that engines may have; None: 0."""
    needs: tuple[str, ...] = ()
    """Columns of ranks that measured steps must have to fit it."""
    reads_prefills: Callable[[NDArray[np.float64]], bool] = lambda _: True
    """Whether `ranks` can differ from 0, by the coefficients."""
    reads_decodes: Callable[[NDArray[np.float64]], bool] = lambda _: True
    """Whether `ranks` depends on requests that decode."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all coefficients, in the order of the array."""
        return (*self.coefficients, *self.optional)

    @property
    def code(self) -> int:
        """Its number in compiled code, under vLLM's kernel if it depends on the kernel."""
        return latency_code(self.name)


GRAPH_TOKENS = 512
"""vLLM's largest captured CUDA graph; larger steps launch every kernel from the host."""

SPLIT_TOKENS = 128
"""From so many tokens on, vLLM's LoRA kernels cut the inner dimension into fewer parts; in smaller steps
every adapter launches many blocks that each do little, for each 16 ranks of its slot."""


_ADDITIVE = (
    "base_ms",
    "ms_per_ktoken",
    "ms_per_kv_ktoken",
    "ms_per_slot",
    "ms_per_slot_ktoken",
    "ms_per_slot_rank16",
    "ms_per_adapter",
    "ms_per_adapter_rank16",
    "ms_per_adapter_small_rank16",
    "ms_per_adapter_krequest",
    "ms_per_adapter_queued",
    "ms_per_waiting_krequest",
    "ms_per_ktoken_beyond_graphs",
)
_ADDITIVE_OPTIONS: Mapping[str, str | None] = MappingProxyType(
    {
        "ms_per_decode_krank": None,
        "ms_per_prefill_krank": None,
        "ms_per_request": None,
        "ms_for_several": None,
        "ms_per_prefill": None,
        "ms_per_kv_ktoken_beyond_cache": None,
        "cache_kv_ktokens": None,
        "ms_per_prefill_mpair": None,
    }
)
_TABLE = (*_ADDITIVE, *_ADDITIVE_OPTIONS, "ms_per_lora_ktoken")

# Positions in the coefficient arrays, folded into compiled code as constants.
(
    _BASE,
    _KTOKEN,
    _KV_KTOKEN,
    _SLOT,
    _SLOT_KTOKEN,
    _SLOT_RANK16,
    _ADAPTER,
    _ADAPTER_RANK16,
    _ADAPTER_SMALL_RANK16,
    _ADAPTER_KREQUEST,
    _ADAPTER_QUEUED,
    _WAITING_KREQUEST,
    _KTOKEN_BEYOND_GRAPHS,
    _DECODE_KRANK,
    _PREFILL_KRANK,
    _REQUEST,
    _SEVERAL,
    _PREFILL,
    _BEYOND_CACHE,
    _CACHE,
    _PREFILL_MPAIR,
    _LORA_KTOKEN,
) = range(len(_TABLE))
_TABLES = len(_TABLE)


@inner
def _additive_step_ms(k: NDArray[np.float64], step: StepFeatures) -> float:
    return _additive_ms(k, step, step.a_max, step.kv_tokens)


@inner
def _additive_ms(k: NDArray[np.float64], step: StepFeatures, slots: float, kv_tokens: float) -> float:
    ktokens = step.tokens / 1000.0
    small_ms = k[_ADAPTER_SMALL_RANK16] * step.adapters * np.ceil(step.s_max / 16.0)
    milliseconds = (
        k[_BASE]
        + k[_KTOKEN] * ktokens
        + k[_KV_KTOKEN] * kv_tokens / 1000.0
        + slots * (k[_SLOT] + k[_SLOT_KTOKEN] * ktokens + k[_SLOT_RANK16] * step.s_max / 16.0)
        + step.adapters
        * (
            k[_ADAPTER]
            + k[_ADAPTER_RANK16] * step.s_max / 16.0
            + k[_ADAPTER_KREQUEST] * step.requests / 1000.0
        )
        + (small_ms if step.tokens < SPLIT_TOKENS else 0.0)
        + (k[_ADAPTER_QUEUED] * step.adapters if step.waiting > 0 else 0.0)
        + k[_WAITING_KREQUEST] * step.waiting / 1000.0 * (1.0 - step.slots_per_adapter)
        + k[_KTOKEN_BEYOND_GRAPHS] * max(0.0, step.tokens - GRAPH_TOKENS) / 1000.0
    )
    if k.size > _PREFILL:
        several = min(1.0, max(0.0, step.requests - 1.0))  # means over steps lie between one and two, too
        milliseconds += k[_REQUEST] * step.requests + k[_SEVERAL] * several
        milliseconds += k[_BEYOND_CACHE] * max(0.0, kv_tokens / 1000.0 - k[_CACHE])
    return float(milliseconds)


@inner
def _padded_to_slots_ms(k: NDArray[np.float64], s_max: float, ranks: StepRanks) -> float:
    return _rank_work_ms(k, ranks.lora_decodes * s_max, ranks.lora_prefill_tokens * s_max, ranks)


@inner
def _padded_to_largest_ms(k: NDArray[np.float64], _s_max: float, ranks: StepRanks) -> float:
    padded_to = ranks.max_rank
    return _rank_work_ms(k, ranks.lora_decodes * padded_to, ranks.lora_prefill_tokens * padded_to, ranks)


@inner
def _unpadded_ms(k: NDArray[np.float64], _s_max: float, ranks: StepRanks) -> float:
    return _rank_work_ms(k, ranks.decode_rank_sum, ranks.prefill_rank_tokens, ranks)


@inner
def _rank_work_ms(k: NDArray[np.float64], decode: float, prefill: float, ranks: StepRanks) -> float:
    if k.size <= _PREFILL:
        return 0.0
    milliseconds = k[_DECODE_KRANK] * decode / 1000.0 + k[_PREFILL_KRANK] * prefill / 1000.0
    milliseconds += k[_PREFILL] * ranks.prefills + k[_PREFILL_MPAIR] * ranks.prefill_mpairs
    return float(milliseconds)


_RANK_WORK: Mapping[Kernel, Any] = MappingProxyType(
    {Kernel.VLLM: _padded_to_slots_ms, Kernel.BGMV: _padded_to_largest_ms, Kernel.MBGMV: _unpadded_ms}
)


def _has_rank_work(k: NDArray[np.float64]) -> bool:
    if k.size <= _PREFILL:
        return False
    return bool(k[_DECODE_KRANK] or k[_PREFILL_KRANK] or k[_PREFILL] or k[_PREFILL_MPAIR])


def _has_decode_ranks(k: NDArray[np.float64]) -> bool:
    return k.size > _PREFILL and bool(k[_DECODE_KRANK] or k[_PREFILL_KRANK])


ADDITIVE = LatencyForm(
    "additive",
    _ADDITIVE,
    _ADDITIVE_OPTIONS,
    step=_additive_step_ms,
    ranks=_RANK_WORK,
    reads_prefills=_has_rank_work,
    reads_decodes=_has_decode_ranks,
)
"""Sum of what a step reads and computes. Empty slots cost, too: vLLM launches blocks for them.

Coefficients in ``rank16`` are per adapter and 16 ranks of ``s_max``. In steps of fewer than `SPLIT_TOKENS`
tokens ``ms_per_adapter_small_rank16`` counts whole blocks of 16; in steps of more than `GRAPH_TOKENS`
``ms_per_ktoken_beyond_graphs`` counts the tokens beyond.

The first two optional ones are milliseconds per 1000 units of LoRA work, where a token of a request with an
adapter is as many units as the rank that the engine's kernel multiplies it with (`capplan.spec.Kernel`):
``bgmv`` the largest rank in the step, ``mbgmv`` the request's own, ``vllm`` the configured ``s_max``. One
coefficient for decode, one for prefill, whose kernels differ (S-LoRA: a gathered matrix-vector and a
matrix-matrix product). The others are what a step takes per request whatever its length:
``ms_per_request`` to sample and to send its token, ``ms_per_prefill`` to admit it, and ``ms_for_several``
once as soon as there are two, since a request by itself needs vectors multiplied where several need matrices.
``ms_per_kv_ktoken_beyond_cache`` counts the KV tokens beyond ``cache_kv_ktokens`` thousands, which no longer
fit into a processor's cache from one step to the next. ``ms_per_prefill_mpair`` counts the attention of
prompts, which grows with the square of their length (`StepRanks.prefill_mpairs`).
"""

_K1, _K2, _K3, _K4, _K5, _K6, _K7, _K7_BASE = range(8)


@inner
def _digital_twin_ms(k: NDArray[np.float64], step: StepFeatures) -> float:
    in_batch = step.adapters / step.adapters_served if step.adapters_served > 0.0 else 0.0
    scheduler_ms = k[_K1] * step.requests + step.waiting * (k[_K2] + k[_K3] * in_batch)
    is_base = k.size > _K7_BASE and step.adapters == 0.0
    overhead = k[_K7_BASE] if is_base else k[_K6] * step.adapters + k[_K7]
    return float(scheduler_ms + (k[_K4] * step.requests + k[_K5]) * overhead)


DIGITAL_TWIN = LatencyForm(
    "digital-twin",
    ("k1", "k2", "k3", "k4", "k5", "k6", "k7"),
    MappingProxyType({"k7_base": "k7"}),
    step=_digital_twin_ms,
)
"""The adapter-caching paper's eq. 1, scheduler first:
``k1*B + k2*W + k3*W*A_B/A + (k4*B + k5) * (k6*A_B + k7)``.

B counts the running requests, W the waiting ones, A_B the distinct adapters in the batch and A the adapters
served. The paper's overhead factor has the letter A for adapters in the batch (Fig. 5). From none to one is a
jump (section 5.1.2): a batch without adapters may have a constant of its own, ``k7_base`` in place of
``k6*A_B + k7``.
"""

_DECODE_ALPHA, _DECODE_BETA, _PREFILL_ALPHA, _PREFILL_BETA = range(4)


@inner
def _toppings_bgmv_ms(k: NDArray[np.float64], _s_max: float, ranks: StepRanks) -> float:
    return _toppings_ms(k, ranks.lora_decodes * ranks.max_rank, ranks.lora_prefills * ranks.max_rank, ranks)


@inner
def _toppings_mbgmv_ms(k: NDArray[np.float64], _s_max: float, ranks: StepRanks) -> float:
    return _toppings_ms(k, ranks.decode_rank_sum, ranks.prefill_rank_sum, ranks)


@inner
def _toppings_ms(k: NDArray[np.float64], decode: float, prefill: float, ranks: StepRanks) -> float:
    decode_ms = k[_DECODE_ALPHA] * decode + k[_DECODE_BETA] if ranks.decodes > 0.0 else 0.0
    prefill_ms = k[_PREFILL_ALPHA] * prefill + k[_PREFILL_BETA] if ranks.prefills > 0.0 else 0.0
    return float(decode_ms + prefill_ms)


TOPPINGS_BGMV = LatencyForm(
    "toppings-bgmv",
    ("decode_alpha", "decode_beta", "prefill_alpha", "prefill_beta"),
    ranks=_toppings_bgmv_ms,
    needs=("decodes", "prefills", "lora_decodes", "lora_prefills", "max_rank"),
)
"""Toppings' eq. 2 for padded kernels: ``alpha * |S| * max rank + beta`` milliseconds for an iteration, one
(alpha, beta) for the requests of a step that decode and one for those in prefill; a step that does both is
two iterations, one after the other. S are the requests with an adapter; beta holds the base model. There is
no count of tokens, so a long prompt costs what a short one does (PAPER_NOTES 1).
"""

TOPPINGS_MBGMV = LatencyForm(
    "toppings-mbgmv",
    TOPPINGS_BGMV.coefficients,
    ranks=_toppings_mbgmv_ms,
    needs=("decodes", "prefills", "decode_rank_sum", "prefill_rank_sum"),
)
"""The same for kernels without padding: ``alpha * sum of ranks + beta``."""


@inner
def _table_line(k: NDArray[np.float64], step: StepFeatures) -> KvLine:
    """Return the milliseconds of the table form as long as only KV tokens change."""
    line = kv_line(k, _TABLES, step.tokens, step.requests, step.kv_tokens)
    with_adapter = min(1.0, step.adapters)  # means over steps lie between none and one, too
    terms_ms = _additive_ms(k, step, with_adapter * step.a_max, line.start)
    terms_ms += with_adapter * k[_LORA_KTOKEN] * step.tokens / 1000.0
    ms_per_token = line.ms_per_token + k[_KV_KTOKEN] / 1000.0
    whole = KvLine(terms_ms + line.constant_ms, ms_per_token, line.start, line.end)
    return _cut_at_cache(whole, k, step.kv_tokens)


@inner
def _cut_at_cache(line: KvLine, k: NDArray[np.float64], kv_tokens: float) -> KvLine:
    """Return the part of a line below or beyond the cache, which contains `kv_tokens`."""
    cache, more = 1000.0 * k[_CACHE], k[_BEYOND_CACHE] / 1000.0
    if more == 0.0:
        return line
    if kv_tokens < cache:
        return KvLine(line.constant_ms, line.ms_per_token, line.start, min(line.end, cache))
    start = max(line.start, cache)
    constant_ms = line.constant_ms + line.ms_per_token * (start - line.start)
    return KvLine(constant_ms, line.ms_per_token + more, start, line.end)


TABLE = LatencyForm(
    TABLE_FORM,
    (),
    MappingProxyType(dict.fromkeys(_TABLE)),
    ranks=_RANK_WORK,
    reads_prefills=_has_rank_work,
    reads_decodes=_has_decode_ranks,
)
"""Tables of milliseconds over tokens, and over requests and KV tokens, beside the terms of the additive form:
``tokens_ms(tokens) + requests_ms(requests, kv_tokens) + ms_per_prefill_mpair * prefill_mpairs + ...``.

Slots and ``ms_per_lora_ktoken`` count in steps with an adapter only: from vLLM 0.12 on, the CUDA graphs of
other steps hold no LoRA kernels.

The docstring of this module describes the functions between and beyond the points of a table.
"""

FORMS = (ADDITIVE, DIGITAL_TWIN, TOPPINGS_BGMV, TOPPINGS_MBGMV, TABLE)
"""A new form is one more entry."""

_VARIANTS = tuple(
    (form, kernel)
    for form in sorted(FORMS, key=lambda each: each is TABLE)
    for kernel in (form.ranks if isinstance(form.ranks, Mapping) else (None,))
)
"""The forms in compiled code, by number: those that depend on the kernel once for each, and the form with
tables last, so that numbers from its first on have a `step_line`."""
_FIRST_TABLE = _VARIANTS.index((TABLE, Kernel.VLLM))


def latency_form(name: str) -> LatencyForm:
    """Return the form called `name`.

    Raises
    ------
    InputError
        When there is none; the message lists the names.
    """
    for form in FORMS:
        if form.name == name:
            return form
    raise InputError(f"must be one of {', '.join(f.name for f in FORMS)}", name, "step_latency.form")


def latency_code(name: str, kernel: Kernel = Kernel.VLLM) -> int:
    """Return the number of a form under a kernel, for `step_ms` and `rank_ms`."""
    form = latency_form(name)
    return _VARIANTS.index((form, kernel if isinstance(form.ranks, Mapping) else None))


def coefficient_array(model: FittedModel) -> NDArray[np.float64]:
    """Return the coefficients of `model` in the order of its form, and its tables after them.

    Optional coefficients are included if the model has any of them, or tables.

    Raises
    ------
    InputError
        If the form is unknown, or a coefficient is missing or unknown.
    """
    form = latency_form(model.form)
    values = [model.value(name) for name in form.coefficients]
    for name in model.coefficients:
        if name not in form.names:
            rule = unknown_key(name, form.names)
            raise InputError(rule, location=f"profile: step_latency.coefficients.{name}")
    if form is TABLE or model.coefficients.keys() & form.optional.keys():
        for name, instead in form.optional.items():
            if name in model.coefficients:
                values.append(model.value(name))
            else:
                values.append(0.0 if instead is None else model.value(instead))
    if form is TABLE:
        packed = pack_tables(model.tables["tokens_ms"], model.tables["requests_ms"], len(values))
        return np.concatenate([values, packed])
    return np.array(values)


def uses_ranks(form: int, k: NDArray[np.float64]) -> bool:
    """Return whether `rank_ms` can differ from 0; if not, the twin counts no `StepRanks`."""
    chosen, _ = _VARIANTS[form]
    return chosen.ranks is not None and chosen.reads_prefills(k)


def uses_decode_ranks(form: int, k: NDArray[np.float64]) -> bool:
    """Return whether `rank_ms` depends on requests that decode; if not, the twin counts prefills only."""
    chosen, _ = _VARIANTS[form]
    return chosen.ranks is not None and chosen.reads_decodes(k)


@inner
def _no_step_ms(_form: int, _k: NDArray[np.float64], _step: StepFeatures) -> float:
    return 0.0


@inner
def _no_rank_ms(_form: int, _k: NDArray[np.float64], _s_max: float, _ranks: StepRanks) -> float:
    return 0.0


def _or_step(code: int, function: Any, otherwise: Any) -> Any:
    @inner
    def chosen(form: int, k: NDArray[np.float64], step: StepFeatures) -> float:
        if form == code:
            return float(function(k, step))
        return float(otherwise(form, k, step))

    return chosen


def _or_ranks(code: int, function: Any, otherwise: Any) -> Any:
    @inner
    def chosen(form: int, k: NDArray[np.float64], s_max: float, ranks: StepRanks) -> float:
        if form == code:
            return float(function(k, s_max, ranks))
        return float(otherwise(form, k, s_max, ranks))

    return chosen


_form_step_ms, _form_rank_ms = _no_step_ms, _no_rank_ms
for _code, (_form, _kernel) in reversed(tuple(enumerate(_VARIANTS))):
    _ranks = _form.ranks if _kernel is None else _form.ranks[_kernel]
    if _form.step is not None:
        _form_step_ms = _or_step(_code, _form.step, _form_step_ms)
    if _ranks is not None:
        _form_rank_ms = _or_ranks(_code, _ranks, _form_rank_ms)


@jit
def step_ms(form: int, k: NDArray[np.float64], step: StepFeatures) -> float:
    """Return the milliseconds of a step, without adapter loads and `rank_ms`.

    Parameters
    ----------
    form
        Number of the form, by `latency_code`.
    k
        Its coefficients in order, by `coefficient_array`, shape (n,).
    step
        Contents of the step.
    """
    return with_line_ms(form, k, step, step_line(form, k, step))


@inner
def step_line(form: int, k: NDArray[np.float64], step: StepFeatures) -> KvLine:
    """Return `step_ms` of the table form as long as only KV tokens change; no line in other forms."""
    return _table_line(k, step) if form >= _FIRST_TABLE else no_line(np.inf)


@inner
def with_line_ms(form: int, k: NDArray[np.float64], step: StepFeatures, line: KvLine) -> float:
    """Return `step_ms`, given its `step_line`."""
    if form >= _FIRST_TABLE:
        milliseconds = milliseconds_at(line, step.kv_tokens)
    else:
        milliseconds = _form_step_ms(form, k, step)
    return max(0.0, milliseconds)  # coefficients of free sign must not turn the clock back


@jit
def rank_ms(form: int, k: NDArray[np.float64], s_max: float, ranks: StepRanks) -> float:
    """Return the milliseconds of a step that depend on ranks and on prefills.

    Parameters
    ----------
    form, k
        As for `step_ms`.
    s_max
        Rank that slots are sized for.
    ranks
        Ranks and prefills of the step.
    """
    return max(0.0, _form_rank_ms(form, k, s_max, ranks))


_MANTISSA_BITS: Final = 3
_SHIFT: Final = 52 - _MANTISSA_BITS
_FIRST_BUCKET: Final = 1023 << _MANTISSA_BITS
"""Bucket of 1. Smaller values belong to it as well."""
_BUCKETS: Final = 40 << _MANTISSA_BITS
"""Up to 2^40; larger values belong to the last one."""

# Numbers of a cell, which begins with its point. Over tokens: value and slope. Over requests: position of the
# cells over KV tokens. Over KV tokens: value, both slopes, and their common growth.
_TOKENS_CELL: Final = 3
_REQUESTS_CELL: Final = 2
_KV_CELL: Final = 5


@functools.lru_cache(maxsize=32)
def pack_tables(tokens_ms: StepTable, requests_ms: StepTable, start: int) -> NDArray[np.float64]:
    """Return the tables of a step model (`capplan.spec._profile.TABLE_AXES`) as one array, for `kv_line`.

    It holds the index of each axis, the cells over tokens, those over requests, and for each of the latter
    the cells over KV tokens. Axes begin at 0; a point at infinity ends every list of cells. Positions are
    those in the array of the step model, where the result begins at `start`; the index of KV tokens is
    relative to the first cell of a list. The array is shared between calls: not to be changed.
    """
    axes = [np.array(axis.points) for axis in (*tokens_ms.axes, *requests_ms.axes)]
    line = _line_cells(axes[0], tokens_ms.grid_ms)
    plane = _plane_cells(axes[1], axes[2], requests_ms.grid_ms)
    tokens, requests, kv_tokens = map(_from_zero, axes)
    of_tokens = start + 3 * _BUCKETS
    of_requests = of_tokens + _TOKENS_CELL * (tokens.size + 1)
    of_kv_tokens = of_requests + _REQUESTS_CELL * (requests.size + 1)
    lists = of_kv_tokens + _KV_CELL * (kv_tokens.size + 1) * np.arange(requests.size)
    return np.concatenate(
        [
            of_tokens + _TOKENS_CELL * _at_buckets(tokens),
            of_requests + _REQUESTS_CELL * _at_buckets(requests),
            _KV_CELL * _at_buckets(kv_tokens),
            line.ravel(),
            np.column_stack([np.append(requests, np.inf), np.append(lists, 0.0)]).ravel(),
            plane.ravel(),
        ]
    )


def _from_zero(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a grid that begins at 0."""
    return grid if grid[0] == 0.0 else np.concatenate([[0.0], grid])


def _at_buckets(grid: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the number of the last point at or below the beginning of each bucket; the first begins at 0."""
    beginnings = (np.arange(_FIRST_BUCKET, _FIRST_BUCKET + _BUCKETS) << _SHIFT).view(np.float64)
    beginnings[0] = 0.0
    return np.searchsorted(grid, beginnings, side="right") - 1


def _line_cells(grid: NDArray[np.float64], value_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return point, value and slope of each cell from 0 on, and of the end, shape (points + 1, 3)."""
    slopes = np.diff(value_ms) / np.diff(grid)
    cells = np.column_stack([grid, value_ms, np.append(slopes, slopes[-1])])
    below = np.array([[0.0, value_ms[0], 0.0]])[: int(grid[0] > 0.0)]
    return np.vstack([below, cells, [[np.inf, 0.0, 0.0]]])


def _plane_cells(
    rows: NDArray[np.float64], columns: NDArray[np.float64], value_ms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the cells of each row and their ends, rows and columns from 0 on, shape (rows, columns + 1, 5).

    A cell has its column's point, value, slope over rows, slope over columns, and their common growth.
    """
    row_widths, column_widths = np.diff(rows)[:, None], np.diff(columns)
    cells = np.zeros((rows.size, columns.size + 1, _KV_CELL))
    points, value, by_row, by_column, growth = np.moveaxis(cells[:, :-1], 2, 0)
    points[:], value[:] = columns, value_ms
    by_row[:-1] = np.diff(value_ms, axis=0) / row_widths
    by_row[-1] = _not_falling(by_row[-2])
    by_column[:, :-1] = np.diff(value_ms, axis=1) / column_widths
    by_column[:, -1] = _not_falling(by_column[:, -2])
    growth[:-1] = np.diff(by_column, axis=0) / row_widths
    growth[-1, :-1] = np.diff(by_row[-1]) / column_widths
    cells[:, -1, 0] = np.inf
    if columns[0] > 0.0:
        below = cells[:, :1] * np.array([0.0, 1.0, 1.0, 0.0, 0.0])  # constant over columns
        cells = np.concatenate([below, cells], axis=1)
    if rows[0] > 0.0:
        below = np.where([True, True, False, True, False], cells[:1], 0.0)  # constant over rows
        cells = np.concatenate([below, cells])
    return cells


def _not_falling(slopes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the isotonic regression of slopes, by its max-min formula over means of neighbours.

    Source: Barlow et al., Statistical Inference under Order Restrictions (1972), theorem 1.6.
    """
    if np.all(np.diff(slopes) >= 0.0):
        return slopes
    number = np.arange(slopes.size)
    sums = np.concatenate([[0.0], slopes.cumsum()])
    lengths = number + 1 - number[:, None]  # of the neighbours from a row's number to a column's
    means = np.where(lengths > 0, (sums[1:] - sums[:-1, None]) / np.maximum(lengths, 1), np.inf)
    least = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
    regression = np.where(lengths > 0, least, -np.inf).max(axis=0)
    return np.maximum.accumulate(np.maximum(regression, 0.0))


class KvLine(NamedTuple):
    """Milliseconds of a step over KV tokens, as long as it stays in its cell of the tables."""

    constant_ms: float
    ms_per_token: float
    start: float
    """KV tokens of the constant."""
    end: float
    """KV tokens at which another cell begins."""


@inner
def no_line(end: float) -> KvLine:
    """Return a line of 0 ms."""
    return KvLine(0.0, 0.0, 0.0, end)


@inner
def kv_line(
    packed: NDArray[np.float64], start: int, tokens: float, requests: float, kv_tokens: float
) -> KvLine:
    """Return the line of a step by tables that `pack_tables` stored from `start` on."""
    at = _cell(packed, int(packed[start + _bucket(tokens)]), _TOKENS_CELL, tokens)
    row = _cell(packed, int(packed[start + _BUCKETS + _bucket(requests)]), _REQUESTS_CELL, requests)
    first = int(packed[row + 1]) + int(packed[start + 2 * _BUCKETS + _bucket(kv_tokens)])
    cell = _cell(packed, first, _KV_CELL, kv_tokens)
    tokens_ms = packed[at + 1] + packed[at + 2] * (tokens - packed[at])
    more_requests = requests - packed[row]
    return KvLine(
        constant_ms=tokens_ms + packed[cell + 1] + packed[cell + 2] * more_requests,
        ms_per_token=packed[cell + 3] + packed[cell + 4] * more_requests,
        start=packed[cell],
        end=packed[cell + _KV_CELL],
    )


@inner
def _bucket(value: float) -> int:
    """Return the number of the bucket of a value that is not negative."""
    bucket = int(np.float64(value).view(np.int64) >> _SHIFT) - _FIRST_BUCKET
    return min(max(bucket, 0), _BUCKETS - 1)


@inner
def _cell(packed: NDArray[np.float64], first: int, size: int, value: float) -> int:
    """Return the position of the last cell from `first` on whose point does not exceed a value."""
    at = first + size * int(packed[first + size] <= value)  # no branch: few buckets have several points
    while packed[at + size] <= value:
        at += size
    return at


@inner
def milliseconds_at(line: KvLine, kv_tokens: float) -> float:
    """Return the milliseconds at KV tokens before the end of the line."""
    return line.constant_ms + line.ms_per_token * (kv_tokens - line.start)
