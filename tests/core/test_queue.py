"""The doorbell rings at the right door, carries one id, and a role hears only its own."""

import base64
import json
import pickle
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import redis

from core.queue import celery_app, wake_worker


@pytest.fixture
def queues(servers):
    return {role: env["SLUICE_QUEUE_URL"] for role, env in servers.environments.items()}


@pytest.mark.parametrize("queue", ["train", "publish"])
def test_a_ring_reaches_the_worker_of_its_queue_as_one_id(queue, queues):
    heard = []
    app, id = celery_app(queue, queues[queue]), uuid.uuid4()
    wake_worker(celery_app(queue, queues["service"]), f"{queue}.job", id)
    with app.connection_for_read() as connection, app.amqp.TaskConsumer(connection) as consumer:
        consumer.callbacks = [lambda body, message: (heard.append((body, message.headers)), message.ack())]
        while not any(body[0] == [str(id)] for body, _ in heard):  # others ring this bell too
            connection.drain_events(timeout=60)
    body, headers = heard[-1]
    assert body[1] == {}
    assert headers["task"] == f"{queue}.job"


@pytest.mark.parametrize(("role", "key"), [("train", "publish:publish"), ("publish", "train:train")])
def test_a_worker_can_neither_hear_nor_ring_the_other_queue(role, key, queues):
    with redis.Redis.from_url(queues[role]) as connection:
        for forbidden in (
            lambda: connection.lpush(key, "forged"),
            lambda: connection.brpop([key], timeout=1),
            lambda: connection.lrange(key, 0, -1),
            lambda: connection.delete(key),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                forbidden()


@pytest.mark.parametrize("role", ["service", "train", "publish", "sweep"])
def test_no_role_commands_the_server(role, queues):
    with redis.Redis.from_url(queues[role]) as connection:
        for forbidden in (connection.flushall, connection.config_get, connection.acl_list, connection.keys):
            with pytest.raises(redis.exceptions.NoPermissionError):
                forbidden()


def test_a_message_has_at_most_a_megabyte(queues):
    with redis.Redis.from_url(queues["service"]) as connection, pytest.raises(redis.exceptions.RedisError):
        connection.lpush(f"train:large-{uuid.uuid4().hex}", b"x" * (1 << 20 | 1))


def test_nobody_gets_in_without_a_password(queues):
    at = queues["train"].split("@")[1]
    with (
        redis.Redis.from_url(f"redis://{at}") as connection,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        connection.ping()


WORKER = """
import os, sys
from core.queue import celery_app
app = celery_app("train", sys.argv[1])
app.conf.task_default_queue = sys.argv[2]
for name in ("train.run", "train.check"):
    def run(*args, name=name, **kwargs):
        os.write(1, f"{name} {args} {kwargs}\\n".encode())
    app.task(run, name=name)
quiet = ["--loglevel=critical", "--without-heartbeat", "--without-gossip", "--without-mingle"]
app.worker_main(["--quiet", "worker", "--pool=threads", "--concurrency=1", *quiet])
"""
ID = str(uuid.UUID(int=7))
OTHER = {"task": "train.check", "args": [ID], "kwargs": {}, "options": {}, "immutable": True}
PROPERTIES = {
    "correlation_id": "c", "delivery_mode": 2, "delivery_info": {"exchange": "", "routing_key": "train"},
    "priority": 0, "body_encoding": "base64", "delivery_tag": "t",
}  # fmt: skip


def message(body=([ID], {}, {}), *, properties=PROPERTIES, **headers):
    """A message as Celery sends it, with other headers, another body or other properties."""
    given = {"lang": "py", "task": "train.run", "id": "i", "root_id": "i"} | headers
    encoded = base64.b64encode(json.dumps(body).encode()).decode()
    return {
        "body": encoded, "content-type": "application/json", "content-encoding": "utf-8", "headers": given,
        "properties": properties,
    }  # fmt: skip


def embedding(**embedded):
    return message([[ID], {}, embedded])


NOTHING = [  # is done for any of these, and the worker goes on
    "forged", b"\xff\xfe", "1", "null", "[]", "{}", "[" * 100_000, "9" * 5_000,
    message(task=None), message(task=["train.run"]), message(task={}), message(task="train.unknown"),
    message(task="os.system"), message(task="celery.backend_cleanup"),
    message([[OTHER, [ID, ID]], {}, {}], task="celery.map"),
    message([[[OTHER], ["x", None], ["y", None]], {}, {}], task="celery.group"),
    message(["g", OTHER, 1, 5, [["x", None]]], task="celery.chord_unlock"),
    message() | {"headers": None}, message() | {"headers": []}, message() | {"headers": {}},
    message() | {"body": "%%%"}, message() | {"body": None}, message() | {"body": {}},
    message(1), message({}), message([]), message([[]]), message([1, {}, {}]), message([[1], {}, {}]),
    message([[None], {}, {}]), message([["not an id"], {}, {}]), message([[], {"id": ID}, {}]),
    message([[ID, ID], {}, {}]), message(["x" * 100_000, {}, {}]),
    message({"task": "train.run", "args": [ID], "kwargs": {}, "id": "1"}) | {"headers": {}},
    message() | {"body": base64.b64encode(pickle.dumps("run this")).decode()},
]  # fmt: skip
ONE_RUN = [  # and no more than that: of the rest of the message nothing is read
    message(), message(), message(id=["i"]), message(id=None), message(eta="2099-01-01T00:00:00"),
    message(eta=5),
    message(expires="1999-01-01T00:00:00"), message(expires=[]), message(timelimit="x"),
    message(timelimit=[1]),
    message(retries="x"), message(lang="c"), message(compression="none"),
    message(stamps=1, stamped_headers=[1]),
    message(group={}, group_index="x"), message(shadow={}, origin=[], argsrepr=7),
    message([[ID], {"more": 1}, {}]), message([[ID], [], None]), message([[ID]]),
    embedding(callbacks=[OTHER]), embedding(errbacks=[OTHER]), embedding(chain=[OTHER]),
    embedding(chord=OTHER),
    embedding(callbacks=[1]), message(properties=None), message(properties={}),
    message(properties=PROPERTIES | {"delivery_info": 7}),
    message(properties=PROPERTIES | {"delivery_tag": []}),
    message(properties=PROPERTIES | {"body_encoding": "rot13"}),
    message(properties=PROPERTIES | {"reply_to": []}),
    message() | {"content-type": "application/x-python-serialize"}, message() | {"content-encoding": "rot13"},
    {k: v for k, v in message().items() if k != "properties"},
]  # fmt: skip


def test_of_a_forged_message_a_worker_takes_one_id_or_nothing_and_goes_on(queues):
    queue = f"forged-{uuid.uuid4().hex}"
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, queues["train"], queue], cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    last = uuid.uuid4()
    try:
        with redis.Redis.from_url(queues["train"]) as connection:
            for forged in NOTHING + ONE_RUN + NOTHING + [message(task="train.check")]:
                text = forged if isinstance(forged, str | bytes) else json.dumps(forged)
                connection.lpush(f"train:{queue}", text)
            sender = celery_app("train", queues["service"])
            sender.conf.task_default_queue = queue
            wake_worker(sender, "train.run", last)
            ran = [worker.stdout.readline().strip() for _ in range(len(ONE_RUN) + 2)]
            left = connection.llen(f"train:{queue}")
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    assert ran[:-2] == [f"train.run ('{ID}',) {{}}"] * len(ONE_RUN)
    assert ran[-2:] == [f"train.check ('{ID}',) {{}}", f"train.run ('{last}',) {{}}"]
    assert left == 0
