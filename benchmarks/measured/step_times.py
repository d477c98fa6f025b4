"""Single steps: their milliseconds by the step model of a profile, beside those of another source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.measured.case import Deployment
from capplan import Profile
from capplan.models import StepFeatures, StepRanks, coefficient_array, latency_code, rank_ms, step_ms


@dataclass(frozen=True)
class StepCase:
    """A step of one prefill chunk, or of decodes of equal context."""

    name: str
    deployment: Deployment
    chunk: int
    decodes: int
    context: int
    measured: Mapping[str, float]
    """Milliseconds by the source, under the one metric of the case."""
    scale: float = 1.0
    """Factor of the milliseconds of the step model."""

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Return the milliseconds of the step by the step model."""
        step_ms = self.scale * model_ms(profile, self.chunk, self.decodes, self.context)
        return dict.fromkeys(self.measured, step_ms)


def model_ms(profile: Profile, chunk: int, decodes: int, context: int) -> float:
    """Return the time of a step without adapters.

    Parameters
    ----------
    chunk
        Tokens of one prompt that has nothing computed before; 0: none.
    decodes
        Requests that decode.
    context
        KV tokens of each of them.
    """
    model = profile.step_latency
    form, coefficients = latency_code(model.form, profile.engine.kernel), coefficient_array(model)
    prefills = 1.0 if chunk else 0.0
    step = StepFeatures(
        tokens=float(chunk + decodes),
        requests=prefills + decodes,
        kv_tokens=float(chunk + decodes * context),
        adapters=0.0,
        a_max=0.0,
        s_max=0.0,
        waiting=0.0,
        slots_per_adapter=1.0,
        adapters_served=0.0,
    )
    counts = {"decodes": float(decodes), "prefills": prefills, "prefill_mpairs": chunk * (chunk + 1.0) / 2e6}
    ranks = StepRanks(**dict.fromkeys(StepRanks._fields, 0.0) | counts)
    return float(step_ms(form, coefficients, step) + rank_ms(form, coefficients, 0.0, ranks))
