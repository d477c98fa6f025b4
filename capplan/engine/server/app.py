"""The application: routes, errors, gate, and the engine's thread that lives as long as it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from capplan.engine.server.api_error import answer_errors
from capplan.engine.server.gate import Gate
from capplan.engine.server.routes import router
from capplan.engine.server.service import Service


def make_app(service: Service) -> FastAPI:
    """Return the ASGI application of a service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.driver.start()
        yield
        await asyncio.to_thread(service.driver.stop)

    # No pages of documentation: they would load scripts from elsewhere. The schema is at /openapi.json.
    app = FastAPI(title="capplan", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    app.add_middleware(Gate, settings=service.settings, refuse=partial(service.refuse_if_full, 1))
    answer_errors(app)
    return app
