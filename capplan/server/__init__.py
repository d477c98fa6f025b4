"""OpenAI-compatible server of the engine; docs/how-it-works/engine.md follows one request through it."""

from capplan.server.limits import ServerLimits
from capplan.server.process import DrainingServer, InstanceConfig, bind, run_instance, url_of
from capplan.server.routes import ServerApp
from capplan.server.service import Service
from capplan.server.settings import PoolSettings, ServerSettings

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
