from ._app import run_router
from ._fleet import RouterConfig
from ._instances import InstanceSpec, ServingOptions, instances_of, spread_over_gpus
from ._launcher import Launcher, LocalLauncher, RayLauncher
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
