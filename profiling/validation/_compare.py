"""Comparison of a measured engine with the predictions of the twin and of two baselines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from capplan.errors import InputError
from capplan.models.calibration import smape
from capplan.profiling.load._preflight import ServerInfo
from capplan.profiling.load._result import BenchResult
from capplan.spec import EngineArgs, Profile
from capplan.twin import SimulationResult

THROUGHPUT: Final = "throughput_tok_s"
ITL: Final = "itl_ms_mean"
KV_CAPACITY: Final = "kv_tokens"
_KV_TOLERANCE: Final = 0.05
_SHOWN_MODELS: Final = 3
_RELEASE: Final = re.compile(r"v?(\d+(?:\.\d+){1,2})")
KV_USED: Final = "kv_tokens_mean"
PROBES: Final = "speed_probes"
PROBE_S: Final = "speed_probe_s"

NAMES: Final = (
    THROUGHPUT,
    "output_tok_s",
    "ttft_s_mean",
    "ttft_s_p50",
    "ttft_s_p99",
    ITL,
    "tpot_ms_mean",
    "e2e_s_mean",
    "served_fraction",
    KV_CAPACITY,
    KV_USED,
)
"""Compared metrics, named as in `SimulationResult`."""

Values = Mapping[str, float]


@dataclass(frozen=True)
class Tolerances:
    """Largest SMAPE of agreement, in percent."""

    throughput: float = 3.0
    itl: float = 8.0

    def __post_init__(self) -> None:
        for name in ("throughput", "itl"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InputError("must be a number >= 0", getattr(self, name), name)


@dataclass(frozen=True)
class MetricComparison:
    """One metric of one group; NaN if unknown."""

    name: str
    measured: float
    predicted: float
    """At the speed of the machine during the measurement, if it is known."""
    constant_step: float
    """Baseline: the twin with one time for all steps."""
    offered_load: float
    """Baseline: all requests are served."""
    tolerance: float | None = None
    """Largest SMAPE of agreement, in percent; None: any."""
    as_profiled: float = math.nan
    """Prediction at the speed of the machine of the profile."""

    @property
    def error(self) -> float:
        """SMAPE of the prediction, in percent."""
        return _error(self.predicted, self.measured)

    @property
    def as_profiled_error(self) -> float:
        """SMAPE of the prediction at the speed of the profile, in percent."""
        return _error(self.as_profiled, self.measured)

    @property
    def constant_step_error(self) -> float:
        """SMAPE of the baseline, in percent."""
        return _error(self.constant_step, self.measured)

    @property
    def offered_load_error(self) -> float:
        """SMAPE of the baseline, in percent."""
        return _error(self.offered_load, self.measured)

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance, if any."""
        if self.tolerance is None or (math.isnan(self.measured) and math.isnan(self.predicted)):
            return True
        return self.error <= self.tolerance


@dataclass(frozen=True)
class GroupValidation:
    """Measurement and prediction of one instance of a group; the offered load is never starved."""

    group: str
    rate_scale: float
    duration_s: float
    seed: int
    requests: int
    comparisons: tuple[MetricComparison, ...]
    starved: bool
    predicted_starved: bool
    constant_step_starved: bool
    faults: tuple[str, ...] = ()
    """Reasons for which the measurement is void."""
    slowdown: float | None = None
    """Time of the engine's speed probe over that of the profile; None: unknown."""
    mismatches: tuple[str, ...] = ()
    """Differences between the server and what the prediction assumes, and what the server does not report."""

    @property
    def agrees(self) -> bool:
        """Whether all metrics and the starvation verdict agree, and the measurement is sound."""
        verdict = self.starved == self.predicted_starved
        return verdict and not self.faults and all(each.agrees for each in self.comparisons)

    def metric(self, name: str) -> MetricComparison:
        """Return a metric by name."""
        return next(each for each in self.comparisons if each.name == name)


def _error(predicted: float, measured: float) -> float:
    if math.isnan(predicted) or math.isnan(measured):
        return math.nan
    return 0.0 if predicted == measured else smape([predicted], [measured])


