"""What changes from one plan to another: groups, settings, adapters, and the bytes to copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from scipy.optimize import linear_sum_assignment

from capplan.datasets import known_arch
from capplan.errors import InputError
from capplan.serving import adapter_bytes
from capplan.spec import Group, Plan, PlanAdapter

_SHARE_DIGITS: Final = 4
_LATENCIES: Final = ("ttft_p99_s", "tpot_p99_ms")


@dataclass(frozen=True)
class GroupChange:
    """A group of the new plan, and the group of the old one that holds most of its adapters.

    Attributes
    ----------
    old, new
        Their ids; None: the group is new, or taken away.
    settings
        (old, new) of each setting that differs, by name; those of a new group are all but the unset ones.
    arriving, leaving
        Adapters that are in one of them only.
    """

    old: str | None
    new: str | None
    settings: Mapping[str, tuple[Any, Any]]
    arriving: tuple[str, ...]
    leaving: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not (self.settings or self.arriving or self.leaving or self.old is None or self.new is None)


@dataclass(frozen=True)
class PlanDiff:
    """Differences of two plans; see `diff_plans`.

    Attributes
    ----------
    plan
        (old, new) of each fact about the whole plan that differs, by name.
    gpus
        (old, new) number of GPUs by kind.
    groups
        Groups that change.
    added, removed
        Adapters of one plan only.
    changed
        Adapters whose rank, rate or path is another.
    moved
        Adapters of both plans that some group gets newly, and some loses.
    predicted
        (old, new) predicted metrics: the sum of throughputs, the worst of the others over the groups.
    copied_adapters, copied_bytes
        Adapters that groups get newly or in another shape, counted once per replica, and their bytes; bytes
        None: the sizes of the base model are not known.
    """

    plan: Mapping[str, tuple[Any, Any]]
    gpus: Mapping[str, tuple[int, int]]
    groups: tuple[GroupChange, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    moved: tuple[str, ...]
    predicted: Mapping[str, tuple[float | None, float | None]]
    copied_adapters: int
    copied_bytes: int | None

    @property
    def is_empty(self) -> bool:
        """Whether the plans deploy the same."""
        return not (self.plan or self.groups or self.added or self.removed or self.changed)

    def as_dict(self) -> dict[str, Any]:
        """Return the differences as JSON data."""
        return asdict(self)


def diff_plans(old: Plan, new: Plan) -> PlanDiff:
    """Return what changes from one plan to another.

    Groups are matched by the adapters that they hold, whatever their ids, such that the fewest bytes are
    copied; groups on other kinds of GPUs are others.

    Raises
    ------
    InputError
        If the plans are for different base models.
    """
    if old.base_model != new.base_model:
        raise InputError(f"must be for base model {old.base_model}", new.base_model, "new plan: base_model")
    sizes = _sizes([old, new])
    pairs = _matched(old.groups, new.groups, sizes)
    changes = tuple(change for pair in pairs if not (change := _group_change(old, new, *pair)).is_empty)
    before, after = old.adapters, new.adapters
    arriving = {name for change in changes for name in change.arriving}
    leaving = {name for change in changes for name in change.leaving}
    replicas = {group.id: group.replicas for group in new.groups}
    reshaped = {name for name in after if name in before and _shape(before[name]) != _shape(after[name])}
    newly = {change.new: reshaped | {*change.arriving} for change in changes}
    copies = [
        (adapter.name, replicas[group.id])
        for group in new.groups
        for adapter in group.adapters
        if adapter.name in newly.get(group.id, reshaped)
    ]
    known = known_arch([new.base_model]) is not None
    return PlanDiff(
        plan=_differing(_facts(old), _facts(new)),
        gpus=_gpus(old, new),
        groups=changes,
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        changed=tuple(
            name for name in after if name in before and _identity(before[name]) != _identity(after[name])
        ),
        moved=tuple(sorted((arriving & leaving) & before.keys() & after.keys())),
        predicted=_predicted(old, new),
        copied_adapters=sum(count for _, count in copies),
        copied_bytes=sum(count * sizes[name] for name, count in copies) if known else None,
    )


def _identity(adapter: PlanAdapter) -> tuple[Any, ...]:
    return adapter.rank, adapter.rate_rps, adapter.path, adapter.target_modules


def _shape(adapter: PlanAdapter) -> tuple[Any, ...]:
    return adapter.rank, adapter.target_modules


def _sizes(plans: Iterable[Plan]) -> dict[str, int]:
    """Return the bytes of each adapter, or its rank if the sizes of the base model are not known."""
    found = {}
    for plan in plans:
        arch = known_arch([plan.base_model])
        for name, adapter in plan.adapters.items():
            modules = adapter.target_modules
            found[name] = adapter.rank if arch is None else adapter_bytes(arch, adapter.rank, modules)
    return found


def _matched(
    old: Sequence[Group], new: Sequence[Group], sizes: Mapping[str, int]
) -> list[tuple[Group | None, Group | None]]:
    """Return pairs of groups by the Hungarian method; the gain is what a group keeps."""
    gain = np.zeros((len(new), len(old)))
    for row, group in enumerate(new):
        own = {each.name for each in group.adapters}
        for column, other in enumerate(old):
            if (group.gpu, group.tp) == (other.gpu, other.tp):
                kept = sum(sizes[each.name] for each in other.adapters if each.name in own)
                # Groups without common adapters are pairs too; equal ids decide between equals.
                gain[row, column] = 1.0 + kept + 0.5 * (group.id == other.id)
    rows, columns = linear_sum_assignment(gain, maximize=True)
    pairs = {
        int(row): int(column) for row, column in zip(rows, columns, strict=True) if gain[row, column] > 0
    }
    left = [group for column, group in enumerate(old) if column not in pairs.values()]
    found: list[tuple[Group | None, Group | None]] = [
        (old[pairs[row]] if row in pairs else None, group) for row, group in enumerate(new)
    ]
    return found + [(group, None) for group in left]


def _group_change(old: Plan, new: Plan, before: Group | None, after: Group | None) -> GroupChange:
    held = [
        {} if group is None else {each.name: round(each.share, _SHARE_DIGITS) for each in group.adapters}
        for group in (before, after)
    ]
    settings = {}
    if after is not None:
        settings = _differing({} if before is None else _settings(old, before), _settings(new, after)) | {
            f"share of {name}": (held[0][name], share)
            for name, share in held[1].items()
            if name in held[0] and held[0][name] != share
        }
    return GroupChange(
        old=None if before is None else before.id,
        new=None if after is None else after.id,
        settings=settings,
        arriving=tuple(name for name in held[1] if name not in held[0]),
        leaving=tuple(name for name in held[0] if name not in held[1]),
    )


def _settings(plan: Plan, group: Group) -> dict[str, Any]:
    """Return what servers of a group are started with."""
    found = group.engine_args.model_dump(mode="json")
    found |= {
        f"engine {name}": value for name, value in plan.engine_of(group).model_dump(mode="json").items()
    }
    scheduling = group.scheduling
    found |= {
        "replicas": group.replicas,
        "profile": group.profile,
        "base share": None if group.base is None else round(group.base.share, _SHARE_DIGITS),
        "scheduler": None if scheduling is None else scheduling[0].policy,
        "cache": None if scheduling is None else scheduling[1].policy,
    }
    return found


def _facts(plan: Plan) -> dict[str, Any]:
    """Return facts about a whole plan."""
    return {
        "GPUs": plan.totals.gpus,
        "USD per hour": plan.totals.usd_per_hour,
        "router": plan.router,
        "re-balancing": plan.rebalance is not None,
        "objective": plan.objective.value,
        "SLO": plan.slo.model_dump(mode="json", exclude_none=True),
        "verdict": plan.verification.verdict,
    }


def _predicted(old: Plan, new: Plan) -> dict[str, tuple[float | None, float | None]]:
    """Return the predicted metrics of both plans: latencies that one of them bounds, and the defaults."""
    latencies = dict.fromkeys((*_LATENCIES, *old.slo.latency_bounds(), *new.slo.latency_bounds()))

    def metrics(plan: Plan) -> dict[str, float | None]:
        found: dict[str, float | None] = {
            "throughput_tok_s": sum(g.replicas * g.predicted.throughput_tok_s for g in plan.groups)
        }
        for name in latencies:
            known = (group.predicted.latency(name) for group in plan.groups)
            found[name] = max((each for each in known if each is not None), default=None)
        found["served_fraction"] = min(group.predicted.served_fraction for group in plan.groups)
        return found

    before, after = metrics(old), metrics(new)
    return {name: (value, after[name]) for name, value in before.items()}


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (before.get(name), after.get(name))
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    }


def _gpus(old: Plan, new: Plan) -> dict[str, tuple[int, int]]:
    counts: dict[str, list[int]] = {}
    for at, plan in enumerate((old, new)):
        for group in plan.groups:
            counts.setdefault(group.gpu, [0, 0])[at] += group.replicas * group.tp
    return {gpu: (before, after) for gpu, (before, after) in counts.items()}
