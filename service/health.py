"""Liveness and readiness: whether the process runs, and whether its servers answer."""

import socket
from collections.abc import Callable
from importlib.metadata import version
from typing import Literal

import redis
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from sqlalchemy import Engine

from core.errors import NotReady
from core.heartbeats import alive
from core.settings import ServiceSettings
from service.refreshed import Refreshed

router = APIRouter(tags=["health"])
State = Literal["ok", "down"]


class Alive(BaseModel):
    status: Literal["ok"] = "ok"
    version: str


class Ready(BaseModel):
    """`needs` determines the status code; `workers` is informational."""

    needs: dict[str, State]
    workers: dict[str, State]


_ALIVE = Response(Alive(version=version("sluice")).model_dump_json(), media_type="application/json")


@router.get("/healthz", response_model=Alive)
async def healthz(_: Request) -> Response:
    return _ALIVE


@router.get("/readyz", response_model=Ready)
async def readyz(request: Request) -> Response:
    readiness: Refreshed[Ready] = request.app.state.readiness
    ready = await readiness.get()
    if down := ", ".join(name for name, state in ready.needs.items() if state == "down"):
        raise NotReady(f"No answer from: {down}. Try again shortly.", needs=ready.needs)
    return Response(ready.model_dump_json(), media_type="application/json")


def readiness(settings: ServiceSettings, engine: Engine) -> Refreshed[Ready]:
    """Checks the servers, in one thread and at most twice a second however many requests there are."""

    def check() -> Ready:
        serving: set[str] = set()
        needs = {
            "database": _try(lambda: serving.update(alive(engine))),
            "queue": _try(lambda: _ask_queue(settings)),
            "store": _try(lambda: _ask_store(settings)),
        }
        workers: dict[str, State] = {
            role: "ok" if role in serving else "down" for role in ("train", "publish", "sweep")
        }
        return Ready(needs=needs, workers=workers)

    return Refreshed(check)


def _try(check: Callable[[], None]) -> State:
    try:
        check()
    except Exception:  # any failure means that the server cannot be used now
        return "down"
    return "ok"


def _ask_queue(settings: ServiceSettings) -> None:
    with redis.Redis.from_url(
        str(settings.queue_url), socket_timeout=2, socket_connect_timeout=2
    ) as connection:
        connection.ping()


def _ask_store(settings: ServiceSettings) -> None:
    # The service has no permission to list or read, so it only checks that the server accepts connections.
    endpoint = settings.s3_endpoint
    host = endpoint.host if endpoint else f"s3.{settings.s3_region}.amazonaws.com"
    port = endpoint.port if endpoint else 443
    socket.create_connection((host or "", port or 443), timeout=2).close()
