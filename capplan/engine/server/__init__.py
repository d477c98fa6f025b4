"""OpenAI-compatible server of the engine; docs/how-it-works/engine.md follows one request through it."""

from capplan.engine.server.limits import ServerLimits
from capplan.engine.server.process import DrainingServer, InstanceConfig, bind, run_instance, url_of
from capplan.engine.server.routes import ServerApp
from capplan.engine.server.service import Service
from capplan.engine.server.settings import PoolSettings, ServerSettings

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
