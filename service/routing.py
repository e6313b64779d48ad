"""Runs routes: authenticates before the body is read, then runs each route in one thread."""

import inspect
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from fastapi import Request, Response
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy.orm import Session
from starlette.routing import BaseRoute

from service import auth

# Threads for authentication and for routes that only use the database. With 40, AnyIO's default, the event
# loop competes with 40 threads for the interpreter: responses are later and not more (docs/security.md).
THREADS = 4
SLOW_THREADS = 32  # for routes that wait for the store or for long computations
_slow: RunVar[CapacityLimiter] = RunVar("slow_routes")  # one per event loop
F = TypeVar("F", bound=Callable[..., Any])


def slow(endpoint: F) -> F:
    """Marks a route that waits for more than the database; it runs in threads of its own."""
    endpoint.__dict__["slow"] = True
    return endpoint


def limit_threads() -> None:
    """Sets the number of threads. Called in the event loop before the first request."""
    to_thread.current_default_thread_limiter().total_tokens = THREADS
    _slow.set(CapacityLimiter(SLOW_THREADS))


class Route(APIRoute):
    """Runs a route, and closes its session, in one thread.

    FastAPI runs a route, the validation of its response and the exit of its dependencies in a thread each. A
    connection held across them waits for a free thread while every thread may wait for a connection.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, _in_one_thread(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if auth.roles_of(self.dependant) is None:
            return handle

        async def authenticate_and_handle(request: Request) -> Response:
            request.state.principal = await auth.authenticate(request)
            return await handle(request)

        return authenticate_and_handle


def require_one_thread(routes: Sequence[BaseRoute]) -> None:
    """Raises, so that the service does not start, if a route of another class needs a thread or roles."""
    for context in iter_route_contexts(routes):
        route = context.original_route
        if not isinstance(route, APIRoute) or isinstance(route, Route):
            continue
        if not inspect.iscoroutinefunction(route.endpoint) or auth.roles_of(route.dependant) is not None:
            raise RuntimeError(f"{context.path}: make its router with APIRouter(route_class=Route)")


def _in_one_thread(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Closes the sessions of a route, which returns their connections, in the thread that ran it."""
    is_slow = getattr(endpoint, "slow", False)

    def run(arguments: dict[str, Any]) -> Any:
        with ExitStack() as closing:
            for session in filter(_is_session, arguments.values()):
                closing.enter_context(session)
            return endpoint(**arguments)

    @wraps(endpoint)
    async def in_one_thread(**arguments: Any) -> Any:
        return await to_thread.run_sync(run, arguments, limiter=_slow.get() if is_slow else None)

    return in_one_thread


def _is_session(argument: object) -> bool:
    return isinstance(argument, Session)
