"""OpenAI-compatible server of the engine; docs/how-it-works/engine.md follows one request through it."""

from capplan.server._limits import ServerLimits
from capplan.server._process import DrainingServer, InstanceConfig, bind, run_instance, url_of
from capplan.server._routes import ServerApp
from capplan.server._service import Service
from capplan.server._settings import PoolSettings, ServerSettings

__all__ = [
    "DrainingServer",
    "InstanceConfig",
    "PoolSettings",
    "ServerApp",
    "ServerLimits",
    "ServerSettings",
    "Service",
    "bind",
    "run_instance",
    "url_of",
]
