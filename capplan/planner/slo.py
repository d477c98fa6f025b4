"""Service-level objectives against simulated metrics."""

from __future__ import annotations

from capplan.spec import Slo
from capplan.twin import SimulationResult
from capplan.twin.result import bound_value


def broken_bounds(slo: Slo, result: SimulationResult) -> tuple[str, ...]:
    """Return the bounds that a simulated GPU breaks, each in words; none when it keeps all of them.

    A latency that no request had (NaN) breaks no bound: where they waited in vain, `served_fraction` tells.
    """
    broken = []
    if result.served_fraction < slo.served_fraction:
        broken.append(f"served_fraction {result.served_fraction:.3f} < {slo.served_fraction:g}")
    for name, bound in slo.latency_bounds().items():
        value = bound_value(result, name)
        if value > bound:
            broken.append(f"{name} {value:.3g} > {bound:g}")
    return tuple(broken)
