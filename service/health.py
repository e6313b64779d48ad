"""Is this process alive, and does it have what it needs?"""

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
    """`needs` decides the status of the answer; `workers` is for people to look at."""

    needs: dict[str, State]
    workers: dict[str, State]


_ALIVE = Response(Alive(version=version("sluice")).model_dump_json(), media_type="application/json")


@router.get("/healthz", response_model=Alive)
async def healthz(_: Request) -> Response:
    return _ALIVE


@router.get("/readyz", response_model=Ready)
async def readyz(request: Request) -> Response:
    readiness: Refreshed[Ready] = request.app.state.readiness
    found = await readiness.get()
    if "down" in found.needs.values():
        down = ", ".join(name for name, state in found.needs.items() if state == "down")
        raise NotReady(f"No answer from: {down}. Try again shortly.", needs=found.needs)
    return Response(found.model_dump_json(), media_type="application/json")


def readiness(settings: ServiceSettings, engine: Engine) -> Refreshed[Ready]:
    """However many ask, the servers are asked by one thread and at most twice a second."""

    def ask() -> Ready:
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

    return Refreshed(ask)


def _try(ask: Callable[[], None]) -> State:
    try:
        ask()
    except Exception:  # whatever it was, the part is of no use now
        return "down"
    return "ok"


def _ask_queue(settings: ServiceSettings) -> None:
    with redis.Redis.from_url(
        str(settings.queue_url), socket_timeout=2, socket_connect_timeout=2
    ) as connection:
        connection.ping()


def _ask_store(settings: ServiceSettings) -> None:
    # The service may not list or read anything here, so reaching the server is all there is to ask.
    endpoint = settings.s3_endpoint
    host = endpoint.host if endpoint else f"s3.{settings.s3_region}.amazonaws.com"
    port = endpoint.port if endpoint else 443
    socket.create_connection((host or "", port or 443), timeout=2).close()
