"""Puts the HTTP service together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from core.database import connect
from core.settings import ServiceSettings
from service import health, problems, requests


def create_app(settings: ServiceSettings) -> FastAPI:
    engine = connect(str(settings.database_url))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.dispose()

    app = FastAPI(title="Sluice", version=version("sluice"), lifespan=lifespan)
    app.state.settings = settings
    app.state.engine = engine
    problems.install(app)
    app.add_middleware(requests.RequestIds)
    app.include_router(health.router)
    return app
