from ._http_protocol import CLIENT, ClientLink
from ._metrics import MetricKind, metric_family
from ._process import DrainingServer, InstanceConfig, bind, run_instance, url_of
from ._protocol import (
    MAX_MODEL_NAME,
    ApiError,
    add_error_handlers,
    error_code,
    model_card,
    parsed,
    unknown_model,
)
from ._routes import ServerApp
from ._service import Service
from ._settings import OPEN_ADAPTERS, PoolSettings, ServerLimits, ServerSettings, is_loopback
from ._state import GENERATION_PATHS, RequestLimiter, ServerState, generates

__all__ = [
    "CLIENT",
    "GENERATION_PATHS",
    "MAX_MODEL_NAME",
    "OPEN_ADAPTERS",
    "ApiError",
    "ClientLink",
    "DrainingServer",
    "InstanceConfig",
    "MetricKind",
    "PoolSettings",
    "RequestLimiter",
    "ServerApp",
    "ServerLimits",
    "ServerSettings",
    "ServerState",
    "Service",
    "add_error_handlers",
    "bind",
    "error_code",
    "generates",
    "is_loopback",
    "metric_family",
    "model_card",
    "parsed",
    "run_instance",
    "unknown_model",
    "url_of",
]
