"""Creates the FastAPI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from core.database import connect
from core.queue import celery_app
from core.settings import ServiceSettings
from core.stores import s3
from core.stores.public import DownloadSigner
from core.stores.uploads import UploadStore
from service import audit_log, auth, health, metrics, problems, requests
from service.audit import Refusals
from service.budget import routes as budget
from service.datasets import routes as datasets
from service.jobs import routes as jobs
from service.limits import Bodies, Rates
from service.oidc import SingleSignOn
from service.overload import Admission, Overload, Slots
from service.people import routes as people
from service.refreshed import Refreshed
from service.releases import routes as releases
from service.routing import limit_threads, require_one_thread
from service.teams import routes as teams
from sluice.envelope import WrappingKey

# Four processes on one machine stay below PostgreSQL's default of 100 connections.
POOL = 15
STREAMS = 200  # open event streams, each of which reads its job every second


def create_app(settings: ServiceSettings) -> FastAPI:
    engine = connect(str(settings.database_url), pool_size=POOL)
    # A separate pool: health checks and well-known documents do not wait for the connections of routes.
    health_engine = connect(str(settings.database_url), pool_size=1)
    store = s3.client_for(settings)
    queue = str(settings.queue_url)
    refusals = Refusals(engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        limit_threads()
        yield
        refusals.flush(all=True)
        engine.dispose()
        health_engine.dispose()
        store.close()

    app = FastAPI(
        title="Sluice",
        version=version("sluice"),
        summary="Releases synthetic data under differential privacy, with an epsilon that is true.",
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
        responses=problems.DOCUMENTED,
    )
    app.state.settings = settings
    app.state.engine = engine
    app.state.readiness = health.readiness(settings, health_engine)
    app.state.signing_keys = Refreshed(lambda: releases.signing_keys(health_engine))
    app.state.revocations = Refreshed(lambda: releases.newest_revocations(health_engine))
    app.state.uploads = UploadStore(store, settings.private_bucket)
    app.state.downloads = DownloadSigner(store, settings.public_bucket)
    app.state.upload_key = WrappingKey(settings.upload_public_key)
    app.state.queues = {"train": celery_app("train", queue), "publish": celery_app("publish", queue)}
    app.state.refusals = refusals
    app.state.rates = Rates(settings.requests_per_minute)
    app.state.sign_on = SingleSignOn(settings) if settings.oidc_issuer else None
    problems.install(app)
    app.add_middleware(Bodies)
    app.state.admission = Admission(settings)
    app.state.streams = Slots(total=STREAMS, per_key=STREAMS // 4)
    in_memory = {
        "/healthz": health.healthz, "/readyz": health.readyz,
        "/.well-known/sluice-keys.json": releases.keys,
        "/.well-known/sluice-revocations.json": releases.revocations,
    }  # fmt: skip
    app.add_middleware(Overload, admission=app.state.admission, in_memory=in_memory)
    app.add_middleware(requests.RequestIds, metrics=metrics.install(app))
    routers = (
        health.router, datasets.router, datasets.well_known, jobs.quotes, jobs.jobs, releases.router,
        releases.well_known, budget.router, people.router, teams.router, audit_log.router,
    )  # fmt: skip
    for router in routers:
        app.include_router(router)
    app.state.permissions = auth.permissions(app.routes)
    require_one_thread(app.routes)
    return app