def compared(
    measured: Values, predictions: Mapping[str, Values], tolerances: Tolerances
) -> tuple[MetricComparison, ...]:
    """Return the measured metrics, and those with a tolerance.

    Parameters
    ----------
    measured
        Measured values by metric.
    predictions
        Values by fields of `MetricComparison`: ``predicted``, ``constant_step``, ``offered_load`` and others.
    tolerances
        Largest errors.
    """
    limits = {THROUGHPUT: tolerances.throughput, ITL: tolerances.itl}
    return tuple(
        MetricComparison(
            name,
            measured=measured.get(name, math.nan),
            tolerance=limits.get(name),
            **{field: values.get(name, math.nan) for field, values in predictions.items()},
        )
        for name in NAMES
        if name in limits or not math.isnan(measured.get(name, math.nan))
    )


def measured_values(
    result: BenchResult, profile: Profile, reported_kv_tokens: int | None, kv_tokens: int
) -> dict[str, float]:
    """Return measured values by the twin's names.

    ITL is the time from first to last token over their number, as in the twin; for a profile with
    ``client_itl_factor``, the mean gap at the client.
    """
    overall = result.overall
    itl = overall.token_gap_ms_mean
    if itl is None or profile.host.value("client_itl_factor") != 1.0:
        itl = overall.itl_ms.mean
    shares = [
        sample.values["kv_used"]
        for sample in result.server
        if "kv_used" in sample.values and sample.values.get("running", 0.0) > 0.0
    ]
    values = {
        THROUGHPUT: overall.throughput_tok_s,
        "output_tok_s": overall.output_tok_s,
        "ttft_s_mean": overall.ttft_s.mean,
        "ttft_s_p50": overall.ttft_s.p50,
        "ttft_s_p99": overall.ttft_s.p99,
        ITL: itl,
        "tpot_ms_mean": overall.tpot_ms.mean,
        "e2e_s_mean": overall.e2e_s.mean,
        "served_fraction": overall.served_fraction,
        KV_CAPACITY: reported_kv_tokens,
        KV_USED: sum(shares) / len(shares) * (reported_kv_tokens or kv_tokens) if shares else None,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def slowdown_of(result: BenchResult, profile: Profile) -> float | None:
    """Return the mean time of the engine's speed probe over that of the profile; None if unknown."""
    reference_ms = profile.step_latency.fit.probe_ms
    known = [each.values for each in result.server if {PROBES, PROBE_S} <= each.values.keys()]
    if reference_ms is None or not known:
        return None
    taken, spent_s = (known[-1][name] - known[0][name] for name in (PROBES, PROBE_S))
    return 1e3 * spent_s / taken / reference_ms if taken > 0.0 else None


def faults_of(result: BenchResult, drawn: int | None = None) -> tuple[str, ...]:
    """Return the faults that make a measurement void."""
    overall, faults = result.overall, []
    if result.partial:
        faults.append("stopped before its time")
    if overall.failed or overall.rejected:
        kinds = [f"{each.kind} {each.requests} ({each.message})" for each in result.failures]
        counts = f"{overall.failed} requests failed, {overall.rejected} were rejected"
        faults.append(": ".join((counts, ", ".join(kinds))) if kinds else counts)
    if result.client.kept_up is False:
        lag = result.client.lag_ms.p99 or 0.0
        faults.append(f"the client could not keep up: p99 of its lag {lag:.0f} ms")
    if drawn is not None and overall.submitted != drawn and not result.partial:
        faults.append(f"{overall.submitted} requests were sent, {drawn} simulated")
    return tuple(faults)


def mismatches_of(
    info: ServerInfo, base_model: str, profile: Profile, args: EngineArgs, assumed: SimulationResult
) -> tuple[str, ...]:
    """Return what a server reports otherwise than the prediction assumes, or not at all.

    Parameters
    ----------
    info
        The server's account of itself.
    base_model
        Model of the plan.
    args
        Engine settings of the prediction.
    assumed
        Prediction by the profile.
    """
    engine = profile.engine
    found = []
    unknown = []
    wrong_model = _other_model(info.models, base_model, profile.model.hf_ids)
    if wrong_model is None:
        unknown.append(f"its model ({base_model})")
    elif wrong_model:
        found.append(f"the server has the model {wrong_model}, the profile is of {base_model}")
    for what, reported, expected, equal in (
        ("GPU", info.device, profile.gpu.name, _equal_names),
        ("engine", info.engine, engine.name, str.__eq__),
        ("version", info.version, engine.version, _equal_versions),
    ):
        if reported is None:
            unknown.append(f"its {what} ({expected})")
        elif not equal(reported, expected):
            found.append(f"the server has the {what} {reported}, the profile is of {expected}")
    settings = info.settings
    for flag, value, given in (
        ("--max-loras", settings.a_max, args.max_loras),
        ("--max-model-len", info.max_model_len, args.max_model_len),
        ("--gpu-memory-utilization", settings.gpu_memory_utilization, args.gpu_memory_utilization),
        ("--block-size", settings.block_size, engine.block_size),
        ("--enable-prefix-caching", info.prefix_caching, args.enable_prefix_caching),
    ):
        if value is not None and given is not None and not math.isclose(value, given, rel_tol=1e-3):
            found.append(f"the server has {flag} {value}, the prediction assumes {given}")
    if info.replicas > 1:
        found.append(f"the server has {info.replicas} engines, the prediction is of one")
    tokens = settings.kv_tokens
    if tokens is not None and abs(tokens - assumed.kv_tokens) > _KV_TOLERANCE * assumed.kv_tokens:
        found.append(
            f"the server has {tokens:,} KV tokens, the prediction assumes {assumed.kv_tokens:,}: "
            "its GPU, memory or engine settings differ"
        )
    if unknown:
        found.append(f"the server does not report, so these are not compared: {', '.join(unknown)}")
    return tuple(found)


def _other_model(models: Mapping[str, str], base_model: str, known: Sequence[str]) -> str | None:
    """Return the name of another model than a base model; empty: none; None: not told.

    A model loaded from a folder of any name counts by the name that it is served under.
    """
    if not models:
        return None
    names = {base_model, *known}
    if base_model in models or set(models) & names:
        root = models.get(base_model, "")
        is_hub_name = root.count("/") == 1 and not root.startswith((".", "/", "~"))
        return root if is_hub_name and root not in names else ""
    return "" if set(models.values()) & names else ", ".join(list(models)[:_SHOWN_MODELS])


def _equal_names(reported: str, expected: str) -> bool:
    """Return whether one GPU name is part of the other, as ``H200`` of ``NVIDIA H200``."""
    first, second = reported.casefold(), expected.casefold()
    return first in second or second in first


def _equal_versions(reported: str, expected: str) -> bool:
    """Compare releases; builds of one release, such as ``0.8.5.post1``, are equal."""
    first, second = (_RELEASE.match(each) for each in (reported, expected))
    return reported == expected or (first is not None and second is not None and first[1] == second[1])


def predicted_values(result: SimulationResult) -> dict[str, float]:
    """Return predicted values."""
    return {name: float(getattr(result, name)) for name in NAMES}


def offered_values(result: SimulationResult) -> dict[str, float]:
    """Return the values if all requests are served; no latency is among them."""
    return {THROUGHPUT: result.offered_tok_s, "served_fraction": 1.0}


def constant_step(profile: Profile, result: SimulationResult) -> Profile:
    """Return the profile with one time for all steps, the mean of a simulation."""
    from capplan.models import ADDITIVE
    from capplan.spec import Coefficient

    steps_s = result.busy_fraction * result.duration_s - result.load_s
    mean_ms = 1e3 * max(steps_s, 0.0) / max(1, result.steps)
    values = dict.fromkeys(ADDITIVE.coefficients, 0.0) | {"base_ms": mean_ms}
    step = profile.step_latency.replace(
        form=ADDITIVE.name,
        coefficients={name: Coefficient(value=value) for name, value in values.items()},
        tables={},
    )
    return profile.replace(step_latency=step)
