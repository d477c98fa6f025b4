"""The engine's OpenAI-compatible server; a tour that follows one request is in docs/engine.md."""

from capplan.engine.server.app import make_app
from capplan.engine.server.launch import Instance, run_instance
from capplan.engine.server.process import Server, bind, serve, url_of
from capplan.engine.server.service import Service
from capplan.engine.server.settings import ServerSettings

__all__ = [
    "Instance",
    "Server",
    "ServerSettings",
    "Service",
    "bind",
    "make_app",
    "run_instance",
    "serve",
    "url_of",
]
