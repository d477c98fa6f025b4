"""From a workload file to a multi-LoRA serving plan that is verified before anyone deploys it.

Public names are loaded on first use (PEP 562): ``import capplan`` loads neither pandas nor scikit-learn,
and a program that only reads a plan never pays for the twin.
"""

from importlib import import_module
from types import MappingProxyType

TYPE_CHECKING = False  # not typing's: Ctrl-C during its import would print a traceback

if TYPE_CHECKING:
    from capplan import errors
    from capplan.datasets import list_profiles, load_profile
    from capplan.deploy import export
    from capplan.errors import InfeasibleError, InputError
    from capplan.models import load_surrogate
    from capplan.planner import Assignment, Problem, plan
    from capplan.planner.explain import explain
    from capplan.registry import AdapterRegistry, RegisteredAdapter
    from capplan.reports import report
    from capplan.spec import Adapter, EngineArgs, EngineConfig, Lengths, Plan, Profile, Slo, Workload
    from capplan.twin import SimulationResult, simulate, simulate_detailed, sweep
    from capplan.workload import load_workload

    __version__: str

__all__ = [
    "Adapter",
    "AdapterRegistry",
    "Assignment",
    "EngineArgs",
    "EngineConfig",
    "InfeasibleError",
    "InputError",
    "Lengths",
    "Plan",
    "Problem",
    "Profile",
    "RegisteredAdapter",
    "SimulationResult",
    "Slo",
    "Workload",
    "__version__",
    "errors",
    "explain",
    "export",
    "list_profiles",
    "load_profile",
    "load_surrogate",
    "load_workload",
    "plan",
    "report",
    "simulate",
    "simulate_detailed",
    "sweep",
]

_MODULES = {
    "capplan.reports": ("report",),
    "capplan.datasets": ("list_profiles", "load_profile"),
    "capplan.deploy": ("export",),
    "capplan.errors": ("InfeasibleError", "InputError"),
    "capplan.models": ("load_surrogate",),
    "capplan.planner": ("Assignment", "Problem", "plan"),
    "capplan.planner.explain": ("explain",),
    "capplan.spec": (
        *("Adapter", "EngineArgs", "EngineConfig", "Lengths", "Plan", "Profile", "Slo", "Workload"),
    ),
    "capplan.workload": ("load_workload",),
    "capplan.registry": ("AdapterRegistry", "RegisteredAdapter"),
    "capplan.twin": ("SimulationResult", "simulate", "simulate_detailed"),
    "capplan.twin._sweep": ("sweep",),
}
_HOME = MappingProxyType({name: module for module, names in _MODULES.items() for name in names})


def _resolve(name: str) -> object:
    if name == "__version__":
        return import_module("capplan.version").installed_version()
    if name == "errors":
        return import_module("capplan.errors")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers see the imports above instead, and so notice a misspelt name
    __getattr__ = _resolve


def __dir__() -> list[str]:
    return list(__all__)
