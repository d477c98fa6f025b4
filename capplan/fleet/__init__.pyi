from ._app import run_router
from ._fleet import RouterConfig
from ._launcher import (
    InstanceSpec,
    Launcher,
    LocalLauncher,
    RayLauncher,
    ServingOptions,
    instances_of,
    spread_over_gpus,
)
from ._rebalancing import RebalancingConfig
from ._registered_adapters import RegistrySettings
from ._routing import RoutingSettings

__all__ = [
    "InstanceSpec",
    "Launcher",
    "LocalLauncher",
    "RayLauncher",
    "RebalancingConfig",
    "RegistrySettings",
    "RouterConfig",
    "RoutingSettings",
    "ServingOptions",
    "instances_of",
    "run_router",
    "spread_over_gpus",
]
