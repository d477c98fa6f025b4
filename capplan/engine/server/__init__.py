"""OpenAI-compatible server of the engine; docs/how-it-works/engine.md follows one request through it."""

from capplan.engine.server.limiter import PoolSettings, ServerSettings
from capplan.engine.server.limits import ServerLimits
from capplan.engine.server.process import DrainingServer, InstanceConfig, bind, run_instance, url_of
from capplan.engine.server.routes import make_app
from capplan.engine.server.service import Service

__all__ = [
    "DrainingServer",
    "InstanceConfig",
    "PoolSettings",
    "ServerLimits",
    "ServerSettings",
    "Service",
    "bind",
    "make_app",
    "run_instance",
    "url_of",
]
