"""Task queues, one per kind of worker. A message holds a task name and one id; there are no results.

Guarantee: whatever is written into a queue, a worker reads a task name and an id from it and nothing else;
the database rows decide what it does. docs/security.md#releases-and-clients
"""

import base64
import json
import re
from typing import Any, Literal
from uuid import UUID, uuid4

from celery import Celery
from kombu import transport
from kombu.exceptions import OperationalError
from kombu.transport import redis

from core import log

Queue = Literal["train", "publish"]
_log = log.get("queue")
_TASK = re.compile(r"(train|publish)\.[a-z_]+")  # Celery's own tasks are named celery.*


class Channel(redis.Channel):
    def _brpop_read(self, **options: Any) -> bool | None:
        try:
            done: bool | None = super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        except (ValueError, RecursionError):  # not JSON: without this the worker would stop
            _log.warning("message_not_understood")
            return True
        return done


class Transport(redis.Transport):
    """Redis broker that parses each message and builds a new one for Celery.

    Celery messages can name callbacks, chains, times and limits, and a field of the wrong type would crash
    the worker together with its job.
    """

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        try:
            task = message["headers"]["task"]
            [id], *_ = json.loads(base64.b64decode(message["body"], validate=True))
            if not _TASK.fullmatch(task):
                raise ValueError(task)
            plain = _message(task, UUID(id), queue)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            _log.warning("message_not_understood")
            return
        super()._deliver(plain, queue)  # type: ignore[no-untyped-call]


# Celery looks up the transport class of a URL here.
transport.TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), f"{__name__}:Transport"))


def _message(task: str, id: UUID, queue: str) -> dict[str, Any]:
    """What Celery sends for a task with one id and no options."""
    body, mark = json.dumps([[str(id)], {}, {}]), str(uuid4())
    return {
        "body": base64.b64encode(body.encode()).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"lang": "py", "task": task, "id": mark, "root_id": mark, "ignore_result": True},
        "properties": {
            "correlation_id": mark,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid4()),
        },
    }


def celery_app(queue: Queue, url: str, **options: Any) -> Celery:
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
            "visibility_timeout": 3600,  # a second delivery finds no work: the database row is claimed
            "unacked_restore_interval": 2,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
        },
        **options,
    )
    return app


def wake_worker(app: Celery, name: str, id: UUID) -> None:
    """Sends one id, after the transaction is committed. The sweeper sends lost messages again."""
    try:
        app.send_task(name, args=[str(id)], retry=False)
    except OperationalError as problem:
        _log.warning("task_not_sent", task=name, kind=type(problem).__name__)
