"""`profile_server`: one running server, measured at many operating points, as tables for calibration."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import aiohttp

from capplan.errors import InputError
from capplan.profiling.load.bench import stopped_by_signals
from capplan.profiling.load.preflight import preflight
from capplan.profiling.load.schedule import BASE
from capplan.profiling.load.session import open_session
from capplan.profiling.load.settings import Target
from capplan.profiling.server.folder import Folder
from capplan.profiling.server.info import EngineInfo, engine_info
from capplan.profiling.server.options import EngineSetting, ProfilingOptions
from capplan.profiling.server.progress import OnProgress
from capplan.profiling.server.session import Profiled, Server, Session

_TIMEOUT_S: Final = 30.0


def profile_server(
    target: Target,
    adapters: Mapping[str, int],
    setting: EngineSetting,
    out: Folder,
    options: ProfilingOptions | None = None,
    on_progress: OnProgress | None = None,
) -> Profiled:
    """Measure a server that serves nobody else meanwhile, and write what was found after every point.

    Points that the folder has already for this setting are not measured again. In the main thread an
    interrupt (Ctrl-C) ends the measuring; what was found stays.

    Parameters
    ----------
    target
        The server; its base model is asked, too, if it is named.
    adapters
        Adapters to ask for, with their ranks.
    setting
        How it was started.
    out
        Where tables go.
    options
        How much is measured.
    on_progress
        Called with a stage, how much of it is done, and how much there is.

    Raises
    ------
    InputError
        When the server cannot be asked, or a setting is missing or wrong.
    """
    settings = options or ProfilingOptions()
    return asyncio.run(_profile(target, dict(adapters), setting, out, settings, on_progress or _ignore))


async def _profile(
    target: Target,
    adapters: dict[str, int],
    setting: EngineSetting,
    out: Folder,
    options: ProfilingOptions,
    on_progress: OnProgress,
) -> Profiled:
    with_base = target.base_model is not None
    if not adapters and not with_base:
        raise InputError("must name an adapter, unless a base model is named", location="adapters")
    asked = [BASE, *adapters] if with_base else list(adapters)
    found = await preflight(target, asked, options.prompt_form)
    info = await _engine_info(target)
    if adapters and setting.a_max is None and info.a_max is None:
        raise InputError("is required: the server does not tell its adapter slots", location="a_max")
    session = Session(Server(target, adapters, found, info), setting, out, options, on_progress)
    stop = asyncio.Event()
    with stopped_by_signals(stop):
        work = asyncio.create_task(session.measure())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for each in (work, stopped):
            each.cancel()
        await asyncio.wait({work, stopped})
    session.close()
    if not work.cancelled() and (error := work.exception()) is not None:
        raise error
    return session.profiled(partial=stop.is_set())


async def _engine_info(target: Target) -> EngineInfo:
    """Return what the server says of its engine; nothing where it has no metrics."""
    try:
        async with (
            asyncio.timeout(_TIMEOUT_S),
            open_session(target) as session,
            session.get(target.at("/metrics")) as response,
        ):
            return engine_info(await response.text("utf-8", "replace"))
    except (TimeoutError, OSError, aiohttp.ClientError):
        return EngineInfo()


def _ignore(stage: str, done: int, total: int) -> None:
    """Show nothing."""
