"""Prometheus metrics: counts and durations of requests, and nothing about data."""

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["method", "route", "status"]
        self._requests = Counter("sluice_requests", "Requests served", labels, registry=self.registry)
        self._seconds = Histogram(
            "sluice_request_seconds", "Time to serve", ["route"], registry=self.registry
        )

    def observe(self, *, method: str, route: str | None, status: int, seconds: float) -> None:
        # Unknown paths are not labels: their text is chosen by the caller.
        self._requests.labels(method, route or "none", str(status)).inc()
        self._seconds.labels(route or "none").observe(seconds)


def install(app: FastAPI) -> Metrics:
    metrics = Metrics()

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    async def show() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return metrics
