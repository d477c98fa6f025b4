"""The engine's OpenAI-compatible server; a tour that follows one request is in docs/engine.md."""

from capplan.engine.server.limiter import ServerSettings
from capplan.engine.server.process import EngineServer, InstanceConfig, bind, run_instance, serve, url_of
from capplan.engine.server.routes import make_app
from capplan.engine.server.service import Service

__all__ = [
    "EngineServer",
    "InstanceConfig",
    "ServerSettings",
    "Service",
    "bind",
    "make_app",
    "run_instance",
    "serve",
    "url_of",
]
