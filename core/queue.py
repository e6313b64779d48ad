"""The doorbell: a queue per kind of worker that carries one id, and no result."""

from typing import Any, Literal
from uuid import UUID

from celery import Celery
from kombu.exceptions import OperationalError

from core import log

Queue = Literal["train", "publish"]
_log = log.get("queue")


def bell(queue: Queue, url: str, **options: Any) -> Celery:
    """The Celery application of one queue; keys are prefixed by its name, so credentials can be too."""
    app = Celery(queue, broker=url)
    app.conf.update(
        task_default_queue=queue,
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_store_eager_result=False,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "global_keyprefix": f"{queue}:",
            "visibility_timeout": 3600,  # rows decide who works; a second delivery finds nothing to do
            "unacked_restore_interval": 2,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
        },
        **options,
    )
    return app


def ring(app: Celery, name: str, id: UUID) -> None:
    """Rings after the transaction is committed. A ring that is lost does no harm: the sweeper rings again."""
    try:
        app.send_task(name, args=[str(id)], retry=False)
    except OperationalError as problem:
        _log.warning("bell_unanswered", task=name, kind=type(problem).__name__)
