from ._profiler import EngineSetting, ServerProfilingOptions, ServerProfilingResult, profile_server

__all__ = [
    "EngineSetting",
    "ServerProfilingOptions",
    "ServerProfilingResult",
    "profile_server",
]
