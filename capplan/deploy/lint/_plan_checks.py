"""Rules on plans and workloads."""

from __future__ import annotations

from collections.abc import Iterator

from capplan.deploy._servers import engine_flags
from capplan.deploy.lint._parts import PlanFile, WorkloadFile
from capplan.deploy.lint._rule import Context, Hit
from capplan.errors import InputError
from capplan.spec import require_adapter

_MOST_NAMES = 5


def not_verified(part: PlanFile, _: Context) -> Iterator[Hit]:
    """Yield that a plan has no verdict, or an undecided one."""
    if not _has_failed(part):
        yield from _broken_verification(part, "verification.ok")


def verification_failed(part: PlanFile, _: Context) -> Iterator[Hit]:
    """Yield that a bound failed."""
    if _has_failed(part):
        yield from _broken_verification(part, "verification.ok")


def changed_since(part: PlanFile, _: Context) -> Iterator[Hit]:
    """Yield that the verdict is on another plan."""
    yield from _broken_verification(part, "verification.digest")


def _has_failed(part: PlanFile) -> bool:
    check = part.plan.verification
    return bool(check.seeds) and (check.verdict == "failed" or any(not group.ok for group in check.groups))


def _broken_verification(part: PlanFile, key: str) -> Iterator[Hit]:
    try:
        part.plan.require_verified()
    except InputError as error:
        if error.location == key:
            yield Hit(str(error))


def contradicted_by_folder(part: PlanFile, _: Context) -> Iterator[Hit]:
    """Yield the adapters of a plan whose folders on this machine are of others."""
    for adapter in part.plan.adapters.values():
        facts = (adapter.path, adapter.rank, adapter.target_modules)
        try:
            require_adapter(*facts, part.plan.base_model, f"adapter {adapter.name}")
        except InputError as error:
            yield Hit(str(error))


def needs_missing_flag(part: PlanFile, _: Context) -> Iterator[Hit]:
    """Yield the groups of a plan that need a flag which their version of vLLM lacks."""
    for group in part.plan.groups:
        try:
            engine_flags(part.plan, group)
        except InputError as error:
            if error.location.endswith("engine version"):
                yield Hit(str(error))


def idle_adapters(part: WorkloadFile, _: Context) -> Iterator[Hit]:
    """Yield that adapters have no requests; those of a trace are in its requests."""
    idle = [each.name for each in part.workload.adapters if each.rate_rps == 0]
    if idle and part.workload.trace is None:
        total = len(part.workload.adapters)
        yield Hit(f"{len(idle)} of {total} adapters have rate_rps 0: {listed(idle)}")


def no_objectives(part: WorkloadFile, _: Context) -> Iterator[Hit]:
    """Yield that a workload states no service-level objective."""
    if not part.workload.slo.model_fields_set:
        yield Hit("slo is absent")


def guessed_trace(part: WorkloadFile, _: Context) -> Iterator[Hit]:
    """Yield what the reader of a trace guessed."""
    notes = () if part.workload.trace is None else part.workload.trace.notes
    for note in notes:
        if "trace.time_unit" in note:  # the others say what is left out
            yield Hit(note)


def listed(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
