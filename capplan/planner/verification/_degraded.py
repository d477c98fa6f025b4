"""A fleet without some of its instances: what the others serve, and what has no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from capplan.errors import InputError
from capplan.planner.problem._evaluate import evaluations_of
from capplan.planner.verification._served import SimulatedFleet
from capplan.spec import BY_SHARES, Workload
from capplan.twin.cluster import ClusterResult, Instance
from capplan.workload import draw_requests


@dataclass(frozen=True)
class DegradedFleet:
    """The instances that are left, with the traffic that has a server.

    Attributes
    ----------
    fleet
        The instances, behind the same router.
    failed
        Names of those that are gone.
    unserved
        Adapters that no instance holds any more.
    unserved_share
        Their share of the request rate.
    whole
        Traffic of all adapters.
    """

    fleet: SimulatedFleet
    failed: tuple[str, ...]
    unserved: tuple[str, ...]
    unserved_share: float
    whole: Workload

    def simulate(self, seed: int, duration_s: float) -> DegradedResult:
        """Simulate the instances that are left, and count the requests without a server.

        Raises
        ------
        InfeasibleError
            If an instance does not start.
        """
        result = self.fleet.simulate(seed, duration_s)
        names = [self.whole.base_model, *(adapter.name for adapter in self.whole.adapters)]
        requests = draw_requests(self.whole, duration_s, seed, self._longest)
        counts = np.bincount(requests.adapter, minlength=len(names)).tolist()
        lost = {name: n for name, n in zip(names, counts, strict=True) if name in self.unserved}
        is_lost = np.isin(requests.adapter, [names.index(name) for name in self.unserved])
        tokens = int(requests.prompt_tokens[is_lost].sum() + requests.output_tokens[is_lost].sum())
        served = _served_fraction(result, tokens)
        return DegradedResult(
            result=result,
            unserved=dict(sorted(lost.items(), key=lambda item: -item[1])),
            served_fraction=served,
            broken=_broken(self.fleet, result, served, duration_s),
        )

    @property
    def _longest(self) -> int:
        """Longest request of the instances, in tokens."""
        lengths = (
            each.max_model_len or each.profile.model.default_max_model_len for each in self.fleet.instances
        )
        return max(lengths)


@dataclass(frozen=True)
class DegradedResult:
    """A simulation of what is left of a fleet.

    Attributes
    ----------
    result
        Of the requests that have a server.
    unserved
        Requests of each adapter without a server, most first.
    served_fraction
        Tokens of completed requests over those submitted, with the unserved ones.
    broken
        Bounds that an instance breaks by the criteria of the verification, and that all requests break, as
        text.
    """

    result: ClusterResult
    unserved: Mapping[str, int]
    served_fraction: float
    broken: tuple[str, ...]

    @property
    def submitted(self) -> int:
        """Requests, with the unserved ones."""
        return self.result.submitted + sum(self.unserved.values())


def _served_fraction(result: ClusterResult, unserved_tokens: int) -> float:
    """Return the served fraction with unserved tokens among those submitted."""
    completed = result.throughput_tok_s * result.duration_s
    if not unserved_tokens or not completed:
        return 0.0 if unserved_tokens else result.served_fraction
    return completed / (completed / result.served_fraction + unserved_tokens)


def _broken(
    fleet: SimulatedFleet, result: ClusterResult, served_fraction: float, duration_s: float
) -> tuple[str, ...]:
    evaluations = evaluations_of(fleet.workload, result, duration_s)
    broken = [
        f"{name}: {violation}"
        for name, evaluation in zip(fleet.names, evaluations, strict=True)
        for violation in evaluation.violations
    ]
    least = fleet.workload.slo.served_fraction
    if served_fraction < least:
        broken.append(f"all requests: served_fraction {served_fraction:.3f} < {least:g}")
    return tuple(broken)


def without_instances(fleet: SimulatedFleet, failed: Sequence[str]) -> DegradedFleet:
    """Return a fleet without some instances, whose adapters the others serve as far as they hold them.

    Shares of the others keep their ratios; where all of them are 0, they get equal ones.

    Parameters
    ----------
    failed
        Instances: ``GROUP`` for all replicas of a group, or ``GROUP:REPLICA``, from 1.

    Raises
    ------
    InputError
        If there is no such instance, none is left, none holds an adapter that has requests, or the fleet
        re-balances, which would load the adapters elsewhere.
    """
    if fleet.rebalance is not None:
        rule = "does not go with re-balancing, which loads the adapters of a failed instance elsewhere"
        raise InputError(rule, location="--fail")
    gone = {index for name in failed for index in _places(fleet.names, name)}
    left = [index for index in range(len(fleet.names)) if index not in gone]
    if not left:
        raise InputError("must leave an instance", ", ".join(failed), "--fail")
    instances = _with_shares(fleet, [fleet.instances[index] for index in left])
    traffic = fleet.workload.traffic
    held = {name for each in instances for name in (traffic if each.adapters is None else each.adapters)}
    # Every instance has the base model.
    unserved = tuple(name for name in traffic if name not in held and name != fleet.workload.base_model)
    rates = {name: each.rate_rps for name, each in traffic.items()}
    served = [name for name in traffic if name not in unserved]
    if not served:
        raise InputError("must leave an instance with an adapter", ", ".join(failed), "--fail")
    total = sum(rates.values())
    return DegradedFleet(
        fleet=replace(
            fleet,
            workload=fleet.workload.subset(served),
            instances=tuple(instances),
            names=tuple(fleet.names[index] for index in left),
        ),
        failed=tuple(fleet.names[index] for index in sorted(gone)),
        unserved=unserved,
        unserved_share=sum(rates[name] for name in unserved) / total if total > 0 else 0.0,
        whole=fleet.workload,
    )


def _places(names: Sequence[str], failed: str) -> list[int]:
    """Return the places of the instances that a name stands for."""
    group, _, replica = failed.rpartition(":")
    if group and replica.isdigit():
        found = [index for index, name in enumerate(names) if name == f"{group}-{replica}"]
    else:
        found = [index for index, name in enumerate(names) if name.rpartition("-")[0] == failed]
    if not found:
        groups = ", ".join(dict.fromkeys(name.rpartition("-")[0] for name in names))
        rule = f"must be a group, GROUP or GROUP:REPLICA (from 1), of {groups}"
        raise InputError(rule, failed, "--fail")
    return found


def _with_shares(fleet: SimulatedFleet, instances: Sequence[Instance]) -> list[Instance]:
    """Return the instances with a share above 0 of every name that is only stored now."""
    if fleet.router not in BY_SHARES:
        return list(instances)
    base = fleet.workload.base_model
    totals: dict[str, float] = {}
    for each in instances:
        for name, share in (each.adapters or {}).items():
            totals[name] = totals.get(name, 0.0) + share
    found = []
    for each in instances:
        shares = dict(each.adapters or {})
        shares |= {name: 1.0 for name in shares if totals[name] == 0.0}
        if base in fleet.workload.traffic and totals.get(base, 0.0) == 0.0:
            shares[base] = 1.0
        found.append(each if each.adapters is None else replace(each, adapters=shares))
    return found
