"""A fleet without some of its instances: what the others serve, and what has no server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from capplan.errors import InputError
from capplan.planner.problem._evaluate import violated_bounds
from capplan.planner.verification._served import SimulatedFleet
from capplan.spec import BY_SHARES, Slo
from capplan.twin.cluster import ClusterResult, Instance


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
        Their share of all requests.
    """

    fleet: SimulatedFleet
    failed: tuple[str, ...]
    unserved: tuple[str, ...]
    unserved_share: float

    def violations(self, slo: Slo, result: ClusterResult) -> tuple[str, ...]:
        """Return the bounds that a simulation breaks, as text; latencies are those of what is served."""
        return violated_bounds(slo, result)

    def served_fraction(self, result: ClusterResult) -> float:
        """Return the served fraction of a simulation, requests without a server included."""
        return (1.0 - self.unserved_share) * result.served_fraction


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
        raise InputError(f"must be a group, GROUP or GROUP:REPLICA, of {groups}", failed, "--fail")
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
